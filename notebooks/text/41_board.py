# %% [markdown]
# # How good are predictions of what was not measured?
#
# A board: models that are fitted to part of some measurements and tested on the rest, beside what is trivial (the step
# of one worker, the last measured point) and what is simple (a ring's term, α–β). The error is
# |predicted / measured − 1|. Every interval is meant to hold nine times in ten; its width is relative to the time.
#
# Before any score: what the data itself allows. A law cannot be nearer to single measurements than these are to each
# other.

# %% tags=["parameters"]
out: str = ""
holdout: str = ""

# %%
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pandera.pandas as pa
from IPython.display import Markdown, display

from steptime.core.campaign import read_table
from steptime.core.claims import Claim, decide, read_paper, write_claims
from steptime.core.errors import InputError
from steptime.core.files import project_root, write_table
from steptime.model import baselines, published, scoring
from steptime.model.extrapolation import extrapolate
from steptime.model.observations import COLLECTIVES, STEPS, Kind, read_observed
from steptime.model.platforms import predict_collectives
from steptime.notebook import out_folder
from steptime.report import boards, style

root = project_root()
folder = out_folder(out, "board")
style.use()
papers_at = root / "data/published"
OURS = "steptime"


def save(table: pd.DataFrame, name: str) -> None:
    """Write a derived table, the same numbers to the same bytes."""
    write_table(folder / f"derived/{name}.csv", table)


@dataclass(frozen=True)
class Board:
    """One set of measurements: what is fitted on, what is held out, and in words what that is."""

    name: str
    kind: Kind
    observed: pd.DataFrame
    truth: pd.DataFrame
    what: str


def percent(value: float, digits: int = 1) -> str:
    """A share in percent, or a dash."""
    return "–" if pd.isna(value) else f"{100 * value:.{digits}f} %"


# %% [markdown]
# ## The sets
#
# The project carries four: published steps and all-reduces, and its own sweeps over the batch. A folder with pairs of
# files `NAME_fit.csv` and `NAME_devtest.csv` (the columns of `steptime extrapolate` or `steptime collectives fit`) can
# be added with the parameter `holdout`.

# %%
FEW_SIZES = 20
SCALING = pa.DataFrameSchema(
    {
        "network": pa.Column(str),
        "method": pa.Column(str),
        "workers": pa.Column(int, pa.Check.ge(1)),
        "samples_per_s_per_worker": pa.Column(float, pa.Check.ge(1e-9), coerce=True),
    },
    strict=True,
)


def published_steps() -> Board:
    """B-Caffe's steps; a worker is a node."""
    steps = published.bcaffe_steps(papers_at)
    table = pd.DataFrame({"group": steps["network"] + "|10GbE|" + steps["schedule"], "workers": steps["nodes"]})
    table = table.assign(nodes=steps["nodes"], local_batch=steps["batch_per_node"], step_time_s=steps["step_time_s"])
    return split(
        "B-Caffe, steps", table, 4, "GoogLeNet and ResNet-50 on K80 nodes, three schedules: 8 nodes from 1 to 4"
    )


def sparsified_steps() -> Board:
    """Seconds a sample: the batch is not stated, and relative errors do not depend on it."""
    rates = read_table(papers_at / "gtopk_scaling.csv", SCALING)
    table = pd.DataFrame({"group": rates["network"] + "|1GbE|" + rates["method"], "workers": rates["workers"]})
    table = table.assign(nodes=rates["workers"], local_batch=1, step_time_s=1 / rates["samples_per_s_per_worker"])
    return split(
        "gTop-k, steps", table, 8, "five networks, dense and sparsified, on 1 Gbit/s: 16 and 32 workers from 1 to 8"
    )


def split(name: str, table: pd.DataFrame, most: int, what: str) -> Board:
    """Steps up to `most` workers are observed, the others held out."""
    table = table.assign(step_time_std_s=float("nan"))
    seen = table["workers"] <= most
    return Board(name, STEPS, table[seen].reset_index(drop=True), table[~seen].reset_index(drop=True), what)


def published_collectives() -> Board:
    """Every twentieth size on 2 and 4 nodes is observed."""
    table = read_table(papers_at / "bcaffe_osu_allreduce.csv", published.ALL_REDUCE).sort_values(["nodes", "n_bytes"])
    rank = table.groupby("nodes").cumcount()
    seen = (table["nodes"] < 8) & (rank % FEW_SIZES == 0)
    table = table.assign(group="K80 nodes", workers=table["nodes"], time_std_s=float("nan"))
    table = table[[*COLLECTIVES.key, COLLECTIVES.time, COLLECTIVES.std]]
    what = f"MPI all-reduce on K80 nodes: one size in {FEW_SIZES} on 2 and 4 nodes; held out: the others, and 8 nodes"
    observed, truth = (part.reset_index(drop=True) for part in (table[seen], table[~seen]))
    return Board("B-Caffe, all-reduce", COLLECTIVES, observed, truth, what)


def own_batches() -> Board | None:
    """The committed campaigns' steps where three batches were measured: the largest is held out."""
    path = root / "data/derived/fit/steps.csv"
    if not path.is_file():
        raise InputError(f"{path}: is missing; run `steptime run fit` (or `make study`) first")
    steps = pd.read_csv(path)
    steps = steps[(steps["campaign"] != "local") & (steps["input"] == "sequential") & (steps["workers"] == 1)]
    place = steps["campaign"] + " " + steps["dtype"] + " " + steps["device"] + " t" + steps["threads"].astype(str)
    table = pd.DataFrame({"group": steps["network"] + "|" + place + "|" + steps["framework"], "workers": 1, "nodes": 1})
    table = table.assign(local_batch=steps["batch"], step_time_s=steps["median_s"])
    table = table.assign(step_time_std_s=(steps["hi_s"] - steps["lo_s"]) / (2 * 1.96))
    table = table[table.groupby("group")["local_batch"].transform("nunique") >= 3]
    if table.empty:
        return None
    largest = table["local_batch"] == table.groupby("group")["local_batch"].transform("max")
    observed, truth = (part.reset_index(drop=True) for part in (table[~largest], table[largest]))
    return Board("own sweeps, batch", STEPS, observed, truth, "steps of one process here: the largest batch from two")


def added(path: Path) -> list[Board]:
    """The pairs of files in a folder. Raises InputError when there are none."""
    found = []
    for fit in sorted(path.glob("*_fit.csv")):
        test = fit.with_name(fit.name.replace("_fit.csv", "_devtest.csv"))
        if test.is_file():
            kind = COLLECTIVES if "n_bytes" in fit.read_text(encoding="utf-8").partition("\n")[0] else STEPS
            name = fit.name.removesuffix("_fit.csv")
            found.append(Board(name, kind, read_observed(fit, kind), read_observed(test, kind), "added by `holdout`"))
    if not found:
        raise InputError(f"{path}: has no pair NAME_fit.csv, NAME_devtest.csv; correct the parameter holdout")
    return found


sets = [published_steps(), sparsified_steps(), published_collectives()]
sets += [board for board in [own_batches()] if board]
sets += added(root / holdout) if holdout else []
shown = pd.DataFrame(
    [
        {
            "set": board.name,
            "what": board.what,
            "groups": board.truth["group"].nunique(),
            "fitted on": len(board.observed),
            "held out": len(board.truth),
            "most workers, fitted on": board.observed["workers"].max(),
            "held out ": board.truth["workers"].max(),
        }
        for board in sets
    ]
)
shown.set_index("set")

# %% [markdown]
# ## The floor
#
# * *repeats*: the error that a perfect prediction would show, from the standard deviations that come with the times,
#   and the narrowest interval that could hold nine in ten of them;
# * *smooth law*: the error of a law with a free level for each batch and each number of nodes and a free slope over
#   the workers, fitted to the **held-out** steps themselves. What it misses are jumps from one placement to the next,
#   which no smooth law that has not seen them can know;
# * *next sizes*: an all-reduce against the median of its held-out neighbours in size;
# * *lines between the observed sizes*: what straight lines miss had the observed sizes been measured without noise.

# %%
floor_rows = []
for board in sets:
    for which, table in (("fitted on", board.observed), ("held out", board.truth)):
        noise = scoring.noise_floor(table, board.kind)
        if noise["share"]:
            floor_rows.append({"set": board.name, "floor": f"repeats, {which}"} | noise)
    if board.kind is STEPS:
        floors = [("smooth law", scoring.smooth_floor(board.truth, STEPS))]
    else:
        place = ["group", "workers", "nodes"]
        seen = board.truth.merge(board.observed[place].drop_duplicates(), on=place)
        floors = [
            ("next sizes", scoring.neighbour_floor(seen, COLLECTIVES)),
            ("lines between the observed sizes", scoring.grid_floor(board.observed, board.truth, COLLECTIVES)),
        ]
    floor_rows += [
        {"set": board.name, "floor": name, "median": floor.median, "p90": floor.p90}
        for name, floor in floors
        if pd.notna(floor.median)
    ]
floor_table = pd.DataFrame(floor_rows, columns=["set", "floor", "median", "p90", "width", "share"])
save(floor_table, "floors")
# what counts for the held-out points: not the repeats of what was fitted on
own_floors = floor_table[floor_table["floor"] != "repeats, fitted on"]
highest = {
    (name, quantile): rows.loc[rows[quantile].idxmax()]
    for name, rows in own_floors.groupby("set")
    for quantile in ("median", "p90")
}
shown = floor_table.assign(**{name: floor_table[name].map(percent) for name in ("median", "p90", "width", "share")})
shown = shown.rename(columns={"width": "narrowest interval", "share": "rows with a deviation"})
without = [board.name for board in sets if board.name not in set(floor_table["set"])]
display(shown.set_index(["set", "floor"]))
if without:
    display(Markdown(f"No deviation and too few points for a law of their own: {', '.join(without)}."))

# %% [markdown]
# ## The board
#
# In-sample: the model at the points that it was fitted on. Coverage is that of the 90 % intervals; its own 95 %
# interval comes from drawing groups anew. An all-reduce is scored apart where its placement (workers, nodes) was
# observed and where it was not.

# %%
PREDICT = {STEPS.time: extrapolate, COLLECTIVES.time: predict_collectives}
BASELINES = {STEPS.time: baselines.STEP_BASELINES, COLLECTIVES.time: baselines.COLLECTIVE_BASELINES}
RATIOS = [0, 1, 2, 4, float("inf")]
RATIO_NAMES = ["to 1", "to 2", "to 4", "more"]


def scored(board: Board) -> pd.DataFrame:
    """Every point of every model: the columns of `scoring.compared`, set, model, where and, for ours, the times."""
    kind, key = board.kind, list(board.kind.key)
    asked = pd.concat([board.truth, board.observed], ignore_index=True)
    own = PREDICT[kind.time](board.observed, asked[key])
    tables = []
    for where, rows in (("held out", asked.index < len(board.truth)), ("in-sample", asked.index >= len(board.truth))):
        table = scoring.compared(board.observed, asked[rows], own[rows], kind)
        times = {"measured_s": asked[rows][kind.time].to_numpy(), "predicted_s": own[rows][kind.time].to_numpy()}
        times |= {name: own[rows][name].to_numpy() for name in ("lo_s", "hi_s")}
        tables.append(table.assign(**times, form=own[rows]["model"].to_numpy(), model=OURS, where=where))
    points = board.truth[key]
    for name, baseline in BASELINES[kind.time].items():
        predicted = points.assign(**{kind.time: baseline(board.observed, points)})
        table = scoring.compared(board.observed, board.truth, predicted, kind)
        tables.append(table.assign(model=name, where="held out"))
    found = pd.concat(tables, ignore_index=True)
    names = pd.Series(board.name, index=found.index)
    if kind is COLLECTIVES:
        names += found["is_seen"].map({True: ", placement observed", False: ", placement not observed"})
    ratio = pd.cut(found["scale_ratio"], RATIOS, labels=RATIO_NAMES)
    return found.assign(set=names, board=board.name, ratio=ratio)


points = pd.concat([scored(board) for board in sets], ignore_index=True)
points["model"] = pd.Categorical(points["model"], [OURS, *dict.fromkeys(n for b in BASELINES.values() for n in b)])
points["set"] = pd.Categorical(points["set"], list(dict.fromkeys(points["set"])))
table = scoring.scores(points, ["set", "model", "where"])
save(table, "board")
shown = table.assign(error=table["median"].map(percent) + " / " + table["p90"].map(percent))
shown["width"] = table["width"].map(percent)
shown["coverage"] = [
    "–" if pd.isna(row.coverage) else f"{row.coverage:.0%} ({row.coverage_lo:.0%} to {row.coverage_hi:.0%})"
    for row in table.itertuples()
]
shown = shown.rename(columns={"error": "error, median / p90", "width": "width, median"})
shown.set_index(["set", "model", "where"])[["points", "groups", "error, median / p90", "coverage", "width, median"]]

# %%
drawn = table[["set", "model", "where", "median", "p90"]].assign(is_ours=table["model"] == OURS)
drawn = drawn.assign(set=drawn["set"].astype(str), model=drawn["model"].astype(str))
floors = {
    str(name): float(highest[base, "median"]["median"])
    for name in table["set"].unique()
    for base in [str(name).partition(", placement")[0]]
    if (base, "median") in highest
}
figure = boards.errors(drawn, floors, "Errors of predictions (modelled), by set")
style.save(figure, folder / "figures/board.svg")
display(figure)

# %%
held_out = table[table["where"] == "held out"]
for name, rows in held_out.groupby("set", observed=True):
    own, others = rows[rows["model"] == OURS].iloc[0], rows[rows["model"] != OURS]
    next_best = others.loc[others["median"].idxmin()]
    better = "better than" if own["median"] < next_best["median"] else "no better than"
    text = f"{name}: {percent(own['median'])} median error, {better} the {next_best['model']} baseline "
    text += f"({percent(next_best['median'])}); {percent(own['coverage'], 0)} of the points lie in the intervals"
    text += "." if own["coverage_hi"] >= scoring.LEVEL else ", significantly fewer than nine in ten."
    display(Markdown(text))

# %% [markdown]
# ## By scale
#
# The number of workers over the largest that was observed of the group.

# %%
by_ratio = scoring.scores(points[points["where"] == "held out"], ["set", "ratio", "model"])
save(by_ratio, "by_scale")
kept = by_ratio[by_ratio["points"] > 0]
shown = kept.assign(error=kept["median"].map(percent) + " / " + kept["p90"].map(percent))
shown = shown.pivot_table(index=["set", "ratio"], columns="model", values="error", aggfunc="first", observed=True)
ours_by_ratio = kept[kept["model"] == OURS].set_index(["set", "ratio"])
shown["coverage, ours"] = ours_by_ratio["coverage"].map(lambda value: percent(value, 0))
shown["width, ours"] = ours_by_ratio["width"].map(lambda value: percent(value, 0))
shown.fillna("–")

# %% [markdown]
# ## Where it is off most
#
# Of each set the group (of all-reduces, the placement that was observed) with the largest 90 % quantile of the error;
# of steps, at its middle batch, with the most points.

# %%
for board in sets:
    own = points[(points["board"] == board.name) & (points["model"] == OURS)]
    held = own[(own["where"] == "held out") & (own["is_seen"] | (board.kind is STEPS))]
    place = ["group"] if board.kind is STEPS else ["group", "workers", "nodes"]
    off = held.assign(off=held["error"].abs()).groupby(place)["off"].quantile(0.9)
    worst = off.idxmax() if len(place) > 1 else (off.idxmax(),)
    part = own[(own[place] == pd.Series(dict(zip(place, worst, strict=True)))).all(axis=1)]
    x, label, title = board.kind.size, "bytes", f"{board.name}: {worst[0]}"
    if board.kind is STEPS and part["workers"].nunique() > 1:
        batches = part.loc[part["where"] == "held out", "local_batch"].sort_values()
        part = part[part["local_batch"] == batches.iloc[len(batches) // 2]]
        part = part[part["nodes"] == part["nodes"].max()] if part.duplicated("workers").any() else part
        x, label = "workers", "workers"
        title += f", batch {part['local_batch'].iloc[0]:g}"
    elif board.kind is STEPS:
        label = "batch"
    else:
        title += f", {worst[1]} workers on {worst[2]} nodes"
    figure = boards.curve(part.assign(is_observed=part["where"] == "in-sample"), x, label, title)
    style.save(figure, folder / f"figures/worst-{sets.index(board)}.svg")
    display(figure)
    errors = part.loc[part["where"] == "held out", "error"]
    display(
        Markdown(
            f"{title}: {errors.min():+.0%} to {errors.max():+.0%} on what was held out. Model: {part['form'].iloc[0]}."
        )
    )

# %% [markdown]
# ## Targets
#
# For three public sets a target was set before: median and 90 % quantile of the error. A missed target that lies below
# a floor of the held-out points is said to, with the floor.

# %%
TARGETS = {
    "scaleout_hkbu": (0.02, 0.06),
    "scaleout_pollux": (0.06, 0.20),
    "allreduce_vidur, placement observed": (0.02, 0.10),
    "allreduce_vidur, placement not observed": (0.10, None),
}
WIDEST = 0.25


def judged(row: pd.Series, quantile: str, target: float | None) -> str:
    """What becomes of a target."""
    value = row[quantile]
    if target is None or value <= target:
        return f"{percent(value)}: " + ("no target" if target is None else f"met ({percent(target)})")
    text = f"{percent(value)}: missed ({percent(target)})"
    floor = highest.get((row.name.partition(", placement")[0], quantile))
    if floor is None or row.name.endswith("not observed") or floor[quantile] <= target:
        return text
    return f"{text}, which lies below the floor of {percent(floor[quantile])} ({floor['floor']})"


rows = []
own = table[(table["model"] == OURS) & (table["where"] == "held out")].set_index("set")
for name, (median, p90) in TARGETS.items():
    if name not in own.index:
        continue
    row = own.loc[name]
    rows.append(
        {
            "set": name,
            "median": judged(row, "median", median),
            "p90": judged(row, "p90", p90),
            "coverage": f"{percent(row['coverage'], 0)}: "
            + ("not significantly below 90 %" if row["coverage_hi"] >= 0.9 else "missed (90 %)"),
            "width": f"{percent(row['width'])}: "
            + ("met" if row["width"] <= WIDEST else "missed")
            + f" ({percent(WIDEST, 0)})",
        }
    )
targets = pd.DataFrame(rows, columns=["set", "median", "p90", "coverage", "width"])
save(targets, "targets")
if targets.empty:
    display(Markdown("None of the three sets is here: the parameter `holdout` is not set."))
else:
    display(targets.set_index("set"))
looks = pd.read_csv(papers_at / "held-out-looks.csv")
display(
    Markdown("How often the three were looked at while the models were built, and what was chosen with their help:")
)
display(looks.set_index("set"))

# %% [markdown]
# ## Claims
#
# Published efficiencies and speed-ups at the largest scale, from the smaller scales alone. Fitted constants: those of
# the form that was chosen, none of them seen by the largest scale.

# %%
CLOSE = 0.10
claims: list[Claim] = []
ours = points[(points["model"] == OURS)].set_index(["board", "group", "workers"])


def claim(paper: str, name: str, board: str, group: str, most: int, *, unit_of_one: float) -> None:
    """A speed on `most` workers relative to one, times `unit_of_one`, beside ours with the 95 % interval."""
    figure = read_paper(papers_at / f"{paper}.yaml").figure(name)
    row, one = ours.loc[(board, group, most)], ours.loc[(board, group, 1)]
    ends = [row["predicted_s"] * (row[end] / row["predicted_s"]) ** (1.96 / 1.645) for end in ("hi_s", "lo_s")]
    lo, value, hi = (unit_of_one * one["measured_s"] / time for time in (ends[0], row["predicted_s"], ends[1]))
    error = value / figure.value - 1
    claims.append(
        Claim(
            id=f"extrapolated-{name}",
            paper=paper,
            figure=name,
            claim=f"{figure.text}, from the smaller scales",
            published=figure.value,
            unit=figure.unit,
            ours=value,
            ours_lo=lo,
            ours_hi=hi,
            kind="modelled",
            tolerance=f"holds: within {CLOSE:.0%}; in shape: the published figure lies in our interval",
            verdict=decide(figure, abs(error) <= CLOSE, in_shape=lo <= figure.value <= hi),
            why=f"{error:+.0%}; {row['form'].partition(':')[0]}",
            how=f"fitted to the steps on fewer workers of all groups of the set ({board}), fewer than {most} workers",
            data="data/derived/board/board.csv",
        )
    )


for network in ("VGG-16", "ResNet-20", "AlexNet", "ResNet-50", "LSTM-PTB"):
    for method in ("dense", "gTop-k"):
        slug = f"efficiency-{network.lower().replace('-', '')}-{method.lower().replace('-', '')}-32"
        claim("gtopk-2019", slug, "gTop-k, steps", f"{network}|1GbE|{method}", 32, unit_of_one=100)
for network, slug in (("GoogLeNet", "googlenet"), ("ResNet-50", "resnet50")):
    for schedule, name in (("WFBP", "wfbp"), ("MG-WFBP", "mg-wfbp"), ("one message", "one-message")):
        group = f"{network}|10GbE|{schedule}"
        claim("mg-wfbp-2018", f"speedup-{slug}-{name}-8", "B-Caffe, steps", group, 8, unit_of_one=8)
write_claims(folder / "derived/claims/board.json", claims)
counts = "; ".join(f"{name}: {count}" for name, count in pd.Series([c.verdict for c in claims]).value_counts().items())
display(Markdown(f"{len(claims)} claims. {counts}. The [ledger](claims.html) lists each with its reason."))
