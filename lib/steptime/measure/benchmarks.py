"""Does the measuring itself hold up? What the harness adds to a step, and how often it sees what is not there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize, stats

from steptime import frameworks, networks
from steptime.core.campaign import write_campaign
from steptime.core.errors import InputError
from steptime.core.statistics import compare, usable
from steptime.measure.fingerprint import fingerprints, short_hash
from steptime.measure.lock import measuring_lock
from steptime.measure.plan import Plan
from steptime.measure.run import Run, Visit, build, campaign_of, measure_runs

LEVEL = 0.01
PLANTED = 1.03
HARNESS_GOAL = (0.98, 1.02)
FALSE_ALARM_GOAL = 0.05
DETECTION_GOAL = 0.90
_PLAN = Plan(frameworks=("torch",), networks=("lenet",), layer_samples=0, phase_samples=0)


def harness_cost(pairs: int = 400, steps: int = 4, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Mean step time through the harness over that of a bare loop, in one child, in alternation.

    Each pair runs `steps` steps of LeNet in torch timed one by one with their covariates, and as many in a plain loop
    with one clock around it; which comes first alternates. Short pairs, and the median of their ratios with the
    distribution-free 95 % interval (sign test): a neighbour that hits single blocks then decides nothing. Returns
    both, and whether the interval lies within HARNESS_GOAL.
    """
    if pairs < 30:
        raise InputError(f"pairs = {pairs}: too few for a verdict; ask for at least 30")
    case = _PLAN.cases()[0]
    ratios = []
    with measuring_lock(), frameworks.Child(case.framework, device=case.device, threads=case.threads) as child:
        build(child, case, _PLAN, networks.build(case.network, size=case.size))
        child.request("steps", count=steps)
        child.request("bare", count=steps)
        for pair in range(pairs):
            times_s = {}
            for kind in ("steps", "bare") if pair % 2 else ("bare", "steps"):
                answer = child.request(kind, count=steps)
                samples = answer.get("samples")
                times_s[kind] = (
                    np.mean([sample["time_s"] for sample in samples]) if samples else answer["total_s"] / steps
                )
            ratios.append(times_s["steps"] / times_s["bare"])
    rank = int(stats.binom.ppf(0.025, pairs, 0.5))
    ratio, lo, hi = float(np.median(ratios)), *(float(np.sort(ratios)[place]) for place in (rank - 1, pairs - rank))
    met = HARNESS_GOAL[0] <= lo and hi <= HARNESS_GOAL[1]
    report(
        f"step time through the harness / bare loop: {ratio:.4f}, 95 % interval {lo:.4f} to {hi:.4f}, {pairs} pairs "
        f"(goal: within {HARNESS_GOAL[0]} to {HARNESS_GOAL[1]}: {_met(met)})"
    )
    return {"ratio": ratio, "lo": lo, "hi": hi, "pairs": pairs, "met": met}


def a_a(
    children: int = 120, pairs: int = 400, out: Path | None = None, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """How often `compare` at 1 % tells apart two sides that are the same, and how often it finds a planted 3 %.

    Records `children` fresh children of one case (LeNet in torch), one after the other, then draws pairs of sides:
    each side has as many children as a campaign has rounds by default, none shared, and the two children of a round
    followed one another; which of them stands on which side is drawn. `out`: where to keep the recorded campaign.
    """
    rounds = _PLAN.rounds
    if children < 4 * rounds:
        raise InputError(
            f"children = {children}: at least {4 * rounds} are needed to draw different pairs; ask for more"
        )
    with measuring_lock():
        campaign = campaign_of(_recorded(children, report), "a-a")
    if out is not None:
        write_campaign(campaign, out)
    medians = usable(campaign.joined()).groupby("round")["time_s"].median()
    return judge_a_a(medians.reindex(range(children)).to_numpy(), pairs, rounds, report)


def judge_a_a(medians_s: np.ndarray, pairs: int, rounds: int, report: Callable[[str], None] = print) -> dict[str, Any]:
    """The drawing and comparing of `a_a`: one median step time a child, in the order recorded (NaN: unusable)."""
    couples = medians_s[: len(medians_s) // 2 * 2].reshape(-1, 2)
    couples = couples[np.isfinite(couples).all(axis=1)]
    rng = np.random.default_rng(_PLAN.seed)
    alarms = found = 0
    for _ in range(pairs):
        drawn = rng.permuted(couples[rng.choice(len(couples), rounds, replace=False)], axis=1)
        a, b = (pd.DataFrame({"round": range(rounds), "time_s": side}) for side in drawn.T)
        alarms += compare(a, b, LEVEL).different
        found += compare(a.assign(time_s=a["time_s"] * PLANTED), b, LEVEL).different
    spread = float(np.std(np.log(couples[:, 0] / couples[:, 1]), ddof=1) / np.sqrt(2))
    result = {
        "pairs": pairs,
        "called_different": alarms,
        "found_planted": found,
        "between_process_sd": spread,
        "couples": len(couples),
        "met": alarms <= FALSE_ALARM_GOAL * pairs and found >= DETECTION_GOAL * pairs,
    }
    report(
        f"same against same: {alarms} of {pairs} pairs called different at {LEVEL:.0%} "
        f"(goal: at most {FALSE_ALARM_GOAL * pairs:.0f}: {_met(alarms <= FALSE_ALARM_GOAL * pairs)})"
    )
    report(
        f"planted {PLANTED - 1:.0%}: found in {found} of {pairs} pairs "
        f"(goal: at least {DETECTION_GOAL * pairs:.0f}: {_met(found >= DETECTION_GOAL * pairs)})"
    )
    report(
        f"between-process standard deviation: {spread:.2%} of the step time, {rounds} children a side; "
        f"to find {PLANTED - 1:.0%} in {DETECTION_GOAL:.0%} of pairs it may be {spread_allowed(rounds):.2%} at most"
    )
    return result


def _recorded(children: int, report: Callable[[str], None]) -> list[Run]:
    """`children` fresh children of the case, their number as the round."""
    case, found = _PLAN.cases()[0], fingerprints()
    fingerprint = short_hash([found["machine"], found[case.framework]])
    visits = [Visit(case, number, 0, fingerprint) for number in range(children)]
    runs = []
    for visit, run in measure_runs(visits, _PLAN, {case.network: networks.build(case.network, size=case.size)}):
        if not run.is_finished:
            raise InputError(f"{case.case_id}: child {visit.round + 1} failed: {run.row['reason']}; mend that first")
        runs.append(run)
        if len(runs) % 10 == 0:
            report(f"{len(runs)} of {children} children recorded")
    return runs


def spread_allowed(rounds: int) -> float:
    """The largest between-process standard deviation at which `compare` finds PLANTED as often as DETECTION_GOAL asks.

    The power of Student's t test on `rounds` differences, each with twice the variance of one process.
    """
    critical = stats.t.ppf(1 - LEVEL / 2, rounds - 1)
    noncentrality = optimize.brentq(lambda nc: stats.nct.sf(critical, rounds - 1, nc) - DETECTION_GOAL, 0, 100)
    return float(np.log(PLANTED) * np.sqrt(rounds / 2) / noncentrality)


def _met(met: bool) -> str:
    return "met" if met else "not met"
