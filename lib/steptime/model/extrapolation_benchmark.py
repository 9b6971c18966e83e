"""How long `steptime extrapolate` takes on a table of a public data set's size, beside a fit of one line a batch."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pandas as pd

from steptime.model.baselines import alpha_beta
from steptime.model.extrapolation import extrapolate
from steptime.model.observations import STEPS

GROUPS, ROWS, POINTS = 6, 2_526, 490
"""As many as the step times of Pollux's fit file, and its points to predict."""
MOST_S = 60.0
SEED = 1
NOISE = 0.05
BATCHES = range(8, 137, 8)


def extrapolation_speed(
    rows: int = ROWS, points: int = POINTS, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Time both on the same planted steps, one after the other: a ring of which half the compute hides its part.

    Returns seconds and median relative errors at twice to four times the largest observed scale; reports them.
    """
    observed = _planted(rows, range(1, 17), SEED)
    truth = _planted(points, (32, 48, 64), SEED + 1)
    asked = truth[list(STEPS.key)]
    start = time.perf_counter()
    ours = extrapolate(observed, asked)[STEPS.time].to_numpy()
    between = time.perf_counter()
    simple = alpha_beta(observed, asked)
    end = time.perf_counter()
    result: dict[str, Any] = {"extrapolate_s": between - start, "simple_s": end - between}
    for name, found in (("error", ours), ("simple_error", simple)):
        result[name] = float(np.median(np.abs(found / truth[STEPS.time].to_numpy() - 1)))
    met = result["extrapolate_s"] <= MOST_S
    report(
        f"{len(observed)} rows in {GROUPS} groups, {len(truth)} points: {result['extrapolate_s']:.1f} s, median error "
        f"{result['error']:.1%} (a line a batch: {result['simple_s']:.2f} s, {result['simple_error']:.1%}; goal: at "
        f"most {MOST_S:g} s): {'met' if met else 'MISSED'}"
    )
    return result | {"met": met}


def _planted(rows: int, scales: Iterable[int], seed: int) -> pd.DataFrame:
    """`rows` different steps of all groups, at these scales on full nodes of four and on half as many each."""
    random = np.random.default_rng(seed)
    placements = [(workers, nodes) for workers in scales for nodes in sorted({-(-workers // 4), -(-workers // 2)})]
    every = [(group, *place, batch) for group in range(GROUPS) for place in placements for batch in BATCHES]
    group, workers, nodes, batch = np.array(every)[random.permutation(len(every))[:rows]].T
    compute_s = 0.05 * (1 + group) * (0.25 + 0.75 * batch / 32)
    ring_s = 2 * (workers - 1) / workers * np.where(nodes > 1, 0.4, 0.1)
    step_s = (compute_s + np.maximum(ring_s - 0.5 * compute_s, 0)) * np.exp(NOISE * random.standard_normal(rows))
    columns = ([f"planted-{number}" for number in group], workers, nodes, batch, step_s, NOISE * step_s)
    return pd.DataFrame(dict(zip([*STEPS.key, STEPS.time, STEPS.std], columns, strict=True)))
