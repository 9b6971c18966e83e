"""What predictions must beat: the trivial and the simple ones. Each takes observations and points and gives seconds.

A baseline answers each group from the group's own rows, nan where it has none.
"""

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from steptime.model.collectives import AllReduce
from steptime.model.fitting import fit_all_reduce

Baseline = Callable[[pd.DataFrame, pd.DataFrame], np.ndarray]


def perfect_scaling(observed: pd.DataFrame, at: pd.DataFrame) -> np.ndarray:
    """The step of the fewest workers, at the nearest batch, in proportion to the batch: more workers cost nothing."""

    def answer(rows: pd.DataFrame, asked: pd.DataFrame) -> np.ndarray:
        base = rows[rows["workers"] == rows["workers"].min()].groupby("local_batch")["step_time_s"].mean()
        batch = _nearest(base.index.to_numpy(float), asked["local_batch"].to_numpy(float))
        return base.loc[batch].to_numpy() * asked["local_batch"].to_numpy() / batch

    return _by_group(observed, at, answer)


def last_point(observed: pd.DataFrame, at: pd.DataFrame) -> np.ndarray:
    """The step of the most workers at the nearest batch; of several numbers of nodes, the nearest."""

    def answer(rows: pd.DataFrame, asked: pd.DataFrame) -> np.ndarray:
        return _at_batches(rows, asked, lambda part, points: _at_scale(part, points, part["workers"].max()))

    return _by_group(observed, at, answer)


def ring_term(observed: pd.DataFrame, at: pd.DataFrame) -> np.ndarray:
    """a + b 2(w-1)/w through the fewest and the most workers at the nearest batch."""

    def line(rows: pd.DataFrame, asked: pd.DataFrame) -> np.ndarray:
        few, many = rows["workers"].min(), rows["workers"].max()
        first, last = (_at_scale(rows, asked, scale) for scale in (few, many))
        if few == many:
            return last
        share = (_ring_share(asked["workers"]) - _ring_share(few)) / (_ring_share(many) - _ring_share(few))
        return first + (last - first) * share.to_numpy()

    return _by_group(observed, at, lambda rows, asked: _at_batches(rows, asked, line))


def alpha_beta(observed: pd.DataFrame, at: pd.DataFrame) -> np.ndarray:
    """c + 2(w-1) a + 2(w-1)/w b, all >= 0, with the smallest squared relative errors at the nearest batch."""

    def terms(workers: pd.Series) -> np.ndarray:
        return np.column_stack([np.ones(len(workers)), 2.0 * (workers - 1), _ring_share(workers)])

    def line(rows: pd.DataFrame, asked: pd.DataFrame) -> np.ndarray:
        times = rows["step_time_s"].to_numpy(float)
        return terms(asked["workers"]) @ nnls(terms(rows["workers"]) / times[:, None], np.ones(len(rows)))[0]

    return _by_group(observed, at, lambda rows, asked: _at_batches(rows, asked, line))


def interpolation(observed: pd.DataFrame, at: pd.DataFrame) -> np.ndarray:
    """All-reduce: lines through log(time) over log(bytes) of the placement; of one not observed, of the nearest by
    workers, in proportion to 2(w-1)/w. Beyond the sizes the last time a byte, below them the first time."""

    def line(rows: pd.DataFrame, sizes: np.ndarray) -> np.ndarray:
        rows = rows.sort_values("n_bytes")
        x, y = rows["n_bytes"].to_numpy(float), rows["time_s"].to_numpy(float)
        found = np.exp(np.interp(np.log(sizes), np.log(x), np.log(y)))
        return found * np.maximum(sizes / x[-1], 1.0)

    return _by_group(observed, at, lambda rows, asked: _at_placements(rows, asked, line))


def alpha_beta_line(observed: pd.DataFrame, at: pd.DataFrame) -> np.ndarray:
    """All-reduce: a + b n of the placement (relative errors); of one not observed, of the nearest by workers, in
    proportion to 2(w-1)/w."""

    def line(rows: pd.DataFrame, sizes: np.ndarray) -> np.ndarray:
        if rows["n_bytes"].nunique() < 2:
            cost = AllReduce(0.0, float((rows["time_s"] / rows["n_bytes"]).mean()))
        else:
            cost = fit_all_reduce(rows["n_bytes"].to_numpy(), rows["time_s"].to_numpy())
        return cost.time_s(sizes)

    return _by_group(observed, at, lambda rows, asked: _at_placements(rows, asked, line))


STEP_BASELINES: Mapping[str, Baseline] = {
    "perfect scaling": perfect_scaling,
    "last point": last_point,
    "ring term": ring_term,
    "alpha-beta": alpha_beta,
}
COLLECTIVE_BASELINES: Mapping[str, Baseline] = {"interpolation": interpolation, "alpha-beta": alpha_beta_line}


def _ring_share(workers):  # type: ignore[no-untyped-def]
    return 2 * (workers - 1) / workers


def _nearest(known: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """For each asked value the known one whose logarithm is nearest."""
    return known[np.abs(np.log(asked)[:, None] - np.log(known)).argmin(axis=1)]


def _by_group(observed: pd.DataFrame, at: pd.DataFrame, answer: Baseline) -> np.ndarray:
    found = pd.Series(np.nan, index=at.index)
    groups = dict(list(observed.groupby("group")))
    for group, asked in at.groupby("group"):
        if group in groups:
            found[asked.index] = answer(groups[group], asked)
    return found.to_numpy()


def _at_batches(rows: pd.DataFrame, asked: pd.DataFrame, answer: Baseline) -> np.ndarray:
    """`answer` for each asked batch from the rows of the nearest observed one."""
    found = pd.Series(np.nan, index=asked.index)
    batches = rows["local_batch"].to_numpy(float)
    for batch, points in asked.groupby(_nearest(np.unique(batches), asked["local_batch"].to_numpy(float))):
        found[points.index] = answer(rows[batches == batch], points)
    return found.to_numpy()


def _at_scale(rows: pd.DataFrame, asked: pd.DataFrame, workers: int) -> np.ndarray:
    """Times on so many workers, at the nearest number of nodes."""
    times = rows[rows["workers"] == workers].set_index("nodes")["step_time_s"]
    return times.loc[_nearest(times.index.to_numpy(float), asked["nodes"].to_numpy(float))].to_numpy()


def _at_placements(
    rows: pd.DataFrame, asked: pd.DataFrame, line: Callable[[pd.DataFrame, np.ndarray], np.ndarray]
) -> np.ndarray:
    found = pd.Series(np.nan, index=asked.index)
    seen = dict(list(rows.groupby(["workers", "nodes"])))
    for (workers, nodes), points in asked.groupby(["workers", "nodes"]):
        near = min(seen, key=lambda key: (key != (workers, nodes), abs(np.log(key[0] / workers)), key))
        scale = _ring_share(max(workers, 2)) / _ring_share(max(near[0], 2))
        found[points.index] = scale * line(seen[near], points["n_bytes"].to_numpy(float))
    return found.to_numpy()
