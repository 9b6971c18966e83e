# %% [markdown]
# # How much does the script move the ranking?
#
# A benchmark of frameworks measures scripts: how they time, which layout they choose, how they feed, whether they
# compile. In the issues of dlbench (Shi, Wang, Xu, Chu, arXiv 1608.07249) corrections by a framework's own authors made
# the same network in the same framework on the same device up to 3.8 times as fast, more than most frameworks differ.
# Here the lesson is done again with today's means, beside what that study asked: how frameworks scale with threads and
# with the batch, and whether one of them always wins.

# %% tags=["parameters"]
out: str = ""

# %%
import pandas as pd
from IPython.display import Markdown, display

from steptime.core.claims import Claim, decide, read_paper, write_claims
from steptime.core.errors import InputError
from steptime.core.files import project_root, write_table
from steptime.model import cases
from steptime.notebook import out_folder
from steptime.report import panels, style

root = project_root()
folder = out_folder(out, "dlbench")
style.use()
pd.set_option("display.max_colwidth", None, "display.max_rows", None)


def save(table: pd.DataFrame, name: str) -> None:
    """Write a derived table, the same numbers to the same bytes."""
    write_table(folder / f"derived/{name}.csv", table)


def read(name: str) -> pd.DataFrame:
    """A table of the notebook before."""
    path = root / f"data/derived/single_device/{name}.csv"
    if not path.is_file():
        raise InputError(f"{path}: is missing; run `steptime run single_device` (or `make study`) first")
    return pd.read_csv(path)


def same_but(table: pd.DataFrame, names: list[str]) -> list[str]:
    """Columns that must be equal for two cases that differ in `names` only."""
    return [name for name in ["campaign", *cases.CASE] if name not in names]


every, standing = read("cases"), read("standings")
main = cases.main_conditions(every)
campaigns = sorted(every["campaign"].unique(), key=lambda name: (name == "local", name))

# %% [markdown]
# ## Threads
#
# Step time with the fewest threads over step time with the most, the same case otherwise. Ideal is the number of
# threads.

# %%


def thread_scaling() -> pd.DataFrame:
    """One row a case that was measured with several numbers of threads."""
    rows = []
    for _, part in every.groupby(same_but(every, ["threads"]), sort=True):
        few, many = part.loc[part["threads"].idxmin()], part.loc[part["threads"].idxmax()]
        if few["threads"] == many["threads"]:
            continue
        speed_up = few["median_s"] / many["median_s"]
        rows.append(
            few[["campaign", *cases.CASE, "setting"]].to_dict()
            | {"few": few["threads"], "many": many["threads"], "speed_up": speed_up}
            | {"lo": few["lo_s"] / many["hi_s"], "hi": few["hi_s"] / many["lo_s"]}
        )
    columns = ["campaign", *cases.CASE, "setting", "few", "many", "speed_up", "lo", "hi"]
    return pd.DataFrame(rows, columns=columns).drop(columns="threads")


threads = thread_scaling()
save(threads, "threads")
for name in campaigns:
    own = threads[(threads["campaign"] == name) & (threads["input"] == "sequential")]
    if own.empty:
        display(Markdown(f"**{name}**: measured with one number of threads only."))
        continue
    dots = own.assign(lever=own["setting"], name=own["network"], factor=own["speed_up"]).sort_values("setting")
    many = int(own["many"].max())
    figure = panels.factors(
        dots, f"Speed-up by threads, measured ({name})", f"step with the fewest threads / step with {many}"
    )
    style.save(figure, folder / f"figures/threads-{name}.svg")
    display(figure)
    display(
        Markdown(
            f"**{name}**: {many} threads make a step {own['speed_up'].min():.2f} to {own['speed_up'].max():.2f} times "
            f"as fast; beyond their intervals {(own['lo'] > 1).sum()} of {len(own)} cases are faster with them and "
            f"{(own['hi'] < 1).sum()} slower: this campaign tells little about the others."
        )
    )

# %% [markdown]
# ## Batch
#
# Samples a second. A setting that spends its step on starting kernels gains much from a larger batch; one that is
# bound by arithmetic gains nothing.

# %%
swept = every[(every["input"] == "sequential") & (every["dtype"] == "float32")]
swept = swept[swept["threads"] == swept.groupby("campaign")["threads"].transform("min")]
GROUP = same_but(swept, ["batch"])
swept = swept[swept.groupby(GROUP)["batch"].transform("nunique") > 1].sort_values(["network", "setting", "batch"])
save(swept[["campaign", *cases.CASE, "median_s", "samples_per_s"]], "batches")
for name in campaigns:
    for device, own in swept[swept["campaign"] == name].groupby("device"):
        labels = ("samples a batch", "samples/s")
        figure = panels.scaling(own, "batch", "samples_per_s", labels, f"Throughput over batch ({name}, {device})")
        style.save(figure, folder / f"figures/batches-{name}-{device}.svg")
        display(figure)
        ends = own.groupby(["network", "setting"])["samples_per_s"].agg(["first", "last"])
        gain = ends["last"] / ends["first"]
        display(
            Markdown(
                f"**{name}, {device}**: from the smallest to the largest batch throughput grows {gain.min():.2f} "
                f"({' in '.join(gain.idxmin())}) to {gain.max():.2f} times ({' in '.join(gain.idxmax())})."
            )
        )
    if not (swept["campaign"] == name).any():
        display(Markdown(f"**{name}**: measured with one batch a network only."))

# %% [markdown]
# ## Does one framework win everywhere?
#
# Networks on which each framework, in its fastest setting, is fastest or tied with the fastest.

# %%
KEY = ["campaign", *cases.CONDITIONS, "setting"]
winners = main.merge(standing, on=KEY)
winners = winners[winners["standing"].isin(["fastest", "tied"])]
winners = winners.assign(family=[cases.family(name) for name in winners["framework"]])
everywhere = []
for name in campaigns:
    own = main[main["campaign"] == name]
    measured = own["network"].nunique()
    won = winners[winners["campaign"] == name].groupby("family")["network"].unique()
    for family in sorted({cases.family(framework) for framework in own["framework"]}):
        networks = sorted(won.get(family, []))
        everywhere.append(
            {"campaign": name, "framework": family, "fastest_or_tied": len(networks), "networks": measured}
            | {"on": ", ".join(networks) or "–"}
        )
wins = pd.DataFrame(everywhere, columns=["campaign", "framework", "fastest_or_tied", "networks", "on"])
save(wins, "wins")
wins.rename(columns={"fastest_or_tied": "fastest or tied"}).set_index(["campaign", "framework"])

# %% [markdown]
# ## The script's part
#
# Six choices of whoever writes the benchmark, each the only difference between two measured cases:
#
# * *timing*: the mean over all steps, the first one and its compilation included, instead of the median after warm-up
#   (of as many steps as a run has; fewer would make it worse);
# * *layout*: channels first instead of channels last;
# * *compiling*: a slower way of running instead of a faster one of the same framework;
# * *interface*: Keras' layers instead of TensorFlow's operations, both in a compiled graph;
# * *feeding*: a slower way of reading the same input instead of a faster one;
# * *threads*: the slower number of threads instead of the faster.

# %%
PAIRS = [
    ("layout", "torch", "torch_channels_last"),
    ("compiling", "torch", "torch_compile"),
    ("compiling", "tensorflow_eager", "tensorflow"),
    ("compiling", "tensorflow", "tensorflow_xla"),
    ("compiling", "tensorflow_eager", "tensorflow_xla"),
    ("interface", "keras", "tensorflow"),
]
SHOWN = ["campaign", "network", "size", "batch", "dtype", "device", "workers"]
LEVERS = [*SHOWN, "lever", "family", "slow", "fast", "factor", "lo", "hi", "slow_s", "fast_s"]


def pulled(lever: str, slow: pd.Series, fast: pd.Series, names: tuple[str, str]) -> dict:
    """A row of the levers' table: what the choice costs, the slower way named first."""
    return {
        **slow[SHOWN].to_dict(),
        "lever": lever,
        "family": cases.family(slow["framework"]),
        "slow": names[0],
        "fast": names[1],
        "factor": slow["median_s"] / fast["median_s"],
        "lo": slow["lo_s"] / fast["hi_s"],
        "hi": slow["hi_s"] / fast["lo_s"],
        "slow_s": slow["median_s"],
        "fast_s": fast["median_s"],
    }


def by_timing() -> list[dict]:
    """Mean over all steps against the median, for each case of the main comparison."""
    rows = []
    for _, case in main.iterrows():
        careless = case.copy()
        careless[["median_s", "lo_s", "hi_s"]] = case["all_steps_mean_s"]
        setting = case["setting"]
        rows.append(pulled("timing", careless, case, (f"{setting}, mean of all", f"{setting}, median")))
    return rows


def by_setting() -> list[dict]:
    """Two settings of a framework under the same conditions, the slower against the faster."""
    rows = []
    for _, part in main.groupby(same_but(main, ["framework"]), sort=True):
        of = {case["framework"]: case for _, case in part.iterrows()}
        for lever, first, second in PAIRS:
            if first in of and second in of:
                slow, fast = sorted((of[first], of[second]), key=lambda case: -case["median_s"])
                rows.append(pulled(lever, slow, fast, (slow["setting"], fast["setting"])))
    return rows


def by_condition(lever: str, column: str, kinds: tuple[str, ...] = ()) -> list[dict]:
    """The slowest against the fastest value of a condition; `kinds`: the values compared (by their beginning)."""
    rows = []
    table = every[every[column].astype(str).str.startswith(kinds or ("",))]
    if column != "threads":
        table = table[table["threads"] == table.groupby("campaign")["threads"].transform("min")]
    for _, part in table.groupby(same_but(table, [column]), sort=True):
        slow, fast = part.loc[part["median_s"].idxmax()], part.loc[part["median_s"].idxmin()]
        if slow[column] != fast[column]:
            names = [f"{case['setting']}, {case[column]}" for case in (slow, fast)]
            rows.append(pulled(lever, slow, fast, (names[0], names[1])))
    return rows


found = by_timing() + by_setting()
# images in memory and images decoded from files are different work: each is compared with its own kind only
found += by_condition("feeding", "input", ("sequential", "prefetch")) + by_condition("feeding", "input", ("jpeg",))
found += by_condition("threads", "threads")
levers = pd.DataFrame(found, columns=LEVERS)
save(levers, "levers")
for name in campaigns:
    own = levers[levers["campaign"] == name]
    dots = own.assign(name=own["slow"] + ", " + own["network"], setting=own["family"])
    figure = panels.factors(dots, f"What the script costs ({name})", "slower script / faster script, one dot a case")
    style.save(figure, folder / f"figures/levers-{name}.svg")
    display(figure)
    grouped = own.groupby("lever", sort=False)["factor"]
    shown = grouped.agg(["size", "median", "max"])
    shown["median"], shown["max"] = shown["median"].map("{:.2f}".format), shown["max"].map("{:.2f}".format)
    display(shown.rename(columns={"size": "cases", "median": "median factor", "max": "largest factor"}))

# %% [markdown]
# ## Which rankings flip
#
# A ranking flips where another framework, measured properly, lies between the two ways of running a framework: slower
# than its good script, faster than its bad one, in both cases beyond the intervals.

# %%
proper = main.assign(family=[cases.family(name) for name in main["framework"]])
WHERE = ["campaign", "network", "size", "batch", "device", "workers"]
flips = []
for _, row in levers.iterrows():
    others = proper[(proper[WHERE] == row[WHERE]).all(axis=1) & (proper["family"] != row["family"])]
    if row["lever"] == "threads":
        continue  # the other framework was measured with the fewest threads: another comparison
    between = others[(others["lo_s"] > row["fast_s"]) & (others["hi_s"] < row["slow_s"])]
    is_clear = row["lo"] > 1 or row["lever"] == "timing"
    flips += [
        {**row[[*WHERE, "lever", "family", "slow", "fast", "factor"]].to_dict(), "passes": other["setting"]}
        for _, other in between.iterrows()
        if is_clear
    ]
flipped = pd.DataFrame(flips, columns=[*WHERE, "lever", "family", "slow", "fast", "factor", "passes"])
save(flipped, "flips")
for name in campaigns:
    own = flipped[flipped["campaign"] == name]
    counts = own["lever"].value_counts().sort_index()
    if own.empty:
        display(Markdown(f"**{name}**: no choice moves a framework past another beyond the intervals."))
        continue
    said = ", ".join(f"{lever} {count}" for lever, count in counts.items())
    display(Markdown(f"**{name}**: {len(own)} flips ({said}). The largest of each kind:"))
    top = own.sort_values(["factor", "passes"], ascending=[False, True]).drop_duplicates(["lever", "network", "slow"])
    top = top.groupby("lever", sort=True).head(2).sort_values("lever", kind="stable")
    shown = top[["lever", "network", "slow", "fast", "factor", "passes"]].assign(
        factor=top["factor"].map("{:.2f}".format)
    )
    display(shown.rename(columns={"passes": "lies between"}).set_index("lever"))

# %% [markdown]
# ## Claims
#
# The published factors are of GPUs and of scripts of 2016 and 2017, so the size here may differ; that a script alone
# can move a framework so far, and past another, is what is put to the test. Only committed campaigns decide.

# %%
papers = {path.stem: read_paper(path) for path in sorted((root / "data/published").glob("*.yaml"))}
claims: list[Claim] = []
LEVER_DATA = "data/derived/dlbench/levers.csv"


def claim(paper: str, name: str, *, holds: bool = False, in_shape: bool = False, **given: object) -> None:
    """Add the claim on figure `name` of `paper`; `given`: the other fields, a verdict only where no data decide."""
    figure = papers[paper].figure(name)
    verdict = decide(figure, holds, in_shape=in_shape)
    given["verdict"] = given.get("verdict", verdict) if figure.verified else verdict
    fixed = {"paper": paper, "figure": name, "claim": figure.text, "published": figure.value, "unit": figure.unit}
    claims.append(Claim(**({"id": name, "ours": None, "kind": "measured", "data": LEVER_DATA} | fixed | given)))


own = levers[(levers["campaign"] != "local") & (levers["device"] == "cpu") & (levers["dtype"] == "float32")]
own_flips = flipped[(flipped["campaign"] != "local") & (flipped["device"] == "cpu")]
# what a script changes about the work; how it is timed is a claim of its own
SCRIPT = ["layout", "compiling", "feeding"]
scripted, script_flips = (table[table["lever"].isin(SCRIPT)] for table in (own, own_flips))
PUBLISHED = {"script-alexnet": ("alexnet",), "script-resnet56": ("resnet50",), "script-fcn5": ("fcn5",)}
for name, networks in PUBLISHED.items():
    part = scripted[scripted["network"].isin(networks)]
    value = float(papers["dlbench-2016"].figure(name).value)
    best = part.loc[part["factor"].idxmax()] if len(part) else None
    passes = len(script_flips[script_flips["network"].isin(networks)])
    claim(
        "dlbench-2016",
        name,
        ours=None if best is None else float(best["factor"]),
        ours_lo=None if best is None else float(best["lo"]),
        ours_hi=None if best is None else float(best["hi"]),
        holds=best is not None and best["factor"] >= value and passes > 0,
        in_shape=best is not None and best["factor"] > 1.1 and passes > 0,
        tolerance="holds: at least as much, and a ranking flips; in shape: more than 1.1, and a ranking flips",
        how=f"largest factor of layout, compiling and feeding on {', '.join(networks)}, one framework, one device",
        why="no committed campaign has it"
        if best is None
        else f"{best['lever']}: {best['slow']} against {best['fast']}; {passes} flips on the network; a processor and "
        "the quick network instead of a GPU",
        **({"verdict": "inconclusive"} if best is None else {}),
    )
timing = own[own["lever"] == "timing"]
timing_flips = own_flips[own_flips["lever"] == "timing"]
worst = timing.loc[timing["factor"].idxmax()] if len(timing) else None
claim(
    "dlbench-2016",
    "mean-of-all-steps",
    unit="times",
    claim="A mean over all steps, the first included, is not the time of a step: its largest ratio to the median",
    ours=None if worst is None else float(worst["factor"]),
    holds=worst is not None and worst["factor"] > 1.1 and len(timing_flips) > 0,
    in_shape=worst is not None and worst["factor"] > 1.1,
    tolerance="holds: more than 1.1 somewhere, and a ranking flips; in shape: more than 1.1",
    how="mean over all steps of a run, warm-ups included, over the median after them",
    why="no committed campaign"
    if worst is None
    else f"{worst['slow']} on {worst['network']}: compilation is in the "
    f"first step; {len(timing_flips)} flips; the longer the run, the smaller the ratio",
    **({"verdict": "inconclusive"} if worst is None else {}),
)
own_wins = wins[(wins["campaign"] != "local") & (wins["fastest_or_tied"] > 0)]
claim(
    "dlbench-2016",
    "no-single-winner",
    ours=float(own_wins["framework"].nunique()) if len(own_wins) else None,
    unit="frameworks",
    tolerance="none: the figure could not be checked",
    how="frameworks that are fastest, or tied with the fastest, on some network",
    why="; ".join(f"{row.framework}: {row.on}" for row in own_wins.itertuples()) or "no committed campaign",
    data="data/derived/dlbench/wins.csv",
)
own_threads = threads[(threads["campaign"] != "local") & (threads["device"] == "cpu")]
claim(
    "dlbench-2016",
    "cpu-threads",
    ours=float(own_threads["speed_up"].max() / own_threads["speed_up"].min()) if len(own_threads) else None,
    unit="times",
    tolerance="none: the figure could not be checked",
    how="largest over smallest speed-up from the fewest to the most threads, over settings and networks",
    why=f"speed-ups of {own_threads['speed_up'].min():.2f} to {own_threads['speed_up'].max():.2f}"
    if len(own_threads)
    else "no committed campaign has two numbers of threads",
    data="data/derived/dlbench/threads.csv",
)
STRONG = {
    "caffe": "several GPUs of one node",
    "cntk": "several GPUs; its gradients have one bit, so the speed-up is not of the schedule alone",
    "tensorflow": "several GPUs of one node",
    "torch": "several GPUs; it aggregates after backward, without overlap",
}
for framework, why in STRONG.items():
    claim(
        "guolinke-2016",
        f"strong-fcn5-{framework}-4",
        verdict="needs a GPU",
        tolerance="within 10 %",
        how="none",
        why=why,
    )
claim(
    "guolinke-2016",
    "strong-fcn5-cntk-8",
    verdict="needs a GPU",
    tolerance="within 10 %",
    how="none",
    why=STRONG["cntk"],
)
write_claims(folder / "derived/claims/dlbench.json", claims)
ledger = pd.DataFrame([item.model_dump() for item in claims])
counts = "; ".join(f"{verdict}: {count}" for verdict, count in ledger["verdict"].value_counts().items())
display(Markdown(f"{len(ledger)} claims. {counts}. The [ledger](claims.html) lists each with its reason."))
