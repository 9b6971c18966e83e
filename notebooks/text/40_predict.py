# %% [markdown]
# # What would the step cost with the input read ahead, and on many workers?
#
# A model is a function from a layer profile, a schedule and a link to seconds. First it predicts what was measured
# here, then what nobody measured. What others measured on many workers is predicted in
# [the study of published steps](70_bcaffe.ipynb).
#
# One device that reads the next batch while it computes this one:
#
# $$t = \max(t_{io} + t_{h2d},\; t_f + t_b + t_u)$$
#
# N workers: the gradient of layer $l$ exists when the backward pass has reached it and is aggregated once the link is
# free, $\tau_c(l) = \max(\tau_c(l+1) + t_c(l+1),\; \tau_b(l) + t_b(l))$. What is still on the link when backward ends
# is the exposed part $t_{c,no}$, and the step becomes
#
# $$t = t_{io} + t_{h2d} + t_f + t_b + t_{c,no} + t_u$$
#
# A ring all-reduce of n bytes takes $t_c = 2(N-1)\alpha + 2\frac{N-1}{N} n \beta$. (Shi, Wang, Chu, arXiv 1711.05979;
# Shi, Chu, arXiv 1811.11141.)

# %% tags=["parameters"]
out: str = ""
workers: list[int] = [1, 2, 4, 8, 16, 32, 64]
links: list[str] = ["10gbe", "100gb-ib"]

# %%
import pandas as pd
from IPython.display import Markdown, display

from steptime.core.claims import Claim, decide, read_paper, write_claims
from steptime.core.errors import InputError
from steptime.core.files import project_root, write_table
from steptime.core.machine import read_link
from steptime.core.statistics import setting_names
from steptime.core.step import SCHEDULES, LayerProfile, Schedule
from steptime.model.fitting import profile_from_table
from steptime.model.step import predict_step, predict_table
from steptime.notebook import out_folder
from steptime.report import figures, panels, style

root = project_root()
folder = out_folder(out, "predict")
style.use()
fitted, papers_at = root / "data/derived/fit", root / "data/published"


def save(table: pd.DataFrame, name: str) -> None:
    """Write a derived table, the same numbers to the same bytes."""
    write_table(folder / f"derived/{name}.csv", table)


def read(name: str) -> pd.DataFrame:
    """A table of the fit stage."""
    path = fitted / f"{name}.csv"
    if not path.is_file():
        raise InputError(f"{path}: is missing; run `steptime run fit` (or `make study`) first")
    return pd.read_csv(path)


steps, phases, layers = read("steps"), read("phases"), read("layers")
chosen = [read_link(root / "data/machines/links", name) for name in links]


def span(errors: pd.Series) -> str:
    """The smallest and the largest error in words."""
    ends = [f"{errors.min():+.1%}", f"{errors.max():+.1%}"]
    return " to ".join(dict.fromkeys(ends))


# %% [markdown]
# ## One device: predicted beside measured
#
# The phases come from steps taken apart, so even the sequential sum is a test. A step with prefetch is predicted from
# the phases of its sequential twin, once with cores of its own for reading (the maximum) and once with shared cores
# (the sum).

# %%
CASE = ["campaign", "case_id", "framework", "network", "size", "batch", "dtype", "device", "threads", "workers"]
TWIN = [name for name in CASE if name != "case_id"]


def profile_of(case: pd.Series) -> LayerProfile:
    """The layer profile that the fit stage made of a case."""
    key = ["campaign", "case_id"]
    own_layers, own_phases = (table[(table[key] == case[key]).all(axis=1)] for table in (layers, phases))
    return profile_from_table(
        own_layers,
        network=case["network"],
        source=f"{case['campaign']}: {case['case_id']}",
        batch=int(case["batch"]),
        phases_s=own_phases.set_index("phase")["time_s"].to_dict(),
    )


cases = phases[CASE].drop_duplicates(ignore_index=True)
profiles = {(case["campaign"], case["case_id"]): profile_of(case) for _, case in cases.iterrows()}
ONE_COLUMNS = [*CASE, "input", "measured_s", "lo_s", "hi_s", "predicted_s", "error", "shared_cores_s"]
one_rows = []
for _, case in cases.iterrows():
    profile = profiles[case["campaign"], case["case_id"]]
    for _, step in steps[(steps[TWIN] == case[TWIN]).all(axis=1)].iterrows():
        schedule = Schedule(prefetch=step["input"] == "prefetch")
        predicted = predict_step(profile, schedule, 1, chosen[0]).step_s
        shared = predict_step(profile, schedule, 1, chosen[0], shared_cores=True).step_s
        one_rows.append(
            {
                **step[[*CASE, "input"]],
                "measured_s": step["median_s"],
                "lo_s": step["lo_s"],
                "hi_s": step["hi_s"],
                "predicted_s": predicted,
                "error": predicted / step["median_s"] - 1,
                "shared_cores_s": shared,
            }
        )
one_device = pd.DataFrame(one_rows, columns=ONE_COLUMNS)
save(one_device, "one_device")

# %%
SETTING = ["campaign", "device", "dtype", "threads", "input"]
for (campaign, device, dtype, threads, reading), part in one_device[one_device["workers"] == 1].groupby(SETTING):
    words = f"{campaign}, {device}, {dtype}, {threads} thread{'s' if threads > 1 else ''}, {reading} input"
    title = f"Modelled over measured step: {campaign}, {device}, t{threads}, {reading} input"
    part = part.assign(setting=setting_names(part), value=part["predicted_s"] / part["measured_s"])
    part = part.assign(lo=part["predicted_s"] / part["hi_s"], hi=part["predicted_s"] / part["lo_s"])
    label = "predicted / measured (line: 95 % interval of the measured time)"
    figure = panels.marks(part, "setting", title, label, 1.0)
    style.save(figure, folder / f"figures/one-device-{campaign}-{device}-{dtype}-t{threads}-{reading}.svg")
    display(figure)
    text = f"{words}: the model is {span(part['error'])} off the measured step."
    if reading == "prefetch":
        text += f" With shared cores it would be {span(part['shared_cores_s'] / part['measured_s'] - 1)} off."
    display(Markdown(text))
for name in sorted(set(steps["campaign"]) - set(steps.loc[steps["input"] == "prefetch", "campaign"])):
    display(Markdown(f"{name}: no case with prefetch was measured, so the maximum is not tested there."))

# %% [markdown]
# ## Many workers (modelled)
#
# Weak scaling: each worker keeps its batch. Three schedules: one message after backward, one message a layer as soon
# as it is ready (wait-free), and messages merged so that the last one ends earliest. Links are sources' figures, not
# this machine's. Every setting with the most workers; and, for one of them, how it gets there. The table has all.

# %%
SPEED_UP_KEYS = ["campaign", "case_id", "framework", "device", "dtype", "threads"]
SPEED_UP_COLUMNS = [*SPEED_UP_KEYS, "network", "batch", "link", "schedule", "workers", "speed_up"]
schedules = [Schedule(name) for name in SCHEDULES]
tables = []
for _, case in cases[cases["workers"] == 1].iterrows():
    for link in chosen:
        table = predict_table(profiles[case["campaign"], case["case_id"]], schedules, workers, link)
        for place, name in enumerate(SPEED_UP_KEYS):
            table.insert(place, name, case[name])
        tables.append(table.drop(columns=["source", "prefetch"]))
predictions = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=SPEED_UP_COLUMNS)
save(predictions, "speed_up")
most = max(workers)
for (campaign, device, threads, link), part in predictions.groupby(["campaign", "device", "threads", "link"]):
    where = f"{campaign}, {device}, t{threads}"
    last = part[part["workers"] == most].assign(setting=setting_names, value=lambda table: table["speed_up"])
    title = f"Speed-up on {most} workers, modelled: {link} ({where})"
    figure = panels.marks(last, "schedule", title, "times the speed of one worker (line: ideal)", most)
    style.save(figure, folder / f"figures/speed-up-{campaign}-{device}-t{threads}-{link}.svg")
    display(figure)
    if link == links[0]:
        one = part.loc[part["dtype"] == "float32"].groupby("framework")["network"].nunique().idxmax()
        curves = part[(part["framework"] == one) & (part["dtype"] == "float32")]
        figure = figures.speed_up(curves, title=f"Speed-up of {one}, modelled: {link} ({where})")
        style.save(figure, folder / f"figures/speed-up-curves-{campaign}-{device}-t{threads}-{link}.svg")
        display(figure)
if predictions.empty:
    display(Markdown("No campaign has a layer profile yet, so there is nothing to predict from."))

# %% [markdown]
# ## Claims
#
# Figures that nobody could check against a source decide nothing, nor does what only this machine measured: claims
# about measurements rest on committed campaigns.

# %%
papers = {path.stem: read_paper(path) for path in sorted(papers_at.glob("*.yaml"))}
BOUND = 0.10
claims: list[Claim] = []


def claim(paper: str, name: str, table: str, *, holds: bool = False, in_shape: bool = False, **given) -> None:
    """Add the claim on figure `name` of `paper`; `given`: the other fields, a verdict only where no data decide."""
    figure = next(item for item in papers[paper].figures if item.id == name)
    verdict = decide(figure, holds, in_shape=in_shape)
    given["verdict"] = given.get("verdict", verdict) if figure.verified else verdict
    fixed = {"paper": paper, "figure": name, "claim": figure.text, "published": figure.value, "unit": figure.unit}
    claims.append(
        Claim(**({"id": name, "ours": None, "kind": "modelled"} | fixed | given), data=f"data/derived/{table}")
    )


for name in ("cntk-no-overlap", "alexnet-decode-bound"):
    claim(
        "ssgd-2017",
        name,
        "predict/one_device.csv",
        tolerance="none: the figure could not be checked",
        how="none",
        why="neither that framework's version nor that input has been measured here",
    )

# %% [markdown]
# Of the claims, two rest on committed campaigns: that reading ahead leaves the larger of reading and computing, and
# that frameworks differ.

# %%
ahead = one_device[(one_device["campaign"] != "local") & (one_device["input"] == "prefetch")]
errors = 100 * ahead["error"].abs()
claim(
    "ssgd-2017",
    "process-models",
    "predict/one_device.csv",
    id="prefetch-is-the-maximum",
    unit="%",
    claim="With the input read ahead the step is the larger of reading and computing: median error of the prediction",
    kind="modelled",
    ours=float(errors.median()) if len(errors) else None,
    holds=bool(len(errors)) and errors.max() <= 100 * BOUND,
    in_shape=bool(len(errors)) and errors.median() <= 100 * BOUND,
    tolerance=f"holds: every case within {BOUND:.0%}; in shape: the median within {BOUND:.0%}",
    how="phases of the sequential case, max(t_io + t_h2d, t_f + t_b + t_u), against the measured prefetch case",
    why=f"{len(errors)} cases, {errors.min():.1f} to {errors.max():.1f} % off"
    if len(errors)
    else "no committed campaign has cases with prefetch",
    **({} if len(errors) else {"verdict": "inconclusive"}),
)
pairs = read("comparisons")
pairs = pairs[(pairs["campaign"] != "local") & (pairs["input"] == "sequential")]
apart = pairs["different"].astype(bool)
farthest = pairs[apart].sort_values("ratio", ascending=False).drop_duplicates(["network", "device"])
# Pairs that cannot be told apart speak against the claim only where the interval is narrow.
is_undecided = not apart.any() and not (pairs["hi"] / pairs["lo"] < 1 + BOUND).all()
claim(
    "ssgd-2017",
    "frameworks-differ",
    "fit/comparisons.csv",
    unit="%",
    claim="Frameworks differ in the time of the same step on the same device: share of cases in which they do",
    kind="measured",
    ours=100 * float(apart.mean()) if len(pairs) else None,
    holds=bool(len(pairs)) and bool(apart.all()),
    in_shape=bool(apart.any()),
    tolerance="different at 1 %, paired by round; holds: in every case; in shape: in some; inconclusive: in none, with "
    f"an interval wider than {BOUND:.0%}",
    how="step times of each network in each framework, rounds interleaved",
    why=f"{apart.sum()} of {len(pairs)} pairs; by the most on each network: "
    + "; ".join(
        f"{row.network} ({row.device}): {row.faster} takes less than {row.slower} by {row.ratio:.3g} times"
        for row in farthest.itertuples()
    )
    if apart.any()
    else ("no pair can be told apart" if len(pairs) else "no committed campaign has two frameworks"),
    **({"verdict": "inconclusive"} if is_undecided or pairs.empty else {}),
)
write_claims(folder / "derived/claims/ssgd.json", claims)
ledger = pd.DataFrame([item.model_dump() for item in claims])
counts = "; ".join(f"{verdict}: {count}" for verdict, count in ledger["verdict"].value_counts().items())
display(Markdown(f"{len(ledger)} claims. {counts}. The [ledger](claims.html) lists each with its reason."))
