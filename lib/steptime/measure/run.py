"""One run: a fresh child process that measures one case once, and the rows that this leaves."""

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from steptime import frameworks
from steptime.core.campaign import RUNS, SAMPLES, SCHEMA_VERSION, Campaign, as_table
from steptime.core.network import Network
from steptime.measure.plan import Case, Plan
from steptime.measure.provenance import code_facts, cores_allowed, gpus, machine_facts, without_paths

DISTURBED_SHARE = 0.05
RUN_TIME_S = 30.0
"""The timed steps of one run are cut to about this, but not below FEWEST_SAMPLES."""
FEWEST_SAMPLES = 5
LEARNING_RATE = 0.01
STARTED_TOGETHER = 2
"""So many children import their frameworks at the same time; then one is timed while the others block in a read.

Starting takes longer than measuring. More would hold more memory and gain little.
"""
COVARIATES = ("cpu_s", "run_delay_s", "involuntary_switches", "steal_s", "load_1min")
PHASES = ("h2d", "forward", "backward", "update")


@dataclass(frozen=True)
class Visit:
    """One place in the campaign: a case in a round, at a position in the round's order."""

    case: Case
    round: int
    position: int
    fingerprint: str

    @property
    def run_id(self) -> str:
        return f"{self.case.case_id}-r{self.round:02d}"


@dataclass(frozen=True)
class Run:
    """One row of runs.csv and its rows of samples.csv, column -> value."""

    row: dict[str, Any]
    samples: tuple[dict[str, Any], ...] = ()

    @property
    def is_finished(self) -> bool:
        return self.row["status"] == "finished"

    def step_samples(self) -> list[dict[str, Any]]:
        """The timed steps, warm-ups left out."""
        return [sample for sample in self.samples if sample["phase"] == "step" and not sample["is_warmup"]]


def disturbed(samples: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Which of one run's timed steps something outside the process disturbed.

    A step is disturbed if the time that the process's threads were runnable but waiting for a core (`run_delay_s`,
    summed over them) and the time that the hypervisor took (`steal_s`) come to 5 % or more of the run's median step
    time. Only these covariates decide, never the step's own duration: leaving out what is slow would bias the median.
    The run's median is one yardstick for all its steps. Why these two, and why so:

    * A delayed thread holds up the step for at most its delay, whichever thread it is, so delays are summed.
    * The harness gives a case no fewer cores than it has runnable threads, so its threads do not wait for each other:
      undisturbed, the sum is a few tens of microseconds a step; beside a busy process on the same core it is about half
      of the step's duration.
    * Involuntary switches are recorded and not used: thread pools cause benign ones, and those that cost time are in
      the delay.
    * The kernel counts steal in ticks of 10 ms over all cores: one tick disturbs any step shorter than 200 ms, also
      one that was hit for less. That leaves out a little too much, at random with regard to the step.

    A covariate that the system does not offer counts as 0.
    """
    if not samples:
        return []
    limit = DISTURBED_SHARE * statistics.median(sample["time_s"] for sample in samples)
    return [(sample.get("run_delay_s") or 0.0) + (sample.get("steal_s") or 0.0) >= limit for sample in samples]


def measure_runs(visits: Sequence[Visit], plan: Plan, networks: Mapping[str, Network]) -> Iterator[tuple[Visit, Run]]:
    """Each visit with its run, in the order given; every run in a fresh child, only one of which runs while timed."""
    together = min(STARTED_TOGETHER, cores_allowed())
    for first in range(0, len(visits), together):
        group = visits[first : first + together]
        started = time.perf_counter()
        with ExitStack() as stack:
            children = [stack.enter_context(_child(visit.case)) for visit in group]
            with ThreadPoolExecutor(len(group)) as pool:
                list(pool.map(_load, children))
            share_s = (time.perf_counter() - started) / len(group)
            for visit, child in zip(group, children, strict=True):
                yield visit, _measure_run(child, visit, plan, networks[visit.case.network], share_s)
                child.close()


def _child(case: Case) -> frameworks.Child:
    return frameworks.Child(case.framework, device=case.device, threads=case.threads)


def _load(child: frameworks.Child) -> None:
    """Have the child import its framework. What goes wrong here goes wrong again, and is recorded, when it is timed."""
    with suppress(frameworks.ChildError):
        child.request("hello")


def _measure_run(child: frameworks.Child, visit: Visit, plan: Plan, network: Network, start_s: float) -> Run:
    """Build the network in the child and time it. A child that fails gives a row that says why.

    `start_s`: the seconds that the child's start took, part of the run's duration.
    """
    row = base_row(visit, plan) | {
        "started_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "load_1min": os.getloadavg()[0],
    }
    started = time.perf_counter()
    try:
        facts, samples = _timed(child, visit, plan, network)
    except frameworks.ChildError as error:
        facts, samples = {"status": "failed", "reason": without_paths(str(error))}, []
    return Run(row | facts | {"duration_s": start_s + time.perf_counter() - started}, tuple(samples))


def not_run(visit: Visit, plan: Plan, reason: str) -> Run:
    """The row of a case that this machine cannot run."""
    return Run(base_row(visit, plan) | {"status": "not_run", "reason": reason})


def base_row(visit: Visit, plan: Plan) -> dict[str, Any]:
    """The columns that are known before the child starts."""
    return {
        "run_id": visit.run_id,
        "case_id": visit.case.case_id,
        "schema_version": SCHEMA_VERSION,
        **asdict(visit.case),
        "round": visit.round,
        "position": visit.position,
        "seed": plan.seed,
        "warmups": plan.warmups,
        "fingerprint": visit.fingerprint,
        "command": "steptime measure",
        "timer": "perf_counter",
        **machine_facts(),
        **code_facts(),
    }


def campaign_of(runs: Sequence[Run], name: str) -> Campaign:
    """The runs as a campaign's two tables."""
    samples = [sample for run in runs for sample in run.samples]
    return Campaign(name, as_table([run.row for run in runs], RUNS), as_table(samples, SAMPLES))


def runs_of(campaign: Campaign) -> list[Run]:
    """A campaign's rows as runs again; a missing value is None."""
    samples = dict(list(_plain(campaign.samples).groupby("run_id")))
    return [
        Run(row, tuple(samples[row["run_id"]].to_dict("records")) if row["run_id"] in samples else ())
        for row in _plain(campaign.runs).to_dict("records")
    ]


def with_stop_reason(run: Run, reason: str) -> Run:
    """The run with the campaign's stop reason before its own, if its steps were cut."""
    own = run.row.get("stop_reason")
    return replace(run, row=run.row | {"stop_reason": f"{reason}, {own}" if own else reason})


def _plain(table: pd.DataFrame) -> pd.DataFrame:
    return table.astype(object).where(table.notna(), None)


def _timed(
    child: frameworks.Child, visit: Visit, plan: Plan, network: Network
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Everything one child is asked for: the columns it answers for and the rows of samples.csv."""
    hello = child.request("hello")
    built = build(child, visit.case, plan, network)
    warm = child.request("steps", count=plan.warmups)
    count = affordable(plan.samples, [sample["time_s"] for sample in warm["samples"]])
    timed = child.request("steps", count=count)
    gpu = gpus()[0] if visit.case.device == "cuda" else {}
    profiled = visit.round < plan.profile_rounds
    # The first repetition of each warms up what the whole steps did not use, and is flagged.
    phases = child.request("phases", count=1 + plan.phase_samples)["samples"] if profiled and plan.phase_samples else []
    layers = child.request("layers", count=1 + plan.layer_samples)["samples"] if profiled and plan.layer_samples else []
    memory = child.request("memory")
    facts = {
        "status": "finished",
        "stop_reason": None if count == plan.samples else f"steps cut to {count} by the run's time",
        "parameters": built["parameters"],
        "peak_memory_bytes": memory["peak_bytes"],
        "loss_first": _finite(warm["loss_first"]),
        "loss_last": _finite(timed["loss_last"]),
        "python_version": hello["versions"]["python"],
        "framework_version": hello["versions"]["framework"],
        "blas": hello["versions"]["blas"],
        "timer": hello["timer"],
        "timer_resolution_s": hello["timer_resolution_s"],
        **gpu,
    }
    samples = [*_step_rows(warm["samples"], timed["samples"]), *_phase_rows(phases), *_layer_rows(layers)]
    return facts, [{"run_id": visit.run_id, **sample} for sample in samples]


def build(child: frameworks.Child, case: Case, plan: Plan, network: Network) -> dict[str, Any]:
    """Have the child build the case's network; its answer."""
    return child.request(
        "build",
        network=asdict(network),
        batch=case.batch,
        dtype=case.dtype,
        threads=case.threads,
        seed=plan.seed,
        learning_rate=LEARNING_RATE,
        input=case.input,
    )


def affordable(samples: int, warmup_times_s: Sequence[float]) -> int:
    """How many steps to time, fixed before the first of them: what was asked, or what about RUN_TIME_S hold.

    The last warm-up is the yardstick: the first ones compile.
    """
    return min(samples, max(FEWEST_SAMPLES, int(RUN_TIME_S / max(warmup_times_s[-1], 1e-9))))


def _step_rows(warm: list[dict[str, Any]], timed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two rows a step, its whole and its reading (`io`), numbered on through the warm-ups."""
    rows = []
    flags = [False] * len(warm) + disturbed(timed)
    for repeat, (sample, flag) in enumerate(zip([*warm, *timed], flags, strict=True)):
        shared = {"repeat": repeat, "is_warmup": repeat < len(warm), "is_disturbed": flag}
        covariates = {name: sample.get(name) for name in COVARIATES}
        rows.append({"phase": "step", "time_s": sample["time_s"], **shared, **covariates})
        rows.append({"phase": "io", "time_s": sample["io_s"], **shared})
    return rows


def _phase_rows(samples: list[dict[str, float]]) -> list[dict[str, Any]]:
    """The phases of steps taken apart, but for their reading: the whole steps have more of it."""
    return [
        {"phase": phase, "repeat": repeat, "is_warmup": repeat == 0, "is_disturbed": False, "time_s": sample[phase]}
        for repeat, sample in enumerate(samples)
        for phase in PHASES
    ]


def _layer_rows(samples: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {
            "phase": phase,
            "layer": layer["layer"],
            "repeat": repeat,
            "is_warmup": repeat == 0,
            "is_disturbed": False,
            "time_s": layer[f"{phase}_s"],
        }
        for repeat, layers in enumerate(samples)
        for layer in layers
        for phase in ("forward", "backward")
        if layer[f"{phase}_s"] is not None
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
