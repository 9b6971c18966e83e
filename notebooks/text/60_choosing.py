# %% [markdown]
# # Which framework here?
#
# For each network that was measured: the fastest setting, by how much, with which settings of batch, threads and input,
# and what limits it. A setting is a framework in one of its ways of running; ties are called ties. On the command line
# `steptime choose NETWORK` says the same.

# %% tags=["parameters"]
out: str = ""

# %%
import pandas as pd
from IPython.display import Markdown, display

from steptime.core.errors import InputError
from steptime.core.files import project_root, write_text
from steptime.model import cases, choosing
from steptime.notebook import campaign_folders, out_folder
from steptime.report import panels, style
from steptime.report.markup import number

root = project_root()
folder = out_folder(out, "choosing")
style.use()
pd.set_option("display.max_colwidth", None, "display.max_rows", None)


def read(name: str) -> pd.DataFrame:
    """A table of the notebook on single devices."""
    path = root / f"data/derived/single_device/{name}.csv"
    if not path.is_file():
        raise InputError(f"{path}: is missing; run `steptime run single_device` (or `make study`) first")
    return pd.read_csv(path)


every, standing, phases = (read(name) for name in ("cases", "standings", "phases"))
folders = campaign_folders(root)
names = sorted(every["campaign"].unique(), key=lambda name: (name == "local", name))
machines = {
    name: choosing.machine_of(path, root / "data/raw/machine/machine.json" if name == "local" else None)
    for name, path in folders.items()
}
answers: dict[str, list[choosing.Choice]] = {}
for name in names:
    main = cases.main_conditions(every[every["campaign"] == name]).sort_values("network", kind="stable")
    of_campaign = (table[table["campaign"] == name] for table in (standing, phases))
    answers[name] = choosing.choices(main, *of_campaign, machines.get(name))

# %% [markdown]
# ## The answers
#
# Under like conditions for all settings of a network: the fewest threads measured, input read in sequence, one batch.
# The limit compares the step with the least time that the machine's measured peaks allow: what its layers would take at
# the peak of a matrix product (*arithmetic*) or at the speed of a copy (*memory*), whichever is longer for each layer,
# and reading the *input*. The *rest* is neither: kernels below the peaks, and time between kernels.

# %%
LIMIT_COLOURS = {"input": "io", "arithmetic": "kind_convolution", "memory": "kind_moving", "rest": "kind_outside"}


def row(choice: choosing.Choice) -> dict:
    """A choice as a row of the page's table."""
    shares = pd.Series(choice.limits, dtype=float)
    unknown = "peaks are of float32" if choice.fastest.endswith("bfloat16") else "peaks not recorded"
    largest = f"{shares.idxmax()} {shares.max():.0%}" if len(shares) else unknown
    after = f"{choice.next_name}, {choice.next_ratio:.3g} ({choice.next_lo:.3g} to {choice.next_hi:.3g})"
    return {
        "network": choice.conditions["network"],
        "batch": choice.conditions["batch"],
        "fastest": choice.fastest,
        "step, ms": f"{1e3 * choice.median_s:.3g} ({1e3 * choice.lo_s:.3g} to {1e3 * choice.hi_s:.3g})",
        "tied with it": ", ".join(choice.tied) or "–",
        "next, times as long": after if choice.next_name else "–",
        "limit": largest,
    }


for name in names:
    shared = sorted({choosing.conditions_words(choice.conditions).partition(", batch")[2] for choice in answers[name]})
    display(Markdown(f"**{name}** ({'; '.join(sorted({text.partition(', ')[2] for text in shared}))})"))
    display(pd.DataFrame([row(choice) for choice in answers[name]]).set_index("network"))

# %% [markdown]
# ## What limits the fastest setting

# %%
for name in names:
    shares = [
        {"network": "fastest setting", "setting": str(choice.conditions["network"]), "part": part}
        | {"time_s": max(share, 0.0)}
        for choice in answers[name]
        for part, share in choice.limits.items()
    ]
    if not shares:
        display(Markdown(f"**{name}**: the peaks of its machine are not recorded with it, so limits are not known."))
        continue
    figure = panels.stacked(
        pd.DataFrame(shares), LIMIT_COLOURS, f"What a step spends at least on what ({name})", "%", scale=100
    )
    style.save(figure, folder / f"figures/limits-{name}.svg")
    display(figure)

# %% [markdown]
# ## The best of all conditions
#
# The most samples a second of any batch, number of threads and way of reading that was measured; for one step at a time
# see above. It can be a tie: the interval is that of the step.

# %%
best_rows = []
for name in names:
    own = every[(every["campaign"] == name) & (every["workers"] == 1)]
    for _, part in own.groupby("network", sort=True):
        best = part.loc[part["samples_per_s"].idxmax()]
        ends = [best["batch"] / best["hi_s"], best["batch"] / best["lo_s"]]
        best_rows.append(
            best[["campaign", *cases.CASE, "setting", "samples_per_s"]].to_dict()
            | {"lo": ends[0], "hi": ends[1], "peak_memory_bytes": best["peak_memory_bytes"]}
        )
best_of = pd.DataFrame(
    best_rows, columns=["campaign", *cases.CASE, "setting", "samples_per_s", "lo", "hi", "peak_memory_bytes"]
)
for name in names:
    own = best_of[best_of["campaign"] == name]
    shown = own[["network", "setting", "batch", "device", "threads", "input"]].assign(
        **{
            "samples/s": [
                f"{number(row.samples_per_s)} ({number(row.lo)} to {number(row.hi)})" for row in own.itertuples()
            ],
            "peak memory, MiB": (own["peak_memory_bytes"] / 2**20).map("{:.0f}".format),
        }
    )
    display(Markdown(f"**{name}**"), shown.astype({"batch": str, "threads": str}).set_index("network"))

# %%
table = pd.DataFrame(
    [
        {"campaign": name, **choice.conditions, "fastest": choice.fastest, "median_s": choice.median_s}
        | {"lo_s": choice.lo_s, "hi_s": choice.hi_s, "tied": ", ".join(choice.tied), "next": choice.next_name}
        | {"next_ratio": choice.next_ratio, "next_lo": choice.next_lo, "next_hi": choice.next_hi}
        | {f"{part}_share": choice.limits.get(part) for part in choosing.LIMIT_WORDS}
        for name in names
        for choice in answers[name]
    ],
    columns=[
        *("campaign", *cases.CONDITIONS, "fastest", "median_s", "lo_s", "hi_s", "tied", "next"),
        *("next_ratio", "next_lo", "next_hi", *(f"{part}_share" for part in choosing.LIMIT_WORDS)),
    ],
)
form = {"index": False, "float_format": "%.6g", "lineterminator": "\n"}
write_text(folder / "derived/answers.csv", table.to_csv(**form))
write_text(folder / "derived/best.csv", best_of.to_csv(**form))
