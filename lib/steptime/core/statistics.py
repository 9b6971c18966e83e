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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import special, stats

from steptime.core.campaign import CASE
from steptime.core.errors import InputError

LEVEL = 0.95
UNSEEN_ROUNDS = 2
"""The latest rounds that the stop rule never looks at; see `settled`."""
FEWEST_LOOKED_AT = 3
FEWEST_CALM = 2
FEWEST_VARIANCES = 6
"""Those of the pairs of four settings."""
FAMILY_LEVEL = 0.05
"""The chance that a ranking calls any two equal settings different."""
CONDITIONS = ("network", "size", "batch", "device", "threads", "workers", "input")
"""Settings are ranked among those that share these."""
PERCENTS = (50, 95, 99)


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

    `samples` is a campaign's `joined()` table or a part of it; `counted` says which of its timed repetitions count.
    """
    timed = samples[(samples["phase"] == phase) & samples["layer"].isna() & ~samples["is_warmup"]]
    rows = timed[counted(timed)]
    return rows.assign(process=rows["run_id"])


def counted(timed: pd.DataFrame) -> pd.Series:
    """Which timed repetitions count: the undisturbed ones, unless they come from fewer than two processes of a case.

    `timed`: columns `case_id`, `run_id`, `is_disturbed`; the answer is a mask on its rows. A case that the disturbances
    leave with fewer than two processes keeps all: then the disturbance was its normal condition, and a wide interval
    that says so is worth more than no figure.
    """
    disturbed = timed["is_disturbed"].astype(bool)
    calm_processes = timed[~disturbed].groupby("case_id")["run_id"].nunique()
    calm_enough = timed["case_id"].isin(calm_processes.index[calm_processes >= FEWEST_CALM])
    return ~disturbed | ~calm_enough


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
    p_value = float(_p_values(differences[:, None])[0])
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
    target and spread are alike. With two further rounds, which the decision has not seen, it covers 93 to 97 % whatever
    the spread, the autocorrelation and the budget (tests/unit/test_statistics.py). The final interval rests on all
    rounds, and can be a little wider than the target.
    """
    seen = log_medians[..., : max(log_medians.shape[-1] - UNSEEN_ROUNDS, 0)]
    if seen.shape[-1] < FEWEST_LOOKED_AT:
        return np.zeros(log_medians.shape[:-1], dtype=bool)
    return half_width(seen) <= target


def over_budget(spent_s: np.ndarray | float, done: int, budget_s: float) -> np.ndarray:
    """Would one round more, as long as the mean of the `done` ones (>= 1), end after `budget_s`?"""
    return np.asarray(spent_s) * (done + 1) / done > budget_s


def case_table(joined: pd.DataFrame) -> pd.DataFrame:
    """One row a case: `case_id`, the CASE columns, its Estimate, how many steps were timed, the share disturbed.

    `joined`: a campaign's `joined()` table. A case with one process has its median and no interval (NaN); one without
    timed steps has no row. `samples` counts the steps that the estimate rests on, `timed_steps` all but the warm-ups.
    """
    timed = joined[(joined["phase"] == "step") & joined["layer"].isna() & ~joined["is_warmup"]]
    every = timed.groupby("case_id")["is_disturbed"].agg(["size", "mean"])
    rows = []
    for case_id, part in usable(joined).groupby("case_id", sort=True):
        one = Estimate(float(part["time_s"].median()), np.nan, np.nan, 1, len(part))
        found = estimate(part) if part["process"].nunique() > 1 else one
        size, share = every.loc[case_id]
        rows.append(
            {"case_id": case_id, **part.iloc[0][list(CASE)], **vars(found)}
            | {"timed_steps": int(size), "disturbed_share": share}
        )
    names = ["case_id", *CASE, *Estimate.__annotations__, "timed_steps", "disturbed_share"]
    return pd.DataFrame(rows, columns=names)


def setting_names(table: pd.DataFrame) -> pd.Series:
    """What is ranked, as text: the framework, and the dtype where it is not float32."""
    return table["framework"].where(table["dtype"] == "float32", table["framework"] + " " + table["dtype"])


def comparisons(samples: pd.DataFrame, by: str = "setting", level: float = FAMILY_LEVEL) -> pd.DataFrame:
    """Every pair of settings of one network under one set of conditions: `slower`, `faster`, their ratio, and whether
    they can be told apart when all pairs are asked about at once.

    `samples`: columns `by`, `round`, `time_s`, from `usable`. Each pair is compared on the rounds that both have, by a
    paired t whose variance leans on those of all pairs (`moderated`). `different` is Holm's step-down decision on the
    p-values of all pairs (Holm 1979, Scand. J. Statist. 6, 65): the chance of calling any two equal settings different
    is at most `level`, however many are equal; `p_value` is adjusted accordingly. `lo`, `hi` are Bonferroni's
    simultaneous intervals: all of them hold at 1 - `level`. Holm's decision is the sharper of the two, so a pair can be
    different whose interval just reaches 1. A pair with fewer than two common rounds is not told apart (0, inf, p = 1).
    Raises InputError with fewer than two settings.
    """
    names, log_medians = _by_round(samples, by)
    if len(names) < 2:
        raise InputError(f"samples: {by} = {', '.join(map(str, names))}: a comparison needs two; measure another")
    pairs = list(combinations(range(len(names)), 2))
    differences = _pair_differences(log_medians)
    # The medians over all their rounds say which is slower where no round is common.
    apart = np.nanmean(log_medians, axis=0)
    adjusted = pair_p_values(log_medians)
    _, errors, freedom = _paired(differences)
    halves = np.where(freedom > 0, stats.t.ppf(1 - level / len(pairs) / 2, np.maximum(freedom, 1)) * errors, np.inf)
    rows = []
    for (a, b), column, half, p_value in zip(pairs, differences.T, halves, adjusted, strict=True):
        common = column[np.isfinite(column)]
        centre = float(common.mean()) if len(common) else float(apart[a] - apart[b])
        slower, faster = (a, b) if centre >= 0 else (b, a)
        ratio, lo, hi = np.exp([abs(centre), abs(centre) - half, abs(centre) + half])
        rows.append(
            {"slower": names[slower], "faster": names[faster], "ratio": ratio, "lo": lo, "hi": hi}
            | {"rounds": len(common), "p_value": p_value, "different": bool(p_value < level)}
        )
    return pd.DataFrame(rows)


def ranking(samples: pd.DataFrame, by: str = "setting", level: float = FAMILY_LEVEL) -> pd.DataFrame:
    """Which setting is fastest: one row a setting, the fastest first, with all that tie with it.

    Columns: `by`, `ratio` to the fastest (paired by round), `lo` and `hi` (simultaneous over all pairs of settings),
    `p_value` (Holm), `tied`: cannot be told from the fastest. The fastest itself has the ratio 1, is `tied`, and is the
    one that no other beats on their common rounds (or that is beaten by least). See `comparisons` for what is promised.
    """
    names, _ = _by_round(samples, by)
    if len(names) == 1:
        return pd.DataFrame({by: names, "ratio": 1.0, "lo": 1.0, "hi": 1.0, "p_value": 1.0, "tied": True})
    pairs = comparisons(samples, by, level)
    worst = pairs.groupby("slower")["ratio"].max()
    fastest = min(names, key=lambda name: worst.get(name, 1.0))
    rows = [{by: fastest, "ratio": 1.0, "lo": 1.0, "hi": 1.0, "p_value": 1.0, "tied": True}]
    for pair in pairs[(pairs["slower"] == fastest) | (pairs["faster"] == fastest)].itertuples():
        turned = pair.slower == fastest
        ratio, lo, hi = (1 / pair.ratio, 1 / pair.hi, 1 / pair.lo) if turned else (pair.ratio, pair.lo, pair.hi)
        rows.append(
            {by: pair.faster if turned else pair.slower, "ratio": ratio, "lo": lo, "hi": hi}
            | {"p_value": pair.p_value, "tied": not pair.different}
        )
    return pd.DataFrame(rows).sort_values("ratio", kind="stable", ignore_index=True)


def pair_p_values(log_medians: np.ndarray) -> np.ndarray:
    """(..., rounds, settings) -> (..., pairs): Holm's p-value of each pair of settings, in the order (0, 1), (0, 2) …

    NaN where a setting lacks a round.
    """
    return holm(_p_values(_pair_differences(log_medians)))


def holm(p_values: np.ndarray) -> np.ndarray:
    """Holm's adjusted p-values over the last axis: each is to be compared with the level of the whole family."""
    order = np.argsort(p_values, axis=-1)
    count = p_values.shape[-1]
    stepped = np.take_along_axis(p_values, order, axis=-1) * np.arange(count, 0, -1)
    adjusted = np.empty_like(stepped)
    np.put_along_axis(adjusted, order, np.minimum(np.maximum.accumulate(stepped, axis=-1), 1.0), axis=-1)
    return adjusted


@dataclass(frozen=True)
class Agreement:
    """Of the pairs of settings that campaign A calls different, on how many campaign B has the same one ahead.

    `pairs`: all that A compares; `different`: those it calls different; `in_both`: those of them that B has, too;
    `agreeing`: those of them with the same order of B's points. `share` = agreeing / in_both (NaN without any).
    """

    pairs: int
    different: int
    in_both: int
    agreeing: int

    @property
    def share(self) -> float:
        return self.agreeing / self.in_both if self.in_both else float("nan")


def agreement(a: pd.DataFrame, b: pd.DataFrame, level: float = FAMILY_LEVEL) -> Agreement:
    """Does a second campaign of the same machine put the settings in the order of the first?

    `a`, `b`: two campaigns' `joined()` tables. Settings are compared where they share the CONDITIONS; a family is what
    shares them. B's order is that of its points, whatever their intervals.
    """
    first, second = all_comparisons(a, level), all_comparisons(b, level)
    different = first[first["different"].astype(bool)]
    ahead = set(second[[*CONDITIONS, "slower", "faster"]].itertuples(index=False, name=None))
    agreeing = in_both = 0
    for row in different[[*CONDITIONS, "slower", "faster"]].itertuples(index=False, name=None):
        turned = (*row[:-2], row[-1], row[-2])
        in_both += row in ahead or turned in ahead
        agreeing += row in ahead
    return Agreement(len(first), len(different), in_both, agreeing)


def all_comparisons(joined: pd.DataFrame, level: float = FAMILY_LEVEL) -> pd.DataFrame:
    """`comparisons` of every set of conditions of a campaign's `joined()` table: CONDITIONS, then its columns."""
    return _per_condition(joined, comparisons, level, fewest=2)


def rankings(joined: pd.DataFrame, level: float = FAMILY_LEVEL) -> pd.DataFrame:
    """`ranking` of every set of conditions of a campaign's `joined()` table: CONDITIONS, then its columns."""
    return _per_condition(joined, ranking, level, fewest=1)


def percentiles(samples: pd.DataFrame, percents: Sequence[float] = PERCENTS) -> pd.DataFrame:
    """Percentiles of the single step, pooled over processes, with 95 % intervals and what they rest on.

    `samples`: columns `process`, `time_s`, from `usable`; one case. One row a percentile: `percent`, `time_s`, `lo_s`,
    `hi_s`, `processes`, `samples`, `above`: how many samples lie above it, which is what a high percentile rests on.

    Woodruff's interval (1952, J. Am. Statist. Assoc. 47, 635) with processes as clusters: the share of steps at or
    below the percentile has an interval from its spread over processes (Student, on the logit scale), and the
    percentiles at its two ends are the interval. That honours the samples' dependence within a process, which order
    statistics of the pool would not. `hi_s` is inf where that share reaches beyond all samples: the data then give no
    upper bound. With one process `lo_s` and `hi_s` are NaN. Ten processes of 40 steps cover the median in 93 to 98 %,
    but p95 and p99 of strongly correlated steps in about 85 % only (tests/unit/test_statistics.py): the doubt about
    them is at least this wide.
    """
    times = samples["time_s"].to_numpy()
    pooled = np.sort(times)
    rows = []
    for percent in percents:
        share = percent / 100
        point = float(np.quantile(pooled, share, method="inverted_cdf"))
        lo, hi = _woodruff(samples, pooled, point, share)
        rows.append({"percent": percent, "time_s": point, "lo_s": lo, "hi_s": hi})
    table = pd.DataFrame(rows).assign(processes=samples["process"].nunique(), samples=len(times))
    return table.assign(above=[int((times > point).sum()) for point in table["time_s"]])


def _woodruff(samples: pd.DataFrame, pooled: np.ndarray, point: float, share: float) -> tuple[float, float]:
    below = (samples["time_s"] <= point).groupby(samples["process"]).agg(["sum", "size"]).to_numpy(float)
    processes = len(below)
    if processes < 2:
        return np.nan, np.nan
    total = below[:, 1].sum()
    # Ratio estimator: processes may have different numbers of samples.
    residuals = below[:, 0] - below[:, 1] * below[:, 0].sum() / total
    between = np.sqrt(processes / (processes - 1) * (residuals**2).sum()) / total
    # No narrower than independent samples would have it: at high percentiles few processes can agree by chance.
    error = max(between, np.sqrt(share * (1 - share) / total))
    half = stats.t.ppf((1 + LEVEL) / 2, processes - 1) * error / (share * (1 - share))
    ends = 1 / (1 + np.exp(-(np.log(share / (1 - share)) + np.array([-half, half]))))
    lo = float(pooled[max(int(np.ceil(ends[0] * total)) - 1, 0)])
    place = int(np.ceil(ends[1] * total)) - 1
    return lo, float(pooled[place]) if ends[1] <= 1 - 1 / total else np.inf


def _per_condition(joined: pd.DataFrame, table: Callable[..., pd.DataFrame], level: float, fewest: int) -> pd.DataFrame:
    steps = usable(joined)
    steps = steps.assign(setting=setting_names(steps))
    found = []
    for condition, part in steps.groupby(list(CONDITIONS), sort=True):
        if part["setting"].nunique() >= fewest:
            found.append(table(part, level=level).assign(**dict(zip(CONDITIONS, condition, strict=True))))
    if not found:
        return pd.DataFrame(columns=[*CONDITIONS, "setting", "slower", "faster", "different"])
    rows = pd.concat(found, ignore_index=True)
    return rows[[*CONDITIONS, *(name for name in rows.columns if name not in CONDITIONS)]]


def _by_round(samples: pd.DataFrame, by: str) -> tuple[list[str], np.ndarray]:
    """The settings and their log medians, (rounds, settings), NaN where a setting lacks a round."""
    table = np.log(samples.groupby(["round", by], sort=True)["time_s"].median()).unstack(by)
    return list(table.columns), table.to_numpy()


def _pair_differences(log_medians: np.ndarray) -> np.ndarray:
    pairs = combinations(range(log_medians.shape[-1]), 2)
    return np.stack([log_medians[..., a] - log_medians[..., b] for a, b in pairs], axis=-1)


def _p_values(differences: np.ndarray) -> np.ndarray:
    """Two-sided p of the paired t, (..., rounds, pairs) -> (..., pairs); 1 with fewer than two common rounds.

    Differences without any spread are certain: 0, or 1 where they are all 0.
    """
    centre, error, freedom = _paired(differences)
    with np.errstate(divide="ignore", invalid="ignore"):
        p_values = 2 * stats.t.sf(np.abs(centre) / error, np.maximum(freedom, 1))
    p_values = np.where(error > 0, p_values, np.where(centre == 0, 1.0, 0.0))
    return np.where(freedom < 1, 1.0, p_values)


def _paired(differences: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(..., rounds, pairs) -> mean, standard error and degrees of freedom of each pair; 0 of them: nothing is known."""
    known = np.isfinite(differences)
    count = known.sum(axis=-2)
    filled = np.where(known, differences, 0.0)
    centre = filled.sum(axis=-2) / np.maximum(count, 1)
    squares = (np.where(known, differences - centre[..., None, :], 0.0) ** 2).sum(axis=-2)
    variance, freedom = moderated(squares / np.maximum(count - 1, 1), np.maximum(count - 1, 0))
    return centre, np.sqrt(variance / np.maximum(count, 1)), freedom


def moderated(variances: np.ndarray, freedom: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The variances of pairs of settings, leaning on each other, and their degrees of freedom, over the last axis.

    Few rounds tell little about one pair's variance, but there are many pairs. Smyth's hierarchical model (2004, Stat.
    Appl. Genet. Mol. Biol. 3, article 3, sections 4 and 6.2) takes the variances as draws of a scaled inverse
    chi-square, whose scale and degrees of freedom follow from their logarithms; each variance is then the mean of its
    own and that scale, weighted by their degrees of freedom, and has the sum of them. Where variances differ much,
    little is lent. His variances are independent; pairs share their settings, so that k settings lend at most half of
    what k - 2 independent ones could: with that the family's error stays at its level (tests/unit/test_statistics.py).
    Fewer than FEWEST_VARIANCES that are known and above 0 are left as they are.
    """
    known = (variances > 0) & (freedom > 0)
    lending = np.broadcast_to(known.sum(axis=-1, keepdims=True) >= FEWEST_VARIANCES, known.shape) & known
    if not lending.any():
        return variances, freedom
    half = np.where(known, freedom, 2) / 2
    logs = np.log(np.where(known, variances, 1.0)) - special.digamma(half) + np.log(half)
    count = np.maximum(lending.sum(axis=-1, keepdims=True), 1)
    mean = np.where(lending, logs, 0.0).sum(axis=-1, keepdims=True) / count
    spread = np.where(lending, (logs - mean) ** 2, 0.0).sum(axis=-1, keepdims=True) / np.maximum(count - 1, 1)
    excess = spread - np.where(lending, special.polygamma(1, half), 0.0).sum(axis=-1, keepdims=True) / count
    settings = (1 + np.sqrt(1 + 8 * variances.shape[-1])) / 2
    most = (settings - 2) / 2 * freedom.max(axis=-1, keepdims=True)
    # No more spread than chance gives: the variances are one, and as much is lent as may be.
    prior = np.where(excess > 0, np.minimum(2 * _trigamma_inverse(np.maximum(excess, 1e-6)), most), most)
    scale = np.exp(mean + special.digamma(prior / 2) - np.log(prior / 2))
    leaning = (prior * scale + freedom * variances) / (prior + freedom)
    return np.where(lending, leaning, variances), np.where(lending, prior + freedom, freedom)


def _trigamma_inverse(values: np.ndarray) -> np.ndarray:
    """x with trigamma(x) = `values`, by Newton's steps on 1 / trigamma, which is convex (Smyth 2004, appendix)."""
    found = 0.5 + 1 / values
    for _ in range(20):
        trigamma = special.polygamma(1, found)
        found = found + trigamma * (1 - trigamma / values) / special.polygamma(2, found)
    return found


def _log_medians(samples: pd.DataFrame, unit: str) -> pd.Series:
    return np.log(samples.groupby(unit, sort=True)["time_s"].median())
