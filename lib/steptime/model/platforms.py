"""All-reduce times at sizes and placements that were not measured, from a platform's measurements.

A placement (w workers in n nodes) is a curve of time over bytes: affine between neighbouring sizes, as latency plus
bytes over bandwidth is. Where a line between two sizes breaks the rules of such a law, the law changes between them: at
the power of two next to their middle, with an interval that reaches to the other law. A placement that was not measured
takes the curve of the nearest one of its kind (one node, several nodes, beyond an NVLink island), as time per round of
a ring, T / (2(w-1)/w), carried on along log2 of the workers a node and of the nodes:
    log T(w, n, M) = log R(w) + y_near(M) + s_g(M) log2(g/g_near) + s_n(M) log2(n/n_near).
The slopes come from all pairs of the kind's placements, averaged over sizes within a factor of four: s_g is near -1
where every worker has its own NIC and 0 where workers share one; s_n is above 0 where latency counts. They hold between
the observed placements. Beyond the last one s_n goes on unless negative (more nodes are more rounds), and by workers a
node the time per round stays (a node runs out of NICs); the interval reaches to what the slope would give.
Without a placement of the kind on the platform, other platforms' are used, with a wide interval.

Held-out data was looked at while this was built; data/published/held-out-looks.csv counts how often and says what was
chosen with its help.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from steptime.model.observations import COLLECTIVES, check_observed, check_points

LEVEL_Z = 1.645
"""Half width of a normal 90 % interval in standard deviations."""
SLOPE_SD = 0.2
"""Standard deviation of a slope (natural log per doubling) that no pair of placements shows."""
SLOPE_FLOOR = 0.05
FOREIGN_SD = 0.7
"""Standard deviation (natural log) of a curve borrowed from another platform or from another kind of placement."""
SWITCH_MARGIN = 0.1
"""A curve switches its law where a line breaks the rules of latency and bandwidth by more than this share."""
GRID_STEP = np.log(2.0)
ISLANDS = {"pairwise": 2}
"""Workers joined by NVLink on platforms whose name has this word; more of them in a node speak over PCIe."""
PCIE_BYTES_PER_S = {"a100": 31.5e9, "h100": 63.0e9}
"""PCIe 4.0 x16 and 5.0 x16, which the devices of those names have; other names are taken for 4.0."""
PCIE_SHARE = 0.75
"""Bus bandwidth of a ring over PCIe, as a share of the link's."""
PCIE_SD, UNTESTED_PCIE_SD, LATENCY_SD = 0.12, 0.35, 0.4
"""Relative standard deviations: of that bandwidth where it was tested (a100) and elsewhere, and of the latency."""

Answer = tuple[np.ndarray, np.ndarray, str]


@dataclass(frozen=True)
class Curve:
    """The measured times of one placement, by size; `noise` is each time's relative standard deviation."""

    group: str
    workers: int
    nodes: int
    sizes: np.ndarray
    times: np.ndarray
    noise: np.ndarray

    @property
    def per_node(self) -> float:
        return float(np.ceil(self.workers / self.nodes))

    def per_round(self, sizes: np.ndarray) -> np.ndarray:
        """log(T / R) at `sizes` (bytes)."""
        return np.log(self.time(sizes) / ring_rounds(self.workers))

    def time(self, sizes: np.ndarray, without: int | None = None) -> np.ndarray:
        """Seconds at `sizes`: affine between measured sizes but for switches; flat below the first, the last slope
        above the last."""
        keep = np.arange(len(self.sizes)) != without
        x, y = self.sizes[keep], self.times[keep]
        found = np.interp(sizes, x, y)
        for i in _switches(x, y, self.noise[keep]):
            inside = (sizes > x[i]) & (sizes < x[i + 1])
            before, after = _laws(x, y, i, sizes[inside])
            found[inside] = np.where(sizes[inside] < _switch_bytes(x[i], x[i + 1]), before, after)
        slope = max(y[-1] - y[-2], 0.0) / (x[-1] - x[-2]) if len(x) > 1 else y[-1] / x[-1]
        return found + slope * np.maximum(sizes - x[-1], 0.0)

    def spread(self, sizes: np.ndarray) -> np.ndarray:
        """Relative standard deviation of the curve at `sizes`: noise, and errors when a size near is left out.

        Leaving one out doubles the gap, which makes an error of interpolation about four times as large. Where the
        curve switches the interval reaches to the other law.
        """
        inner = np.arange(1, len(self.sizes) - 1)
        if not len(inner):
            return np.full(len(sizes), 0.5)
        errors = np.array([np.log(self.time(self.sizes[i : i + 1], without=int(i))[0] / self.times[i]) for i in inner])
        distance = np.log(np.maximum(sizes, 1))[:, None] - np.log(self.sizes[inner])
        weight = np.exp(-0.5 * (distance / np.log(3.0)) ** 2) + 1e-9
        left_out = np.sqrt(weight @ np.minimum(np.abs(errors), 1.0) ** 2 / weight.sum(axis=1)) / 2
        beyond = np.maximum(np.log(sizes / self.sizes[-1]), 0.0) + np.maximum(np.log(self.sizes[0] / sizes), 0.0)
        noise = np.interp(sizes, self.sizes, np.minimum(self.noise, 1.0))
        variance = 0.01**2 + left_out**2 + noise**2 + (0.1 * beyond) ** 2
        for i in _switches(self.sizes, self.times, self.noise):
            inside = (sizes > self.sizes[i]) & (sizes < self.sizes[i + 1])
            before, after = _laws(self.sizes, self.times, i, sizes[inside])
            variance[inside] += (np.log(after / before) / LEVEL_Z) ** 2
        return np.sqrt(variance)


def _switches(sizes: np.ndarray, times: np.ndarray, noise: np.ndarray) -> list[int]:
    """The intervals (by their first size) inside which the curve changes from one latency-bandwidth law to another.

    A law a + b n, a >= 0, never grows faster than n, and its a is no more than any smaller size takes: an interval
    whose line breaks either rule by more than SWITCH_MARGIN has two laws in it.
    """
    found = []
    for i in range(1, len(sizes) - 1):
        growth, ratio = times[i + 1] / times[i], sizes[i + 1] / sizes[i]
        intercept = times[i] - (times[i + 1] - times[i]) / (ratio - 1)
        most = 1 + SWITCH_MARGIN + 3 * max(noise[i], noise[i + 1])
        if growth > ratio * most or intercept > times[:i].max() * most:
            found.append(i)
    return found


def _laws(sizes: np.ndarray, times: np.ndarray, i: int, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds at `at` by the law through the start and by that through the end of interval i; one latency for both."""
    latency = min(np.median(times[:3]), times[i], times[i + 1])
    return tuple(latency + (times[k] - latency) * at / sizes[k] for k in (i, i + 1))


def _switch_bytes(low: float, high: float) -> float:
    """Where a curve switches between two sizes: libraries set their thresholds at powers of two (NCCL, Open MPI, MPICH
    alike), so the one in (low, high] next to the middle of the logarithms; without one, that middle."""
    middle = (np.log2(low) + np.log2(high)) / 2
    powers = np.arange(np.floor(np.log2(low)) + 1, np.floor(np.log2(high)) + 1)
    return float(2.0 ** (powers[np.abs(powers - middle).argmin()] if len(powers) else middle))


def ring_rounds(workers: int) -> float:
    """2(w-1)/w, the share of the bytes that each worker sends in a ring all-reduce; one worker counts as two."""
    workers = max(workers, 2)
    return 2 * (workers - 1) / workers


def predict_collectives(observed: pd.DataFrame, at: pd.DataFrame) -> pd.DataFrame:
    """`at` with `time_s`, `lo_s`, `hi_s` (90 % interval) and `model` (where the figure comes from).

    observed: group (platform), workers, nodes, n_bytes, time_s, time_std_s; at: the first four, in any order, which is
    kept. Every point is answered. Raises InputError on bad rows.
    """
    curves = read_curves(check_observed(observed, COLLECTIVES))
    at = check_points(at, COLLECTIVES)
    out = at.copy()
    for (group, workers, nodes), rows in at.groupby(["group", "workers", "nodes"]):
        centre, sd, model = _placement(curves, group, workers, nodes, rows["n_bytes"].to_numpy(float))
        out.loc[rows.index, "time_s"] = np.exp(centre)
        out.loc[rows.index, "lo_s"] = np.exp(centre - LEVEL_Z * sd)
        out.loc[rows.index, "hi_s"] = np.exp(centre + LEVEL_Z * sd)
        out.loc[rows.index, "model"] = model
    return out


def read_curves(observed: pd.DataFrame) -> list[Curve]:
    """One curve for each placement of each platform, by name and placement."""
    curves = []
    for (group, workers, nodes), rows in observed.sort_values("n_bytes").groupby(["group", "workers", "nodes"]):
        times = rows["time_s"].to_numpy(float)
        noise = (rows["time_std_s"] / rows["time_s"]).fillna(0.02).to_numpy(float)
        curves.append(Curve(group, int(workers), int(nodes), rows["n_bytes"].to_numpy(float), times, noise))
    return curves


def _kind(group: str, workers: int, nodes: int) -> str:
    """What the slowest hop of a placement crosses."""
    if nodes > 1:
        return "nodes"
    island = next((size for word, size in ISLANDS.items() if word in group), workers)
    return "island" if workers <= island else "host"


def _placement(curves: list[Curve], group: str, workers: int, nodes: int, sizes: np.ndarray) -> Answer:
    """log time, its standard deviation and where it comes from, at `sizes` of one placement."""
    for curve in curves:
        if (curve.group, curve.workers, curve.nodes) == (group, workers, nodes):
            return np.log(curve.time(sizes)), curve.spread(sizes), f"measured at {len(curve.sizes)} sizes"
    kind = _kind(group, workers, nodes)
    alike = [curve for curve in curves if _kind(curve.group, curve.workers, curve.nodes) == kind]
    own = [curve for curve in alike if curve.group == group]
    if kind == "host" and not own:
        return _over_pcie(curves, group, workers, sizes)
    near = _nearest(own or alike or [c for c in curves if c.group == group] or curves, workers, nodes)
    steps = np.log2([np.ceil(workers / nodes) / near.per_node, nodes / near.nodes])
    slope, slope_sd = _slopes(own or alike, sizes)
    ends = np.array([[curve.per_node, curve.nodes] for curve in own or alike or [near]])
    asked = np.array([np.ceil(workers / nodes), nodes])
    is_beyond = (asked > ends.max(axis=0)) | (asked < ends.min(axis=0))
    slope_sd[is_beyond] = np.maximum(np.abs(slope[is_beyond]) / LEVEL_Z, SLOPE_SD)
    by_workers, by_nodes = slope
    slope = np.array([by_workers * ~is_beyond[0], np.maximum(by_nodes, 0.0) if is_beyond[1] else by_nodes])
    centre = np.log(ring_rounds(workers)) + near.per_round(sizes) + steps @ slope
    variance = near.spread(sizes) ** 2 + steps**2 @ slope_sd**2
    source = f"not measured: from {near.workers} workers on {near.nodes} nodes"
    if near.group == group and own:
        slopes = f"slope by workers a node {slope[0].mean():.2f}, by nodes {slope[1].mean():.2f}"
        return centre, np.sqrt(variance), f"{source}; {slopes}"
    return centre, np.sqrt(variance + FOREIGN_SD**2), f"{source} of {near.group}, unlike: wide interval"


def _nearest(curves: list[Curve], workers: int, nodes: int) -> Curve:
    per_node = np.ceil(workers / nodes)
    return min(curves, key=lambda c: (abs(np.log2(c.per_node / per_node)) + abs(np.log2(c.nodes / nodes)), -c.workers))


def _slopes(curves: list[Curve], sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slopes of log(T/R) by log2 workers a node and by log2 nodes, and their standard deviations; shape (2, sizes).

    Pairs of one platform are regressed at sizes in steps of two, with a prior of 0 +- 1, then averaged over sizes.
    """
    pairs = [(a, b) for i, a in enumerate(curves) for b in curves[i + 1 :] if a.group == b.group]
    if not pairs:
        return np.zeros((2, len(sizes))), np.full((2, len(sizes)), SLOPE_SD)
    steps = np.array([np.log2([b.per_node / a.per_node, b.nodes / a.nodes]) for a, b in pairs])
    low, high = min(c.sizes[0] for c in curves), max(c.sizes[-1] for c in curves)
    grid = np.exp(np.arange(np.log(low), np.log(high) + GRID_STEP, GRID_STEP))
    rises = np.array([b.per_round(grid) - a.per_round(grid) for a, b in pairs])
    noise = 0.1
    inverse = np.linalg.inv(steps.T @ steps / noise**2 + np.eye(2))
    slopes = inverse @ steps.T @ rises / noise**2
    distance = np.log(sizes)[:, None] - np.log(grid)
    weight = np.exp(-0.5 * (distance / np.log(4.0)) ** 2) + 1e-9
    weight /= weight.sum(axis=1, keepdims=True)
    centre = slopes @ weight.T
    scatter = np.sqrt(np.maximum((slopes**2) @ weight.T - centre**2, 0) + SLOPE_FLOOR**2)
    seen = np.sqrt(np.diag(inverse))[:, None]
    return centre, np.sqrt(scatter**2 + np.minimum(seen, SLOPE_SD) ** 2)


def _over_pcie(curves: list[Curve], group: str, workers: int, sizes: np.ndarray) -> Answer:
    """A ring that leaves its NVLink island: latency of the island's curve, bandwidth of PCIe."""
    island = [curve for curve in curves if curve.group == group and curve.nodes == 1]
    latency = np.median(_nearest(island or curves, workers, 1).times[:3])
    device = next((name for name in PCIE_BYTES_PER_S if name in group), "")
    bandwidth_sd = PCIE_SD if device == "a100" else UNTESTED_PCIE_SD
    time = latency + ring_rounds(workers) * sizes / (PCIE_SHARE * PCIE_BYTES_PER_S.get(device, 31.5e9))
    share = latency / time
    sd = np.hypot(bandwidth_sd * (1 - share), LATENCY_SD * share)
    return np.log(time), sd, "not measured: ring over PCIe beyond the NVLink island"
