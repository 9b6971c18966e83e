"""Intervals, the stop rule and comparisons, on planted series: what a nominal 95 % covers and how often 1 % errs."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats

from steptime.core.errors import InputError
from steptime.core.statistics import (
    CASE,
    CONDITIONS,
    LEVEL,
    agreement,
    case_table,
    compare,
    comparisons,
    counted,
    estimate,
    half_width,
    holm,
    moderated,
    over_budget,
    pair_p_values,
    percentiles,
    ranking,
    rankings,
    settled,
    usable,
)

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


# ------------------------------------------------------------------------ coverage with the whole stop rule on


def step_series(rng: np.random.Generator, series: int, rounds: int, steps: int, correlation: float) -> np.ndarray:
    """(series, rounds, steps): log step times about a median of 0: an AR(1) with standard deviation 3 %, and two steps
    in a hundred that take 1.5 times as long."""
    states = np.empty((series, rounds, steps))
    state = rng.normal(size=(series, rounds))
    for step in range(steps):
        states[..., step] = state
        state = correlation * state + np.sqrt(1 - correlation**2) * rng.normal(size=state.shape)
    slow = rng.uniform(size=states.shape) < 0.02
    return 0.03 * states + np.log(1.5) * slow


def true_log_quantile(between: float, share: float = 0.5) -> float:
    """A quantile over all processes and steps of step_series + a process's own normal factor: solved, not sampled."""
    spread, slow = np.hypot(0.03, between), np.log(1.5)

    def excess(m: float) -> float:
        return 0.98 * stats.norm.cdf(m / spread) + 0.02 * stats.norm.cdf((m - slow) / spread) - share

    return float(optimize.brentq(excess, -1, 2))


@pytest.mark.parametrize("budget_rounds", [4, 7, 99])
@pytest.mark.parametrize("target", [0.005, 0.02, 0.04])
@pytest.mark.parametrize("between", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_interval_covers_the_true_median(correlation: float, between: float, target: float, budget_rounds: int) -> None:
    """As a campaign of one case runs: at least 3 rounds, at most 10, settled or out of budget, in that order.

    A process costs what its steps take and a start; so slow processes use the budget up sooner.
    """
    series, most = 4000, 10
    rng = np.random.default_rng([3, round(10 * correlation), round(1000 * between), round(1000 * target)])
    logs = step_series(rng, series, most, 40, correlation) + between * rng.normal(size=(series, most, 1))
    medians, spent_s = np.median(logs, axis=-1), np.cumsum(20 + np.exp(logs).sum(axis=-1), axis=-1)
    hit, running = np.zeros(series, dtype=bool), np.ones(series, dtype=bool)
    for done in range(2, most + 1):
        out_of_money = over_budget(spent_s[:, done - 1], done, 61.0 * budget_rounds)
        stops = running & ((done >= 3) & settled(medians[:, :done], target) | out_of_money | (done == most))
        seen = medians[stops, :done]
        hit[stops] = np.abs(seen.mean(axis=-1) - true_log_quantile(between)) <= half_width(seen)
        running &= ~stops
    assert not running.any()
    assert 0.93 <= hit.mean() <= 0.97


# ------------------------------------------------------------------------------------------ which is fastest


def campaigns(factors: list[float], rounds: int, spread: float = 0.01, count: int = 2000) -> np.ndarray:
    """(count, rounds, settings): log medians of settings as slow as `factors`, which share what a round brings."""
    rng = np.random.default_rng([5, rounds, len(factors)])
    shared = 0.05 * rng.normal(size=(count, rounds, 1))
    # Frameworks are not equally steady: the last one is three times as unsteady as the first.
    own = spread * np.linspace(1, 3, len(factors)) * rng.normal(size=(count, rounds, len(factors)))
    return np.log(factors) + shared + own


@pytest.mark.parametrize("rounds", [3, 5, 10])
@pytest.mark.parametrize("settings", [2, 4, 8])
def test_equal_settings_are_told_apart_in_at_most_5_percent_of_campaigns(settings: int, rounds: int) -> None:
    """Any one false difference counts, over all pairs. 4 standard deviations of a binomial are its room."""
    wrong = (pair_p_values(campaigns([1.0] * settings, rounds)) < 0.05).any(axis=-1)
    assert wrong.mean() <= 0.05 + 4 * np.sqrt(0.05 * 0.95 / wrong.size)
    assert wrong.any(), "a test that never errs at 5 % has no power"


@pytest.mark.parametrize(("settings", "rounds"), [(8, 6), (15, 4), (15, 6)])
def test_equal_settings_of_very_different_steadiness_are_rarely_told_apart(settings: int, rounds: int) -> None:
    """Spreads from a log-normal distribution, 0.4 to 10 %; and a setting 20 % behind is found in most campaigns."""
    rng = np.random.default_rng([7, settings, rounds])
    spreads = np.exp(rng.normal(np.log(0.02), 0.8, size=(2000, 1, settings)))
    logs = spreads * rng.normal(size=(2000, rounds, settings))
    wrong = (pair_p_values(logs) < 0.05).any(axis=-1)
    assert 0 < wrong.mean() <= 0.05 + 4 * np.sqrt(0.05 * 0.95 / wrong.size)
    logs[..., 0] += 0.2
    assert (pair_p_values(logs)[:, : settings - 1] < 0.05).mean() > 0.8


def test_variances_lean_on_each_other_only_where_there_are_enough() -> None:
    rng = np.random.default_rng(8)
    even = rng.chisquare(5, size=28) / 5
    leaning, freedom = moderated(even, np.full(28, 5))
    assert np.ptp(leaning) < np.ptp(even) / 2
    assert freedom.min() > 5
    assert freedom.max() <= 5 + 3 * 5, "half of what 8 - 2 settings could lend"
    apart = even * np.geomspace(1e-6, 1e6, 28)
    leaning, freedom = moderated(apart, np.full(28, 5))
    assert leaning[14:] == pytest.approx(apart[14:], rel=0.05)
    assert freedom.max() < 5.5
    few = np.array([1.0, 2.0, 3.0])
    assert moderated(few, np.full(3, 5))[0].tolist() == few.tolist()
    same = np.zeros(28)
    assert moderated(same, np.full(28, 5))[0].tolist() == same.tolist()


def test_uncorrected_comparisons_would_err_often() -> None:
    equal = campaigns([1.0] * 8, 5)
    wrong = [
        np.abs((equal[..., a] - equal[..., b]).mean(axis=-1)) > half_width(equal[..., a] - equal[..., b])
        for a in range(8)
        for b in range(a)
    ]
    assert np.mean(np.any(wrong, axis=0)) > 0.3


def test_planted_differences_are_found_and_equals_stay_tied() -> None:
    """0, 3 and 10 % behind the fastest, 1 % spread (the last: 3 %), ten rounds."""
    settings = campaigns([1.0, 1.0, 1.03, 1.10], 10)
    apart = pair_p_values(settings) < 0.05  # pairs: 01 02 03 12 13 23
    assert apart[:, 0].mean() <= 0.05
    assert apart[:, 2].mean() > 0.98, "10 %"
    pair = campaigns([1.0, 1.03], 10, 0.005)
    assert (pair_p_values(pair) < 0.05).mean() > 0.98, "3 %"


def test_holm_by_hand() -> None:
    assert holm(np.array([0.04, 0.01, 0.03])).tolist() == pytest.approx([0.06, 0.03, 0.06])
    assert holm(np.array([0.9, 0.8])).tolist() == [1.0, 1.0]


def steps_of(times_s: dict[str, list[float]], **columns: object) -> pd.DataFrame:
    """A campaign's joined table of one network: {framework: median of each round}, three steps a process."""
    rows = [
        {"framework": name, "round": number, "run_id": f"{name}-r{number}", "time_s": time_s * offset, "case_id": name}
        for name, medians in times_s.items()
        for number, time_s in enumerate(medians)
        for offset in (0.9, 1.0, 1.4)
    ]
    same = {"network": "lenet", "size": "quick", "batch": 32, "dtype": "float32", "device": "cpu", "threads": 1}
    same |= {"workers": 1, "input": "sequential", "phase": "step", "layer": None}
    return pd.DataFrame(rows).assign(is_warmup=False, is_disturbed=False, **(same | columns))


QUICK, EVEN, SLOW = [0.0100, 0.0121, 0.0139], [0.0101, 0.0119, 0.0141], [0.0202, 0.0241, 0.0280]


def test_ranking_names_the_fastest_and_those_tied_with_it() -> None:
    found = rankings(steps_of({"a": SLOW, "b": EVEN, "c": QUICK})).set_index("setting")
    assert found["tied"].to_dict() == {"b": True, "c": True, "a": False}
    assert found.index[0] == "c"
    assert found.loc["a", "ratio"] == pytest.approx(np.exp(np.mean(np.log(SLOW) - np.log(QUICK))))
    assert found.loc["a", "lo"] < 2 < found.loc["a", "hi"]
    assert list(found.columns[: len(CONDITIONS)]) == list(CONDITIONS)


def test_ranking_without_common_rounds_calls_a_tie() -> None:
    steps = usable(steps_of({"a": SLOW, "b": QUICK}))
    apart = steps[(steps["framework"] == "a") ^ (steps["round"] == 0)]
    found = ranking(apart, by="framework").set_index("framework")
    assert found["tied"].all()
    assert (found.loc["a", "lo"], found.loc["a", "hi"]) == (0, np.inf)
    alone = ranking(steps[steps["framework"] == "a"], by="framework")
    assert alone.loc[0, ["framework", "ratio", "tied"]].tolist() == ["a", 1.0, True]
    with pytest.raises(InputError, match="a comparison needs two"):
        comparisons(steps[steps["framework"] == "a"], by="framework")


def test_bfloat16_is_a_setting_of_its_own() -> None:
    both = pd.concat([steps_of({"torch": SLOW}), steps_of({"torch": QUICK}, dtype="bfloat16", case_id="torch-16")])
    assert list(rankings(both)["setting"]) == ["torch bfloat16", "torch"]


def test_simultaneous_intervals_hold_together() -> None:
    """All three true ratios lie in their intervals in at least 95 % of 300 campaigns, and they are not endless."""
    truth = [1.0, 1.02, 1.10]
    held, widest = 0, 0.0
    for logs in campaigns(truth, 6, count=300):
        table = pd.DataFrame(np.exp(logs), columns=[0, 1, 2]).rename_axis("round").melt(ignore_index=False)
        found = comparisons(table.reset_index().rename(columns={"variable": "setting", "value": "time_s"}))
        true = np.array([truth[a] / truth[b] for a, b in zip(found["slower"], found["faster"], strict=True)])
        held += bool(((found["lo"] <= true) & (true <= found["hi"])).all())
        widest = max(widest, float((found["hi"] / found["lo"]).median()))
    assert held >= 0.93 * 300
    assert widest < 1.5


def test_agreement_counts_only_what_the_first_campaign_tells_apart() -> None:
    a = steps_of({"a": SLOW, "b": EVEN, "c": QUICK})
    assert vars(agreement(a, a)) == {"pairs": 3, "different": 2, "in_both": 2, "agreeing": 2}
    turned = steps_of({"a": QUICK, "b": SLOW, "c": EVEN})
    assert agreement(a, turned).agreeing == 0
    half = agreement(a, steps_of({"a": SLOW, "c": EVEN}))
    assert (half.different, half.in_both, half.agreeing, half.share) == (2, 1, 1, 1.0)
    assert np.isnan(agreement(a, steps_of({"z": QUICK})).share)
    assert np.isnan(agreement(steps_of({"z": QUICK}), a).share)


# ------------------------------------------------------------------------------------ percentiles and tables


def test_percentiles_of_one_to_a_thousand() -> None:
    steps = pd.DataFrame({"process": np.repeat(range(10), 100), "time_s": np.arange(1, 1001) / 1000})
    shuffled = steps.assign(time_s=np.random.default_rng(1).permutation(steps["time_s"]))
    found = percentiles(shuffled).set_index("percent")
    assert found["time_s"].tolist() == [0.5, 0.95, 0.99]
    assert found["above"].tolist() == [500, 50, 10]
    assert (found["samples"] == 1000).all()
    assert ((found["lo_s"] < found["time_s"]) & (found["time_s"] < found["hi_s"])).all()


def test_percentiles_of_few_samples_have_no_upper_bound() -> None:
    few = pd.DataFrame({"process": np.repeat(range(3), 5), "time_s": np.arange(1, 16) / 1000})
    assert percentiles(few)["hi_s"].tolist()[1:] == [np.inf, np.inf]
    assert percentiles(few.assign(process=0))[["lo_s", "hi_s"]].isna().all(axis=None)


@pytest.mark.parametrize(("correlation", "between"), [(0.0, 0.0), (0.5, 0.01), (0.9, 0.03)])
def test_percentile_intervals_cover(correlation: float, between: float) -> None:
    """250 campaigns of 10 processes with 40 steps: good for the median, only approximate for p95 and p99.

    That is what `percentiles` says of itself; p95 and p99 of strongly correlated steps cover about 85 %.
    """
    rng = np.random.default_rng([7, round(10 * correlation)])
    truths = {percent: true_log_quantile(between, percent / 100) for percent in (50, 95, 99)}
    logs = step_series(rng, 250, 10, 40, correlation) + between * rng.normal(size=(250, 10, 1))
    hits = dict.fromkeys(truths, 0)
    for one in logs:
        steps = pd.DataFrame({"process": np.repeat(range(10), 40), "time_s": np.exp(one).ravel()})
        for row in percentiles(steps).itertuples():
            hits[row.percent] += row.lo_s <= np.exp(truths[row.percent]) <= row.hi_s
    assert hits[50] >= 0.93 * len(logs)
    assert min(hits.values()) >= 0.82 * len(logs)


def test_case_table_is_the_estimate_with_its_counts() -> None:
    joined = steps_of({"a": SLOW, "b": QUICK[:1]})
    joined.loc[0, "is_disturbed"] = True
    found = case_table(joined).set_index("case_id")
    assert list(found.columns[: len(CASE)]) == list(CASE)
    expected = estimate(usable(joined).query("case_id == 'a'"))
    assert found.loc["a", ["median_s", "lo_s", "hi_s"]].tolist() == [expected.median_s, expected.lo_s, expected.hi_s]
    assert found.loc["a", ["processes", "samples", "timed_steps"]].tolist() == [3, 8, 9]
    assert found.loc["a", "disturbed_share"] == pytest.approx(1 / 9)
    assert found.loc["b", "median_s"] == pytest.approx(0.01)
    assert np.isnan(found.loc["b", "lo_s"])


def test_counted_is_the_rule_of_usable() -> None:
    samples = pd.concat([table("a", "a-r0", [True, False]), table("b", "b-r0", [True]), table("b", "b-r1", [False])])
    timed = samples[~samples["is_warmup"]].reset_index(drop=True)
    assert counted(timed).tolist() == [True, True, True, True], "one calm process is too few"
    more = pd.concat([timed, timed[timed["case_id"] == "b"].assign(run_id="b-r2", is_disturbed=False)])
    assert counted(more).tolist() == [True, True, False, True, True, True]
