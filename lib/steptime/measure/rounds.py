"""A campaign: every case once a round, in random order, round after round until enough is known or time is spent."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from steptime import frameworks, networks
from steptime.core import statistics
from steptime.core.campaign import Campaign, read_campaign, write_campaign
from steptime.core.files import json_text
from steptime.core.network import Network
from steptime.measure.fingerprint import fingerprints, short_hash
from steptime.measure.lock import measuring_lock
from steptime.measure.partial import Partial, case_key
from steptime.measure.plan import Case, Plan
from steptime.measure.provenance import cores_allowed
from steptime.measure.run import Run, Visit, campaign_of, measure_runs, not_run, with_stop_reason

FAILURES_ALLOWED = 2
"""A case that failed or ran out of memory so often is not visited again in this campaign."""


def measure(
    plan: Plan, out: Path, partial: Path, *, fresh: bool = False, report: Callable[[str], None] = print
) -> Campaign:
    """Measure the plan's cases and write the campaign (runs.csv, samples.csv, plan.json) into `out`, assembled at the
    end.

    Finished runs go to `partial` one by one. Started again after an interruption, or with some frameworks, some cases
    or the number of rounds changed, it keeps the runs that still hold; a complete campaign started again unchanged, or
    with `fresh`, is measured anew. Cases that cannot run here, and children that fail, are rows with their reason.
    `report` gets a line a run. Raises InputError when another process is measuring on this machine.
    """
    with measuring_lock():
        return _Campaign(plan, report).measured(out, partial, fresh=fresh)


class _Campaign:
    """The state of one call of `measure`: the runs so far, by run_id."""

    def __init__(self, plan: Plan, report: Callable[[str], None]) -> None:
        self.plan, self.report = plan, report
        found = fingerprints()
        self.fingerprints = {name: short_hash([found["machine"], found[name]]) for name in plan.frameworks}
        self.gpus: list[str] = found["machine"]["gpus"]
        self.impossible = {case: reason for case in plan.cases() if (reason := self._why_not(case))}
        self.networks: dict[str, Network] = {name: networks.build(name, size=plan.size) for name in plan.networks}
        self.runs: dict[str, Run] = {}

    def measured(self, out: Path, partial: Path, *, fresh: bool) -> Campaign:
        keys = {case.case_id: case_key(case, self.plan, self.fingerprints[case.framework]) for case in self._possible()}
        store = Partial(partial, self.plan, keys, fresh=fresh)
        kept = store.kept()
        self.report(
            f"{len(keys)} cases, 2 to {self.plan.rounds} rounds, from the third on within {self.plan.budget_s:g} s; "
            f"kept {len(kept)} finished runs"
        )
        reason = self._rounds(store, kept)
        self._write(out, reason)
        store.mark_complete()
        return read_campaign(out)

    def _rounds(self, store: Partial, kept: dict[str, Run]) -> str:
        """Visit all cases round by round; why that ended: "target", "budget" or "rounds"."""
        for number in range(self.plan.rounds):
            missing = self._missing(number, kept)
            for done, (visit, run) in enumerate(measure_runs(missing, self.plan, self.networks), 1):
                self.runs[visit.run_id] = run
                if run.is_finished:
                    store.save(run)
                self.report(f"round {number + 1}/{self.plan.rounds} run {done}/{len(missing)} {_line(visit, run)}")
            if reason := self._stop_reason(number + 1):
                return reason
        return "rounds"

    def _missing(self, number: int, kept: dict[str, Run]) -> list[Visit]:
        """The visits of round `number` that are still to be made; the kept runs count as measured."""
        missing = []
        for position, case in enumerate(self.plan.order(number)):
            visit = Visit(case, number, position, self.fingerprints[case.framework])
            if case in self.impossible or self._is_given_up(case):
                continue
            if visit.run_id in kept:
                self.runs[visit.run_id] = kept[visit.run_id]
            else:
                missing.append(visit)
        return missing

    def _stop_reason(self, done: int) -> str | None:
        """Why no further round is started after `done` rounds; looked at between rounds only.

        A round is started only if one as long as the mean of those before ends within the budget; two always run,
        because one process a case has no interval.
        """
        if done >= self.plan.min_rounds and all(self._is_settled(case, done) for case in self._possible()):
            return "target"
        spent = sum(run.row["duration_s"] for run in self.runs.values())
        if 2 <= done < self.plan.rounds and statistics.over_budget(spent, done, self.plan.budget_s):
            return "budget"
        return None

    def _is_settled(self, case: Case, done: int) -> bool:
        """Is the case known well enough? One that only failed is as well known as it will be."""
        runs = [self.runs.get(Visit(case, number, 0, "").run_id) for number in range(done)]
        medians = _log_medians([run for run in runs if run is not None and run.is_finished])
        return not len(medians) or bool(statistics.settled(medians, self.plan.target_half_width))

    def _possible(self) -> list[Case]:
        return [case for case in self.plan.cases() if case not in self.impossible]

    def _is_given_up(self, case: Case) -> bool:
        """Does another visit tell nothing new? What a framework cannot do once, it never can."""
        states = [run.row["status"] for run in self.runs.values() if run.row["case_id"] == case.case_id]
        failures = len(states) - states.count("finished")
        return "not_run" in states or failures >= FAILURES_ALLOWED

    def _why_not(self, case: Case) -> str | None:
        """Why this machine cannot run the case; None if it can."""
        if frameworks.installed_version(case.framework) is None:
            setting = frameworks.SETTINGS[case.framework]
            mend = f": steptime env create {setting.environment}" if setting.environment else ""
            return f"{setting.distribution} is not installed{mend}"
        if lacking := frameworks.missing_packages(case.framework):
            return lacking
        if case.device == "cuda":
            return None if self.gpus else "no NVIDIA GPU on this machine"
        # Loaders may share cores: what that costs is what they are measured for.
        needed = case.cores_needed - case.loaders
        if needed > cores_allowed():
            return f"needs {needed} cores, {cores_allowed()} allowed here"
        return None

    def _write(self, out: Path, reason: str) -> None:
        runs = [with_stop_reason(run, reason) for run in self.runs.values()]
        runs += [
            not_run(Visit(case, 0, self.plan.order(0).index(case), self.fingerprints[case.framework]), self.plan, why)
            for case, why in self.impossible.items()
        ]
        plan = json_text(self.plan.model_dump(mode="json"))
        write_campaign(campaign_of(runs, out.name), out, {"plan.json": plan})
        count = Counter(run.row["status"] for run in runs)
        rounds = len({run.row["round"] for run in self.runs.values()})
        self.report(
            f"{count['finished']} runs finished, {count['failed']} failed, {count['out_of_memory']} out of memory, "
            f"{count['not_run']} cases not run here; stopped by {reason} after {rounds} rounds"
        )


def _line(visit: Visit, run: Run) -> str:
    """What came of one run: the median step and how many were disturbed, or why there is none."""
    if not run.is_finished:
        return f"{visit.case.case_id}: {run.row['status'].replace('_', ' ')}: {run.row['reason']}"
    steps = run.step_samples()
    median_ms = 1e3 * float(np.median([step["time_s"] for step in steps]))
    flagged = sum(step["is_disturbed"] for step in steps)
    return f"{visit.case.case_id}: {median_ms:.3g} ms, {flagged} of {len(steps)} steps disturbed"


def _log_medians(runs: list[Run]) -> np.ndarray:
    """Log median step time of each run that counts, in the order given; which count says `core.statistics.counted`."""
    steps = pd.DataFrame(
        [
            {"case_id": run.row["case_id"], "run_id": number, "is_disturbed": step["is_disturbed"], "s": step["time_s"]}
            for number, run in enumerate(runs)
            for step in run.step_samples()
        ],
        columns=["case_id", "run_id", "is_disturbed", "s"],
    )
    return np.log(steps[statistics.counted(steps)].groupby("run_id")["s"].median().to_numpy(float))
