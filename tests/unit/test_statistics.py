"""Intervals, the stop rule and comparisons, on planted series: what a nominal 95 % covers and how often 1 % errs."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from steptime.core.errors import InputError
from steptime.core.statistics import LEVEL, compare, estimate, half_width, settled, usable

SERIES = 2000
ROUNDS = 10
BETWEEN = 0.02
"""Standard deviation of the processes' log medians."""


@cache
def log_medians() -> np.ndarray:
    """(SERIES, ROUNDS): log medians of processes whose 40 samples follow an AR(1) with 0.8, skewed as step times are.

    The median of all processes is planted at 0.
    """
    rng = np.random.default_rng(3)
    samples = np.empty((SERIES, ROUNDS, 40))
    state = rng.normal(size=(SERIES, ROUNDS))
    for step in range(samples.shape[-1]):
        state = 0.8 * state + 0.6 * rng.normal(size=state.shape)
        samples[..., step] = np.where(state > 0, 0.03, 0.01) * state
    return np.median(samples, axis=-1) + BETWEEN * rng.normal(size=(SERIES, ROUNDS))


@cache
def truth() -> float:
    return float(log_medians().mean())


def covered(medians: np.ndarray) -> np.ndarray:
    return np.abs(medians.mean(axis=-1) - truth()) <= half_width(medians)


@pytest.mark.parametrize("processes", [3, 5])
def test_interval_covers_with_a_fixed_number_of_processes(processes: int) -> None:
    assert 0.93 <= covered(log_medians()[:, :processes]).mean() <= 0.97


@pytest.mark.parametrize("processes", [3, 5])
@pytest.mark.parametrize("target_over_spread", [0.25, 0.5, 0.7, 1, 1.5, 2, 4])
def test_interval_covers_with_the_stop_rule_on(processes: int, target_over_spread: float) -> None:
    """First decision on 3 or 5 processes, at most ROUNDS: over targets that stop always, sometimes and never."""
    medians = log_medians()
    running = np.ones(SERIES, dtype=bool)
    hit = np.zeros(SERIES, dtype=bool)
    for rounds in range(processes + 2, ROUNDS + 1):
        stops = running & (settled(medians[:, :rounds], target_over_spread * BETWEEN) | (rounds == ROUNDS))
        hit[stops] = covered(medians[stops, :rounds])
        running &= ~stops
    assert not running.any()
    assert 0.93 <= hit.mean() <= 0.97


def test_stopping_as_soon_as_it_looks_narrow_would_not_cover() -> None:
    """Why two rounds stay unseen: the same series, looked at whole after every round."""
    medians = log_medians()
    running = np.ones(SERIES, dtype=bool)
    hit = np.zeros(SERIES, dtype=bool)
    for rounds in range(3, ROUNDS + 1):
        stops = running & ((half_width(medians[:, :rounds]) <= 0.7 * BETWEEN) | (rounds == ROUNDS))
        hit[stops] = covered(medians[stops, :rounds])
        running &= ~stops
    assert hit.mean() < 0.93


@pytest.mark.parametrize(("processes", "at_most"), [(3, 0.80), (5, 0.88)])
def test_percentile_bootstrap_would_not_cover(processes: int, at_most: float) -> None:
    rng = np.random.default_rng(5)
    medians = log_medians()[:, :processes]
    drawn = rng.integers(processes, size=(500, processes))
    means = medians[:, drawn].mean(axis=-1)
    lo, hi = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=-1)
    assert ((lo <= truth()) & (truth() <= hi)).mean() < at_most


def test_settled_ignores_the_two_latest_rounds() -> None:
    calm, wild = [0.0, 0.001, -0.001], [5.0, -5.0]
    assert settled(np.array(calm + wild), 0.01)
    assert not settled(np.array(wild + calm), 0.01)
    assert not settled(np.array(calm + wild[:1]), 0.01), "two seen rounds decide nothing"


def samples_of(medians: list[float], column: str, factor: float = 1.0) -> pd.DataFrame:
    rows = [(key, factor * median * offset) for key, median in enumerate(medians) for offset in (0.9, 1.0, 1.4)]
    return pd.DataFrame(rows, columns=[column, "time_s"])


def test_estimate_is_students_interval_of_the_log_medians() -> None:
    medians = [0.010, 0.011, 0.013, 0.012]
    result = estimate(samples_of(medians, "process"))
    interval = stats.t.interval(0.95, 3, np.log(medians).mean(), stats.sem(np.log(medians)))
    assert result.median_s == pytest.approx(np.exp(np.log(medians).mean()))
    assert (result.lo_s, result.hi_s) == pytest.approx(tuple(np.exp(interval)))
    assert (result.processes, result.samples) == (4, 12)


def test_one_process_has_no_interval() -> None:
    with pytest.raises(InputError, match="processes = 1"):
        estimate(samples_of([0.01], "process"))
    with pytest.raises(InputError, match="common rounds = 1"):
        compare(samples_of([0.01], "round"), samples_of([0.01, 0.02], "round"))


def test_compare_is_the_paired_t_test() -> None:
    a, b = [0.010, 0.021, 0.030, 0.044], [0.011, 0.020, 0.029, 0.042]
    result = compare(samples_of(a, "round"), samples_of(b, "round"))
    assert result.p_value == pytest.approx(stats.ttest_rel(np.log(a), np.log(b)).pvalue)
    assert result.ratio == pytest.approx(np.exp(np.mean(np.log(a) - np.log(b))))
    assert result.different == (result.p_value < 0.01)
    assert result.lo < 1 < result.hi


def test_pairing_by_round_takes_out_a_common_drift() -> None:
    drift = [0.010, 0.014, 0.020, 0.028, 0.040]
    shaken = [median * (1 + 0.001 * (-1) ** key) for key, median in enumerate(drift)]
    result = compare(samples_of(shaken, "round", 1.03), samples_of(drift, "round"))
    assert result.different
    assert result.ratio == pytest.approx(1.03, rel=0.002)
    reordered = samples_of(shaken, "round", 1.03).sample(frac=1, random_state=0)
    assert compare(reordered, samples_of(drift, "round")) == result


def test_comparison_errs_at_its_level() -> None:
    """4,000 equal pairs at 1 %: the count called different is binomial; 4.5 standard deviations leave it room."""
    medians = log_medians()
    differences = np.concatenate([medians[:, :5] - medians[:, 5:], (medians[::-1, :5] - medians[:, 5:])])
    called = np.abs(differences.mean(axis=-1)) > half_width(differences, 0.99)
    expected, spread = 0.01 * called.size, np.sqrt(0.01 * 0.99 * called.size)
    assert abs(called.sum() - expected) < 4.5 * spread


def test_comparison_of_equal_tables_is_no_difference() -> None:
    same = samples_of([0.01, 0.02, 0.03], "round")
    assert compare(same, same).p_value == 1
    assert not compare(same, same).different


def table(case: str, run: str, disturbed: list[bool]) -> pd.DataFrame:
    rows = {"is_disturbed": [False, *disturbed], "is_warmup": [True] + [False] * len(disturbed)}
    return pd.DataFrame(rows).assign(case_id=case, run_id=run, phase="step", layer=None, time_s=0.01)


def test_usable_leaves_out_warmups_and_disturbed_samples() -> None:
    samples = pd.concat(
        [
            table("a", "a-r0", [False, True, False]),
            table("a", "a-r1", [False, False, True]),
            table("a", "a-r2", [True, True, True]),
            table("a", "a-r0", [False]).assign(phase="forward"),
            table("a", "a-r0", [False]).assign(layer="conv1"),
        ],
        ignore_index=True,
    )
    kept = usable(samples)
    assert list(kept["process"]) == ["a-r0", "a-r0", "a-r1", "a-r1"]
    assert not kept["is_warmup"].any()
    assert not kept["is_disturbed"].any()
    assert len(usable(samples, "forward")) == 1


def test_usable_keeps_a_case_that_was_never_calm() -> None:
    calm = [table("a", f"a-r{r}", [False, True]) for r in range(2)]
    never = [table("b", "b-r0", [True, True]), table("b", "b-r1", [True, False])]
    kept = usable(pd.concat(calm + never, ignore_index=True))
    assert kept.groupby("case_id").size().to_dict() == {"a": 2, "b": 4}
