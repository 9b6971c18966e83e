"""Two campaigns: which cases changed, by how much, and what of it the machine alone may have done.

Two campaigns are measured at two times, and a machine drifts between them: all cases together are then a little slower
or faster, whatever the code did. So what all cases share is told apart from what a case has of its own:

* a case's own change is that beyond the median of the other cases, taken round by round, so that drift is in neither
  side; its uncertainty is the spread over rounds (Welch's t, unpaired, since the rounds of two campaigns are not the
  same rounds);
* what all cases share is reported, and decides only where the campaigns were measured alternately (a round of A, a
  round of B, and so on): then rounds are pairs and drift is in both.

Nothing of one campaign is pooled with anything of the other: the unit of replication is the process, within its own
campaign. Runs of one case that come from two machines or two versions are refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from steptime.core.campaign import CASE, Campaign
from steptime.core.errors import NOT_COMPARABLE, SLOWER, InputError
from steptime.core.statistics import FAMILY_LEVEL, holm, moderated, usable

MACHINE = ("cpu_model", "cores_allowed", "memory_gib", "gpu_model")
"""What makes a machine, as in its fingerprint."""
SOFTWARE = ("framework_version", "python_version", "blas", "variables", "gpu_driver", "code_hash")
"""What must be one and the same in all runs of a case; between two campaigns it is what is compared."""
TOLD = (*SOFTWARE, "platform", "git_revision")
FEWEST_OTHERS = 4
"""Other cases that say what all share. Of fewer, the median is one or two cases' own change."""
FEWEST_PAIRS = 3
COMPARE_LEVEL = FAMILY_LEVEL / 2
"""The chance of any false change. Half of what rankings allow: a check that runs daily is to be believed."""
SOUGHT = 1.03
POWER = 0.9
MOST_ROUNDS = 100_000
MOST_NAMED = 3
_REVISION = re.compile(r"[0-9a-f]{40}")


class NotComparable(Exception):
    """The campaigns cannot be compared, and why: one line. No bad input; the command exits with NOT_COMPARABLE."""


@dataclass(frozen=True)
class Change:
    """Ratios B / A, one a case: its interval (all of them hold together), and Holm's p-value. `spread`: the standard
    deviation of one process, on the log scale, of the two campaigns together."""

    ratio: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    p_value: np.ndarray
    spread: np.ndarray


@dataclass(frozen=True)
class Compared:
    """Two campaigns compared.

    `table`: a row a case of both (see `compare_campaigns`). `shared`: (ratio, lo, hi, p) of what all cases share, or
    None where too few cases say it; p is NaN where it decides nothing. `other_machine`, `differences`: what is not the
    same, a line each. `lost`: cases of A that no longer run in B, with the reason. `only_a`, `only_b`: cases of one.
    """

    a: str
    b: str
    table: pd.DataFrame
    shared: tuple[float, float, float, float] | None
    other_machine: tuple[str, ...]
    differences: tuple[str, ...]
    alternating: bool
    level: float
    lost: tuple[tuple[str, str], ...] = ()
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()

    @property
    def is_decided(self) -> bool:
        """Is there a verdict on the code? Not between machines, and not of few cases measured one after the other."""
        return not self.other_machine and (self.shared is not None or self.alternating)

    @property
    def all_slower(self) -> bool:
        return self.shared is not None and self.shared[3] < self.level and self.shared[0] > 1

    @property
    def status(self) -> int:
        """What the command returns: 0, SLOWER or NOT_COMPARABLE."""
        if not self.is_decided:
            return NOT_COMPARABLE
        is_slower = (self.table["verdict"] == "slower").any() or self.all_slower or self.lost
        return SLOWER if is_slower else 0


def compare_campaigns(a: Campaign, b: Campaign, level: float = COMPARE_LEVEL) -> Compared:
    """Which cases changed from campaign `a` to campaign `b`.

    `level`: the chance that anything is called changed when nothing did. `table` has a row a case that both have with
    two processes or more, the largest change first: case_id, the CASE columns, rounds_a, rounds_b, a_s, b_s (medians,
    seconds), measured (b_s / a_s), ratio (its own change, beyond what all cases share; the same as measured where that
    is not taken off), lo, hi, p_value (Holm's), spread, verdict (slower, faster, or an empty text).

    Raises NotComparable where runs of one case are not of one machine and one version, and InputError without a case
    in both.
    """
    for campaign in (a, b):
        _check_poolable(campaign)
    cases_a, cases_b = _log_medians(a), _log_medians(b)
    names = sorted(set(cases_a.columns) & set(cases_b.columns))
    if not names:
        raise InputError(
            f"compare: {a.name} and {b.name} have no case in common with two processes in each; measure the same cases "
            "(steptime measure --plan A/plan.json)"
        )
    runs_a, runs_b = (_first_runs(campaign).loc[names] for campaign in (a, b))
    other_machine = _told(runs_a, runs_b, MACHINE)
    alternating = _alternating(a, b)
    logs_a, logs_b = cases_a[names], cases_b[names]
    if alternating:
        logs_a, logs_b = logs_a.align(logs_b, join="inner")
        paired = logs_a.columns[(logs_a.notna() & logs_b.notna()).sum() >= 2]
        names = list(paired)
        logs_a, logs_b, runs_a, runs_b = logs_a[names], logs_b[names], runs_a.loc[names], runs_b.loc[names]
    # Where a version changed, that change is what is asked about, and no yardstick.
    same = (runs_a["framework_version"] == runs_b["framework_version"]).to_numpy(bool)
    reference = same if same.sum() > FEWEST_OTHERS else np.ones(len(names), dtype=bool)
    is_shared = reference.sum() > FEWEST_OTHERS and not other_machine
    found, shared = changes(
        logs_a.to_numpy(), logs_b.to_numpy(), reference if is_shared else None, alternating=alternating, level=level
    )
    centres = [np.exp(logs.mean()).to_numpy() for logs in (logs_a, logs_b)]
    table = runs_a[list(CASE)].assign(
        rounds_a=logs_a.notna().sum(),
        rounds_b=logs_b.notna().sum(),
        a_s=centres[0],
        b_s=centres[1],
        measured=centres[1] / centres[0],
        **vars(found),
    )
    changed = table["p_value"] < level
    table["verdict"] = np.where(~changed, "", np.where(table["ratio"] > 1, "slower", "faster"))
    order = np.abs(np.log(table["ratio"])).sort_values(ascending=False, kind="stable").index
    table = table.loc[order].sort_values("verdict", key=lambda words: words == "", kind="stable")
    lost = _lost(a, b)
    gone = {name for name, _ in lost}
    return Compared(
        a.name,
        b.name,
        table.reset_index(),
        shared,
        tuple(other_machine),
        tuple(_told(runs_a, runs_b, TOLD)),
        alternating,
        level,
        lost,
        tuple(sorted(set(cases_a.columns) - set(names) - gone)),
        tuple(sorted(set(cases_b.columns) - set(names))),
    )


def changes(
    a: np.ndarray, b: np.ndarray, reference: np.ndarray | None, *, alternating: bool, level: float = COMPARE_LEVEL
) -> tuple[Change, tuple[float, float, float, float] | None]:
    """Each case's own change, and what all share: (ratio, lo, hi, p).

    `a`, `b`: log medians (rounds, cases), NaN where a case lacks a round. `reference`: mask of the cases whose median
    says what all share, more than FEWEST_OTHERS of them, or None: then nothing is taken off. `alternating`: the rounds
    of `a` and `b` are pairs; else they are independent, and the shared change has no p-value (NaN), since the spread
    within two campaigns says nothing about drift between them. The family is the cases, and the shared change where it
    is tested. Variances lean on each other (`statistics.moderated`).
    """
    if alternating:
        sides = [b - a]
    else:
        middle = (np.nanmean(a, axis=0) + np.nanmean(b, axis=0)) / 2
        sides = [b - middle, a - middle]
    shares = []
    if reference is not None:
        known = [np.where(reference, side, np.nan) for side in sides]
        shares = [np.nanmedian(side, axis=1) for side in known]
        sides = [side - median_of_others(own) for side, own in zip(sides, known, strict=True)]
    tested = bool(shares) and alternating
    family = a.shape[1] + tested
    centre, squared_error, freedom = _difference(sides)
    count = sum(1 / np.maximum(np.isfinite(side).sum(axis=0), 1) for side in sides)
    # A pair's difference has twice the variance of a process.
    spread = np.sqrt(squared_error / count / (2 if alternating else 1))
    squared_error, freedom = moderated(squared_error, freedom)
    p_values = _two_sided(centre, np.sqrt(squared_error), freedom)
    quantile = stats.t.ppf(1 - level / family / 2, np.maximum(freedom, 1))
    half = np.where(freedom > 0, quantile * np.sqrt(squared_error), np.inf)
    shared = None
    if shares:
        shift, error, free = (value[0] for value in _difference([share[:, None] for share in shares]))
        shift_half = float(stats.t.ppf(1 - level / family / 2, max(free, 1)) * np.sqrt(error))
        if tested:
            p_values = np.append(p_values, _two_sided(shift, np.sqrt(error), free))
        ends = np.exp([shift, shift - shift_half, shift + shift_half])
        adjusted = holm(p_values)
        shared = (float(ends[0]), float(ends[1]), float(ends[2]), float(adjusted[-1]) if tested else float("nan"))
    adjusted = holm(p_values)[: a.shape[1]]
    return Change(np.exp(centre), np.exp(centre - half), np.exp(centre + half), adjusted, spread), shared


def median_of_others(values: np.ndarray) -> np.ndarray:
    """(rounds, cases) -> the same shape: the median of the round's other known values; NaN where there is none."""
    order = np.argsort(values, axis=1)
    ranks = np.argsort(order, axis=1)
    ordered = np.take_along_axis(values, order, axis=1)
    known = np.isfinite(values)
    others = known.sum(axis=1, keepdims=True) - known
    # An unknown value stands behind all known ones: leaving it out moves nothing.
    place = np.where(known, ranks, values.shape[1])

    def nth(number: np.ndarray) -> np.ndarray:
        return np.take_along_axis(ordered, np.clip(number + (number >= place), 0, values.shape[1] - 1), axis=1)

    return np.where(others > 0, (nth((others - 1) // 2) + nth(others // 2)) / 2, np.nan)


def rounds_needed(
    spread: float, family: int, ratio: float = SOUGHT, level: float = COMPARE_LEVEL, power: float = POWER
) -> int:
    """Rounds of each campaign at which a change by `ratio` of one case is found in `power` of comparisons.

    `spread`: standard deviation of one process on the log scale; `family`: how many cases are asked about at once. The
    power of Student's t on two sides of that many processes, at the level that is left to one of the family.
    """
    if not spread > 0:
        return 2
    low, high = 1, 2
    while _power(high, spread, family, ratio, level) < power:
        low, high = high, 2 * high
        if high > MOST_ROUNDS:
            return MOST_ROUNDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _power(middle, spread, family, ratio, level) >= power else (middle, high)
    return high


def summary_lines(compared: Compared) -> list[str]:
    """What is said above the table and below it, a line each."""
    lines = [f"A: {compared.a}, B: {compared.b}; ratios are B / A, measured; above 1: B takes longer"]
    if compared.other_machine:
        lines.append(
            f"different machines ({'; '.join(compared.other_machine)}): nothing is pooled, and a ratio is of machine "
            "and software together; no verdict on the software"
        )
    lines += [f"differs: {line}" for line in compared.differences]
    lines.append(_shared_line(compared))
    verdicts = compared.table["verdict"]
    lines.append(
        f"{len(verdicts)} cases in both: {(verdicts == 'slower').sum()} slower, {(verdicts == 'faster').sum()} faster, "
        f"{(verdicts == '').sum()} not told apart (Holm over all of them, {compared.level:.1%} for any false one)"
    )
    lines.append(_power_line(compared))
    lines += [f"{name}: runs in A, not in B: {reason}" for name, reason in compared.lost]
    for side, names in (("A", compared.only_a), ("B", compared.only_b)):
        if names:
            more = ", …" if len(names) > MOST_NAMED else ""
            lines.append(f"only in {side}: {len(names)} cases: {', '.join(names[:MOST_NAMED])}{more}")
    return lines


def _shared_line(compared: Compared) -> str:
    if compared.shared is None:
        if compared.other_machine:
            return "what all cases share is not taken off: it is the machines' difference"
        if compared.alternating:
            return "measured alternately: drift of the machine is in both campaigns; ratios are as measured"
        return (
            f"too few cases ({len(compared.table)}, more than {FEWEST_OTHERS} are needed) to tell a change from drift "
            "of the machine between the two campaigns: no verdict; measure more cases, or the campaigns alternately, "
            "round by round (steptime measure --rounds 2 in each, then --rounds 3 in each, and so on)"
        )
    ratio, lo, hi, p_value = compared.shared
    words = f"all cases together: {ratio:.4f} ({lo:.4f} to {hi:.4f})"
    if np.isnan(p_value):
        return f"{words}: may be drift of the machine between the campaigns, and is taken off each case's ratio"
    verdict = "changed" if p_value < compared.level else "not told apart"
    return f"{words}: {verdict} (measured alternately); it is taken off each case's ratio"


def _power_line(compared: Compared) -> str:
    """What could have been seen: without it, "not told apart" says nothing."""
    table = compared.table
    half = float(np.sqrt(table["hi"] / table["lo"]).median()) - 1
    needed = rounds_needed(float(table["spread"].median()), len(table), level=compared.level)
    rounds = int(min(table["rounds_a"].median(), table["rounds_b"].median()))
    return (
        f"half of the intervals are wider than ±{half:.1%}, from {rounds} rounds; to find {SOUGHT - 1:.0%} in "
        f"{POWER:.0%} of comparisons, a case of median spread needs about {needed} rounds of each campaign"
    )


def _log_medians(campaign: Campaign) -> pd.DataFrame:
    """Log median step of each process, rounds x cases; only the cases with two processes or more."""
    steps = usable(campaign.joined())
    if steps.empty:
        raise InputError(f"campaign {campaign.name}: has no timed step; measure again")
    table = np.log(steps.groupby(["round", "case_id"])["time_s"].median()).unstack("case_id")
    return table.loc[:, table.notna().sum() >= 2]


def _finished(campaign: Campaign) -> pd.DataFrame:
    runs = campaign.runs[campaign.runs["status"] == "finished"]
    return runs.assign(memory_gib=(runs["memory_bytes"] / 2**30).round().astype(int))


def _first_runs(campaign: Campaign) -> pd.DataFrame:
    """One finished run a case, which stands for all of them: see `_check_poolable`."""
    return _finished(campaign).drop_duplicates("case_id").set_index("case_id")


def _check_poolable(campaign: Campaign) -> None:
    """Raise NotComparable unless all runs of a case are of one machine and one version of everything."""
    runs = _finished(campaign)
    for name in (*MACHINE, *SOFTWARE):
        kinds = runs.groupby("case_id")[name].nunique(dropna=False)
        mixed = kinds.index[kinds > 1]
        if len(mixed):
            values = [_text(value) for value in runs.loc[runs["case_id"] == mixed[0], name].unique()]
            raise NotComparable(
                f"campaign {campaign.name}: case {mixed[0]}: {name}: its runs have {' and '.join(values)}; they are "
                "not one sample and are not pooled; measure the campaign anew (--fresh)"
            )


def _told(a: pd.DataFrame, b: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """What differs between the runs of the same cases, a text each: `framework_version of torch: 2.12 / 2.13`."""
    lines = []
    for name in names:
        found: dict[str, list[str]] = {}
        for framework, one, other in zip(a["framework"], a[name], b[name], strict=True):
            if _text(one) != _text(other):
                frameworks = found.setdefault(f"{_text(one)} / {_text(other)}", [])
                if framework not in frameworks:
                    frameworks.append(framework)
        everything = set(a["framework"])
        for values, frameworks in found.items():
            of = "" if set(frameworks) == everything else f" of {', '.join(sorted(frameworks))}"
            lines.append(f"{name}{of}: {values}")
    return lines


def _text(value: Any) -> str:
    """A cell in few words: a Git revision as Git shortens it."""
    text = "nothing" if pd.isna(value) else str(value)
    return text[:12] if _REVISION.fullmatch(text) else text


def _lost(a: Campaign, b: Campaign) -> tuple[tuple[str, str], ...]:
    """The cases that finished in `a` and never in `b`, which tried them, with b's reason."""
    finished = [set(campaign.runs.loc[campaign.runs["status"] == "finished", "case_id"]) for campaign in (a, b)]
    tried: Mapping[str, str] = (
        b.runs[b.runs["status"] != "finished"].drop_duplicates("case_id").set_index("case_id")["reason"].to_dict()
    )
    return tuple((name, tried[name]) for name in sorted(finished[0] - finished[1]) if name in tried)


def _alternating(a: Campaign, b: Campaign) -> bool:
    """Do the rounds of the two campaigns alternate? Then no round of either begins before the one before has ended in
    both, by the times at which runs started."""
    times = []
    for campaign in (a, b):
        runs = campaign.runs.dropna(subset=["started_utc"])
        times.append(runs.groupby("round")["started_utc"].agg(["min", "max"]))
    first, last = (pd.concat([time[name] for time in times], axis=1, join="inner") for name in ("min", "max"))
    if len(first) < FEWEST_PAIRS:
        return False
    return bool((last.max(axis=1).to_numpy()[:-1] <= first.min(axis=1).to_numpy()[1:]).all())


def _difference(sides: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean of the first side less that of the second, if there is one, its squared error, and degrees of freedom.

    Each side is (rounds, cases); two are independent, with variances of their own (Welch 1947, Biometrika 34, 28).
    """
    centre: Any = 0.0
    squared: Any = 0.0
    spent: Any = 0.0
    for sign, side in zip((1, -1), sides, strict=False):
        count = np.isfinite(side).sum(axis=0)
        error = np.nanvar(side, axis=0, ddof=1) / count
        centre = centre + sign * np.nanmean(side, axis=0)
        squared, spent = squared + error, spent + error**2 / (count - 1)
    freedom = np.where(spent > 0, squared**2 / np.where(spent > 0, spent, 1), 1.0)
    return centre, squared, freedom


def _two_sided(centre: np.ndarray, error: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """Student's two-sided p; differences without any spread are certain: 0, or 1 where they are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        p_values = 2 * stats.t.sf(np.abs(centre) / error, np.maximum(freedom, 1))
    return np.where(error > 0, p_values, np.where(centre == 0, 1.0, 0.0))


def _power(rounds: int, spread: float, family: int, ratio: float, level: float) -> float:
    freedom = 2 * (rounds - 1)
    critical = stats.t.ppf(1 - level / family / 2, freedom)
    return float(stats.nct.sf(critical, freedom, np.log(ratio) / spread / np.sqrt(2 / rounds)))
