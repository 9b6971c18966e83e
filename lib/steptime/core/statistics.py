"""Estimates and comparisons of step times. The unit of replication is the process, not the sample.

Samples of one process share its memory layout, its compiled code and its moment on the machine, and follow one
another: they are neither independent nor free of what that process drew. So every process is reduced to one number,
the median of its samples, and all that is inferred is inferred from the spread of those numbers over processes. That
also takes care of the autocorrelation within a process, whatever its form.

Medians are compared on the log scale: a slow machine multiplies, and a ratio is what the studies report.

The intervals are Student's. The percentile bootstrap would be the habit, but with 3 to 10 processes it resamples 3 to
10 numbers: its interval is that of a normal distribution with the variance divided by n instead of n - 1, so that a
nominal 95 % covers 75 % of the time with 3 processes and 84 % with 5 (tests/unit/test_statistics.py shows it).
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from steptime.core.errors import InputError

LEVEL = 0.95
UNSEEN_ROUNDS = 2
"""The latest rounds that the stop rule never looks at; see `settled`."""
FEWEST_LOOKED_AT = 3


@dataclass(frozen=True)
class Estimate:
    """Median step time in seconds with its 95 % interval, and how many processes and samples it rests on."""

    median_s: float
    lo_s: float
    hi_s: float
    processes: int
    samples: int


@dataclass(frozen=True)
class Comparison:
    """Ratio a / b of two median step times, its interval at the level asked for, and whether that excludes 1."""

    ratio: float
    lo: float
    hi: float
    p_value: float
    different: bool


def usable(samples: pd.DataFrame, phase: str = "step") -> pd.DataFrame:
    """The repetitions of `phase` that count: whole (no layer), no warm-up, not disturbed. Adds the column `process`.

    `samples` is a campaign's `joined()` table or a part of it. A case that the disturbances leave with fewer than two
    processes keeps all its timed repetitions: then the disturbance was its normal condition, and a wide interval that
    says so is worth more than no figure.
    """
    timed = samples[(samples["phase"] == phase) & samples["layer"].isna() & ~samples["is_warmup"]]
    clean = timed[~timed["is_disturbed"]]
    processes = clean.groupby("case_id")["run_id"].nunique()
    kept = clean["case_id"].isin(processes.index[processes >= 2])
    never_calm = ~timed["case_id"].isin(processes.index[processes >= 2])
    rows = pd.concat([clean[kept], timed[never_calm]]).sort_index()
    return rows.assign(process=rows["run_id"])


def estimate(samples: pd.DataFrame) -> Estimate:
    """The median step time over processes: the geometric mean of the processes' medians, with Student's 95 % interval.

    `samples`: columns `process`, `time_s` (seconds, > 0), from `usable`. Raises InputError with fewer than two
    processes, which have no interval.
    """
    medians = _log_medians(samples, "process")
    if len(medians) < 2:
        raise InputError(f"samples: processes = {len(medians)}: an interval needs at least 2; measure more rounds")
    centre, half = float(medians.mean()), float(half_width(medians.to_numpy()))
    return Estimate(
        float(np.exp(centre)), float(np.exp(centre - half)), float(np.exp(centre + half)), len(medians), len(samples)
    )


def compare(a: pd.DataFrame, b: pd.DataFrame, level: float = 0.01) -> Comparison:
    """Is `a` slower or faster than `b`? Student's t on the per-round differences of the processes' log medians.

    `a`, `b`: columns `round`, `time_s`, from `usable`; pairing by round takes out what drifts from round to round.
    `level`: the chance of calling two equal cases different; the interval's level is 1 - level. Raises InputError with
    fewer than two common rounds.
    """
    differences = (_log_medians(a, "round") - _log_medians(b, "round")).dropna().to_numpy()
    if len(differences) < 2:
        raise InputError(f"samples: common rounds = {len(differences)}: a comparison needs 2; measure more rounds")
    centre, half = float(differences.mean()), float(half_width(differences, 1 - level))
    spread = float(differences.std(ddof=1)) / np.sqrt(len(differences))
    p_value = float(2 * stats.t.sf(abs(centre) / spread, len(differences) - 1)) if spread > 0 else float(centre == 0)
    return Comparison(
        float(np.exp(centre)), float(np.exp(centre - half)), float(np.exp(centre + half)), p_value, abs(centre) > half
    )


def half_width(log_medians: np.ndarray, level: float = LEVEL) -> np.ndarray:
    """Half the width of Student's interval over the last axis (processes): on the log scale, so relative to the median.

    With one process it is infinite.
    """
    processes = log_medians.shape[-1]
    if processes < 2:
        return np.full(log_medians.shape[:-1], np.inf)
    quantile = stats.t.ppf((1 + level) / 2, processes - 1)
    return quantile * log_medians.std(axis=-1, ddof=1) / np.sqrt(processes)


def settled(log_medians: np.ndarray, target: float) -> np.ndarray:
    """May measuring stop? True where the half-width is at most `target` without the two latest rounds.

    `log_medians`: (..., rounds), in the order measured. Stopping as soon as an interval looks narrow picks the moments
    at which the spread is underestimated: looking after every round from the third on, a nominal 95 % covers 91 % where
    target and spread are alike. With two further rounds, which the decision has not seen, it covers 93.5 to 95 %
    whatever the spread (tests/unit/test_statistics.py). The final interval rests on all rounds, and can be a little
    wider than the target.
    """
    seen = log_medians[..., : max(log_medians.shape[-1] - UNSEEN_ROUNDS, 0)]
    if seen.shape[-1] < FEWEST_LOOKED_AT:
        return np.zeros(log_medians.shape[:-1], dtype=bool)
    return half_width(seen) <= target


def _log_medians(samples: pd.DataFrame, unit: str) -> pd.Series:
    return np.log(samples.groupby(unit, sort=True)["time_s"].median())
