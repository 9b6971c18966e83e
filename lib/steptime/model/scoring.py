"""How good predictions are: error, coverage and width of the intervals, and the floors that no prediction undercuts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
from scipy.optimize import linprog
from scipy.special import ndtri

from steptime.core.errors import InputError
from steptime.model.observations import Kind

LEVEL = 0.9
DRAWS = 2000
NEIGHBOURS = 5
"""Sizes on either side whose median stands for a measured time's true value."""


@dataclass(frozen=True)
class Score:
    """Errors are |predicted / measured - 1|; width is (hi - lo) / predicted, median; nan without intervals.

    `coverage_lo` and `coverage_hi` bound the 95 % interval of the coverage, groups resampled.
    """

    points: int
    groups: int
    median: float
    p90: float
    coverage: float
    coverage_lo: float
    coverage_hi: float
    width: float


@dataclass(frozen=True)
class Floor:
    """Median and 90 % quantile of the relative error that is left to a prediction that knows what `what` says."""

    what: str
    median: float
    p90: float


def compared(observed: pd.DataFrame, truth: pd.DataFrame, predicted: pd.DataFrame, kind: Kind) -> pd.DataFrame:
    """The points of `truth` with `error` (signed), `is_covered`, `width`, `scale_ratio` and `is_seen`.

    predicted: the same points with the time and, for intervals, lo_s and hi_s. scale_ratio: workers over the most that
    were observed of the group (nan without any); is_seen: the group was observed on so many workers in so many nodes.
    Raises InputError when the points differ.
    """
    key = list(kind.key)
    truth, predicted = truth.reset_index(drop=True), predicted.reset_index(drop=True)
    if not truth[key].equals(predicted[key]):
        raise InputError("scoring: the predicted points are not those that were measured; predict these, in this order")
    out = truth[key].copy()
    time = predicted[kind.time]
    out["error"] = time / truth[kind.time] - 1
    intervals = {"lo_s", "hi_s"} <= set(predicted.columns)
    inside = predicted["lo_s"].le(truth[kind.time]) & predicted["hi_s"].ge(truth[kind.time]) if intervals else np.nan
    out["is_covered"] = inside
    out["width"] = (predicted["hi_s"] - predicted["lo_s"]) / time if intervals else np.nan
    out["scale_ratio"] = truth["workers"] / truth["group"].map(observed.groupby("group")["workers"].max())
    place = ["group", "workers", "nodes"]
    seen = pd.MultiIndex.from_frame(observed[place])
    out["is_seen"] = pd.MultiIndex.from_frame(truth[place]).isin(seen)
    return out


def score(table: pd.DataFrame) -> Score:
    """The score of rows of `compared`; points without a prediction (nan) are left out and not counted."""
    table = table[table["error"].notna()]
    if table.empty:
        return Score(0, 0, *[float("nan")] * 6)
    error = table["error"].abs()
    coverage = float(table["is_covered"].astype(float).mean())
    lo, hi = coverage_interval(table) if np.isfinite(coverage) else (coverage, coverage)
    median, p90 = float(error.median()), float(error.quantile(0.9))
    return Score(len(table), table["group"].nunique(), median, p90, coverage, lo, hi, float(table["width"].median()))


def coverage_interval(table: pd.DataFrame) -> tuple[float, float]:
    """95 % interval of the share of covered points: groups are drawn with replacement, each with all its points.

    0 to 1 for a single group: how groups differ is not known.
    """
    covered = table["is_covered"].astype(float).groupby(table["group"]).agg(["sum", "size"]).to_numpy()
    if len(covered) < 2:
        return 0.0, 1.0
    draws = np.random.default_rng(1).integers(len(covered), size=(DRAWS, len(covered)))
    sums = covered[draws].sum(axis=1)
    lo, hi = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])
    return float(lo), float(hi)


def scores(table: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """A score for each combination of the columns `by`, in sorted order: `by`, then the fields of Score."""
    rows = []
    for values, part in table.groupby(list(by), observed=True):
        rows.append(dict(zip(by, values, strict=True)) | asdict(score(part)))
    return pd.DataFrame(rows, columns=[*by, *Score.__dataclass_fields__])


def noise_floor(observed: pd.DataFrame, kind: Kind) -> dict[str, float]:
    """What a perfect prediction of each row's mean would show, if the noise is normal with the row's deviation.

    `median` and `p90` of |relative error| over the rows that have a standard deviation, `width`: that of the narrowest
    90 % interval, median, and `share`: how many rows have one.
    """
    ratio = (observed[kind.std] / observed[kind.time]).dropna().to_numpy(float)
    if not len(ratio):
        return {"median": float("nan"), "p90": float("nan"), "width": float("nan"), "share": 0.0}
    errors = np.outer(ratio, ndtri((np.arange(1, 200) / 200 + 1) / 2))
    width = 2 * ndtri((1 + LEVEL) / 2) * np.median(ratio)
    median, p90, share = np.median(errors), np.quantile(errors, 0.9), len(ratio) / len(observed)
    return {"median": float(median), "p90": float(p90), "width": float(width), "share": share}


def smooth_floor(truth: pd.DataFrame, kind: Kind) -> Floor:
    """Error of a smooth law that was fitted to the measured points themselves.

    log T = a level for each size and each number of nodes + log2(workers) (a + b log size), for each group, with the
    smallest sum of absolute deviations: what jumps from one placement to the next stays as error. Groups with fewer
    than twice as many points as terms are left out; nan without any.
    """
    errors = np.concatenate([np.array([np.nan]), *(_smooth_errors(rows, kind) for _, rows in truth.groupby("group"))])
    return _floor("a smooth law fitted to the held-out points themselves", errors)


def _smooth_errors(rows: pd.DataFrame, kind: Kind) -> np.ndarray:
    seen = np.log(rows[kind.time].to_numpy(float))
    levels = [pd.get_dummies(rows[name].astype(str)).to_numpy(float) for name in (kind.size, "nodes")]
    doublings = np.log2(rows["workers"].to_numpy(float))[:, None]
    size = np.log(rows[[kind.size]].to_numpy(float))
    design = np.hstack([levels[0], levels[1][:, 1:], doublings, doublings * (size - size.mean())])
    count, terms = design.shape
    if count < 2 * terms:
        return np.array([])
    # minimise the sum of u with -u <= seen - design @ theta <= u
    cost = np.r_[np.zeros(terms), np.ones(count)]
    bounds = [(None, None)] * terms + [(0, None)] * count
    eye = np.eye(count)
    limits = np.block([[design, -eye], [-design, -eye]])
    theta = linprog(cost, A_ub=limits, b_ub=np.r_[seen, -seen], bounds=bounds).x[:terms]
    return np.abs(np.expm1(design @ theta - seen))


def neighbour_floor(truth: pd.DataFrame, kind: Kind) -> Floor:
    """Error of each time against the median of the nearest sizes of its placement (five on either side), itself not."""
    errors = []
    for _, rows in truth.sort_values(kind.size).groupby(["group", "workers", "nodes"]):
        times = rows[kind.time].to_numpy(float)
        for i, time in enumerate(times):
            near = np.r_[times[max(i - NEIGHBOURS, 0) : i], times[i + 1 : i + 1 + NEIGHBOURS]]
            errors.append(np.median(near) / time - 1 if len(near) else np.nan)
    return _floor("the held-out times of the next sizes", np.array(errors))


def grid_floor(observed: pd.DataFrame, truth: pd.DataFrame, kind: Kind) -> Floor:
    """Error of straight lines between the observed sizes, had these been measured without noise.

    The time at an observed size is the median of the held-out ones of the five nearest sizes of the same placement.
    """
    place = ["group", "workers", "nodes"]
    knots = {key: np.sort(rows[kind.size].to_numpy(float)) for key, rows in observed.groupby(place)}
    errors = []
    for key, rows in truth.groupby(place):
        if key not in knots:
            continue
        sizes, times = rows[kind.size].to_numpy(float), rows[kind.time].to_numpy(float)
        far = np.abs(np.log(sizes) - np.log(knots[key])[:, None])
        true = np.median(times[far.argsort(axis=1, kind="stable")[:, :NEIGHBOURS]], axis=1)
        errors.append(np.interp(sizes, knots[key], true) / times - 1)
    return _floor("lines between the observed sizes, had these no noise", np.concatenate([np.array([np.nan]), *errors]))


def _floor(what: str, errors: np.ndarray) -> Floor:
    known = np.abs(errors[np.isfinite(errors)])
    if not len(known):
        return Floor(what, float("nan"), float("nan"))
    return Floor(what, float(np.median(known)), float(np.quantile(known, 0.9)))
