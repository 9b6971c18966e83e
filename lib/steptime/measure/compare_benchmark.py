"""How often does `steptime compare` err? Campaigns with the noise of a recorded one, compared without a change and with
a planted one. All of it is simulated; only the noise is measured."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from steptime.core.campaign import Campaign
from steptime.core.comparing import COMPARE_LEVEL, POWER, SOUGHT, changes, rounds_needed
from steptime.core.errors import InputError
from steptime.core.statistics import usable

FALSE_ALARM_GOAL = 0.05
DETECTION_GOAL = POWER
SEED = 1
DRIFT_MEMORY = 0.9
"""Correlation of the drift from round to round. Few rounds cannot tell it; slow drift is the hardest, since a whole
campaign is then slow or fast."""
TAILS = 6
"""Degrees of freedom of Student's t for a process: somewhat heavier tails than the normal's, as recorded."""
FEWEST_ROUNDS = 4
LONG = 500
"""Rounds from which a spread is told to 2 %."""
PLANNED_POWER = 0.95
"""Rounds are planned for more than the goal, since the formula is Student's and the noise is not."""


@dataclass(frozen=True)
class Noise:
    """What makes two runs of a case differ, as standard deviations on the log scale.

    `process` (cases,): a fresh process of each case; `network`: the stretch of a round in which a network's cases are
    visited; `drift`: a round. `networks` (cases,): the number of each case's network.
    """

    process: np.ndarray
    networks: np.ndarray
    network: float
    drift: float

    @property
    def cases(self) -> int:
        return len(self.process)

    @property
    def victim(self) -> int:
        """The case of median noise; of an even number, the noisier of the two."""
        return int(np.argsort(self.process, kind="stable")[self.cases // 2])


def recorded_noise(campaign: Campaign) -> Noise:
    """The noise of a campaign's cases that have every round. Raises InputError with fewer than FEWEST_ROUNDS rounds."""
    logs, network_of = _whole_cases(campaign)
    if logs.shape[1] < FEWEST_ROUNDS or logs.shape[0] < 2:
        raise InputError(
            f"campaign {campaign.name}: {logs.shape[0]} cases have all of its {logs.shape[1]} rounds; noise is told "
            f"from 2 cases with {FEWEST_ROUNDS} rounds or more: name another campaign"
        )
    left = logs.sub(logs.mean(axis=1), axis=0)
    rounds = left.median()
    left = left - rounds
    blocks = left.groupby(network_of).transform("median")
    own = left - blocks
    process = np.sqrt((own.sub(own.mean(axis=1), axis=0) ** 2).sum(axis=1) / (logs.shape[1] - 1))
    per_network = blocks.groupby(network_of).first()
    numbers = pd.factorize(network_of)[0]
    return Noise(process.to_numpy(), numbers, float(per_network.to_numpy().std()), float(rounds.std(ddof=1)))


def halves(campaign: Campaign) -> tuple[int, int]:
    """(false alarms, comparisons): the campaign's own rounds against each other, halved in every way; measured.

    The halves share rounds, so they are few independent comparisons: a check of the noise, not a rate.
    """
    logs = _whole_cases(campaign)[0].to_numpy().T
    rounds = range(len(logs))
    everything = np.ones(logs.shape[1], dtype=bool)
    alarms = count = 0
    for chosen in combinations(rounds, len(logs) // 2):
        others = [number for number in rounds if number not in chosen]
        # of two equal halves each is met twice
        if len(chosen) == len(others) and 0 not in chosen:
            continue
        found, _ = changes(logs[list(chosen)], logs[others], everything, alternating=False)
        alarms, count = alarms + bool((found.p_value < COMPARE_LEVEL).any()), count + 1
    return alarms, count


def _whole_cases(campaign: Campaign) -> tuple[pd.DataFrame, pd.Series]:
    """Log medians (cases, rounds) of the cases that have every round, and the network of each."""
    steps = usable(campaign.joined())
    logs = np.log(steps.groupby(["case_id", "round"])["time_s"].median().unstack("round")).dropna()
    networks = steps.drop_duplicates("case_id").set_index("case_id")["network"]
    return logs, networks.reindex(logs.index)


def draw(noise: Noise, rounds: int, campaigns: int, rng: np.random.Generator) -> np.ndarray:
    """(campaigns, rounds, cases): log medians of campaigns in which nothing differs but the noise."""
    own = rng.standard_t(TAILS, size=(campaigns, rounds, noise.cases)) / np.sqrt(TAILS / (TAILS - 2))
    blocks = rng.normal(size=(campaigns, rounds, noise.networks.max() + 1))[..., noise.networks]
    drift = np.empty((campaigns, rounds))
    drift[:, 0] = rng.normal(size=campaigns)
    fresh = np.sqrt(1 - DRIFT_MEMORY**2)
    for number in range(1, rounds):
        drift[:, number] = DRIFT_MEMORY * drift[:, number - 1] + fresh * rng.normal(size=campaigns)
    return own * noise.process + blocks * noise.network + drift[..., None] * noise.drift


@dataclass(frozen=True)
class Rates:
    """`alarms`: of `pairs` equal campaigns, those with any case called changed; `found`: of as many with the planted
    change in one case, those in which that case was called slower."""

    rounds: int
    pairs: int
    alarms: int
    found: int

    @property
    def met(self) -> bool:
        return self.alarms <= FALSE_ALARM_GOAL * self.pairs and self.found >= DETECTION_GOAL * self.pairs


def rates(noise: Noise, rounds: int, pairs: int, planted: float = SOUGHT, seed: int = SEED) -> Rates:
    """Both rates of `comparing.changes` for campaigns of `rounds` rounds, measured one after the other.

    The change is planted in the case of median noise.
    """
    rng = np.random.default_rng(seed)
    victim = noise.victim
    everything = np.ones(noise.cases, dtype=bool)
    alarms = found = 0
    for _ in range(pairs):
        a, b = draw(noise, rounds, 2, rng)
        equal, _ = changes(a, b, everything, alternating=False)
        alarms += bool((equal.p_value < COMPARE_LEVEL).any())
        b[:, victim] += np.log(planted)
        slower, _ = changes(a, b, everything, alternating=False)
        found += bool(slower.p_value[victim] < COMPARE_LEVEL and slower.ratio[victim] > 1)
    return Rates(rounds, pairs, alarms, found)


def rounds_for(noise: Noise, planted: float = SOUGHT, power: float = PLANNED_POWER) -> int:
    """The rounds that `comparing.rounds_needed` asks for, at the spread that a comparison sees of such campaigns."""
    a, b = draw(noise, LONG, 2, np.random.default_rng(SEED))
    seen, _ = changes(a, b, np.ones(noise.cases, dtype=bool), alternating=False)
    return rounds_needed(float(seen.spread[noise.victim]), noise.cases, planted, power=power)


def compare_rates(campaign: Campaign, pairs: int = 400, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Print both rates at the campaign's own number of rounds and at the number that the planted change needs.

    Returns them, and whether the goals are met at the second.
    """
    noise = recorded_noise(campaign)
    own = int(campaign.runs["round"].nunique())
    needed = rounds_for(noise)
    report(
        f"noise of campaign {campaign.name} (measured): {noise.cases} cases; a process {np.min(noise.process):.1%} to "
        f"{np.max(noise.process):.1%}, median {np.median(noise.process):.1%}; a network's stretch of a round "
        f"{noise.network:.1%}; a round {noise.drift:.1%}"
    )
    own_alarms, splits = halves(campaign)
    report(f"its own rounds in two halves: a false alarm anywhere in {own_alarms} of {splits} ways to halve; measured")
    results = [_reported(noise, rounds, pairs, report) for rounds in (own, needed)]
    calm = Noise(np.sort(noise.process)[:8], np.zeros(min(8, noise.cases), dtype=int), noise.network, noise.drift)
    for_calm = rounds_for(calm)
    report(
        f"{own} rounds {'suffice' if results[0].met else 'do not suffice'} for {SOUGHT - 1:.0%} in one of "
        f"{noise.cases} cases of this noise; {needed} rounds should, or {for_calm} of its {calm.cases} calmest alone"
    )
    results.append(_reported(calm, for_calm, pairs, report))
    return {
        "halves": (own_alarms, splits),
        "own": results[0],
        "needed": results[1],
        "calm": results[2],
        "met": results[1].met and results[2].met,
    }


def _reported(noise: Noise, rounds: int, pairs: int, report: Callable[[str], None]) -> Rates:
    found = rates(noise, rounds, pairs)
    report(
        f"{noise.cases} cases, {rounds} rounds: a false alarm anywhere in {found.alarms} of {pairs} equal pairs (goal: "
        f"at most {FALSE_ALARM_GOAL * pairs:.0f}); planted {SOUGHT - 1:.0%} in one case found in {found.found} of "
        f"{pairs} (goal: at least {DETECTION_GOAL * pairs:.0f}); simulated"
    )
    return found
