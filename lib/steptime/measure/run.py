"""One run: a fresh child process that measures one case once, and the rows that this leaves."""

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
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
"""So many children import their frameworks, build their networks and take their first step at the same time; then one
is timed while the others block in a read, which each proves before the first is timed.

Starting and compiling take longer than measuring. More would hold more memory and gain little.
"""
STATUS_OF = {"error": "failed", "out_of_memory": "out_of_memory", "unsupported": "not_run"}
"""What a ChildError's kind makes of a run. What a framework cannot do is no failure."""
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
        """The timed steps, warm-ups left out; of a setting that only infers, the timed forward passes."""
        timed = [sample for sample in self.samples if not sample["is_warmup"] and not sample.get("layer")]
        steps = [sample for sample in timed if sample["phase"] == "step"]
        return steps or [sample for sample in timed if sample["phase"] == "forward"]


@dataclass(frozen=True)
class _Ready:
    """A child that built its network and took its first step: its answers to hello, build and that step."""

    hello: dict[str, Any]
    built: dict[str, Any]
    first: dict[str, Any]


def disturbed(samples: Sequence[Mapping[str, Any]], *, own_delays: bool = False) -> list[bool]:
    """Which of one run's timed steps something outside the process disturbed.

    A step is disturbed if the time that the process's threads were runnable but waiting for a core (`run_delay_s`,
    summed over them) and the time that the hypervisor took (`steal_s`) come to 5 % or more of the run's median step
    time. Only these covariates decide, never the step's own duration: leaving out what is slow would bias the median.
    The run's median is one yardstick for all its steps. Why these two, and why so:

    * A delayed thread holds up the step for at most its delay, whichever thread it is, so delays are summed.
    * The harness gives a case no fewer cores than it has runnable threads, so its threads do not wait for each other:
      undisturbed, the sum is a few tens of microseconds a step; beside a busy process on the same core it is about half
      of the step's duration.
    * `own_delays`: the exception. A case whose loader processes and threads are more than the cores (jpeg-2 on two
      cores) is measured all the same, since what it costs is asked for. There the delays are its own, part of what is
      measured: leaving steps out by them would keep those during which the loaders happened to rest. Only steal counts.
    * Involuntary switches are recorded and not used: thread pools cause benign ones, and those that cost time are in
      the delay.
    * The kernel counts steal in ticks of 10 ms over all cores: one tick disturbs any step shorter than 200 ms, also
      one that was hit for less. That leaves out a little too much, at random with regard to the step.

    A covariate that the system does not offer counts as 0.
    """
    if not samples:
        return []
    limit = DISTURBED_SHARE * statistics.median(sample["time_s"] for sample in samples)
    covariates = ("steal_s",) if own_delays else ("run_delay_s", "steal_s")
    return [sum(sample.get(name) or 0.0 for name in covariates) >= limit for sample in samples]


def measure_runs(
    visits: Sequence[Visit], plan: Plan, networks: Mapping[str, Network], adapter: Path | None = None
) -> Iterator[tuple[Visit, Run]]:
    """Each visit with its run; every run in a fresh child, only one of which runs while timed.

    `adapter`: a file to run in place of the settings' own.

    In the order given, but for a run that ran out of memory beside another: it is made again, alone, since the other
    may have had what it lacked.
    """
    together = min(STARTED_TOGETHER, cores_allowed())
    for first in range(0, len(visits), together):
        group = visits[first : first + together]
        again = []
        for visit, run in _measure_group(group, plan, networks, adapter):
            if run.row["status"] == "out_of_memory" and len(group) > 1:
                again.append(visit)
            else:
                yield visit, run
        for visit in again:
            yield from _measure_group([visit], plan, networks, adapter)


def _measure_group(
    group: Sequence[Visit], plan: Plan, networks: Mapping[str, Network], adapter: Path | None
) -> Iterator[tuple[Visit, Run]]:
    """The visits' children made ready at the same time, then timed one after the other."""
    started = time.perf_counter()
    with ExitStack() as stack:
        children = [stack.enter_context(_child(visit.case, plan, adapter)) for visit in group]
        with ThreadPoolExecutor(len(group)) as pool:
            described = [networks[visit.case.network] for visit in group]
            ready = list(pool.map(_made_ready, children, group, [plan] * len(group), described))
        share_s = (time.perf_counter() - started) / len(group)
        for visit, child, state in zip(group, children, ready, strict=True):
            yield visit, _measure_run(child, visit, plan, state, share_s)
            child.close()


def _child(case: Case, plan: Plan, adapter: Path | None) -> frameworks.Child:
    limit = None if plan.memory_limit_gib is None else int(plan.memory_limit_gib * 2**30)
    return frameworks.Child(
        case.framework, device=case.device, threads=case.threads, memory_limit_bytes=limit, adapter=adapter
    )


def _made_ready(child: frameworks.Child, visit: Visit, plan: Plan, network: Network) -> _Ready | frameworks.ChildError:
    """Have the child do all that compiles, then wait until it is idle. What goes wrong is the run's outcome."""
    try:
        hello = child.request("hello")
        built = build(child, visit.case, plan, network)
        first = child.request("phases" if hello["inference_only"] else "steps", count=1)
        child.request("settle")
        return _Ready(hello, built, first)
    except frameworks.ChildError as error:
        return error


def _measure_run(
    child: frameworks.Child, visit: Visit, plan: Plan, state: _Ready | frameworks.ChildError, start_s: float
) -> Run:
    """Time the child's network. A child that failed, here or before, gives a row that says why.

    `start_s`: the seconds that making it ready took, part of the run's duration.
    """
    row = base_row(visit, plan) | {
        "started_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "load_1min": os.getloadavg()[0],
    }
    started = time.perf_counter()
    try:
        if isinstance(state, frameworks.ChildError):
            raise state
        facts, samples = _timed(child, visit, plan, state)
    except frameworks.ChildError as error:
        facts, samples = {"status": STATUS_OF[error.kind], "reason": without_paths(str(error))}, []
    samples = [{"run_id": visit.run_id, **sample} for sample in samples]
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
        "variables": told({}, plan.memory_limit_gib),
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
    child: frameworks.Child, visit: Visit, plan: Plan, state: _Ready
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Everything one child is asked for: the columns it answers for and the rows of samples.csv."""
    if state.hello["inference_only"]:
        facts, samples = _timed_forward(child, plan, state)
    else:
        facts, samples = _timed_steps(child, visit, plan, state)
    gpu = gpus()[0] if visit.case.device == "cuda" else {}
    if visit.round < plan.profile_rounds:
        profiles = _optional(child, "profile", plan.layer_samples)
        layers = [profile["layers"] for profile in profiles] or _optional(child, "layers", plan.layer_samples)
        samples += [*_layer_rows(layers), *_part_rows(profiles)]
    return _facts(child, plan, state) | gpu | facts, samples


def _timed_steps(
    child: frameworks.Child, visit: Visit, plan: Plan, state: _Ready
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Warm-ups, of which the child's first step is one, then the timed steps, then the steps taken apart."""
    warm = state.first["samples"]
    if plan.warmups > 1:
        warm = [*warm, *child.request("steps", count=plan.warmups - 1)["samples"]]
    count = affordable(plan.samples, [sample["time_s"] for sample in warm])
    timed = child.request("steps", count=count)
    oversubscribed = visit.case.is_oversubscribed(cores_allowed())
    own = f"{visit.case.cores_needed} threads on {cores_allowed()} cores: their delays are the case's own"
    facts = {
        "reason": own if oversubscribed else None,
        "stop_reason": _cut(count, plan),
        "loss_first": _finite(state.first["loss_first"]),
        "loss_last": _finite(timed["loss_last"]),
        "energy_j": timed["energy_j"],
        "gpu_active_share": timed["gpu_active_share"],
    }
    rows = _step_rows(warm, timed["samples"], own_delays=oversubscribed)
    if visit.round < plan.profile_rounds:
        rows += _phase_rows(_optional(child, "phases", plan.phase_samples))
    return facts, rows


def _timed_forward(child: frameworks.Child, plan: Plan, state: _Ready) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What can be timed of a setting without a training step: its forward passes, in every round."""
    warm = state.first["samples"]
    if plan.warmups > 1:
        warm = [*warm, *child.request("phases", count=plan.warmups - 1)["samples"]]
    count = affordable(plan.samples, [sample["forward"] for sample in warm])
    timed = child.request("phases", count=count)["samples"]
    return {"reason": "inference only", "stop_reason": _cut(count, plan)}, _phase_rows([*warm, *timed], plan.warmups)


def _optional(child: frameworks.Child, command: str, count: int) -> list[Any]:
    """`count` repetitions after one, flagged, that warms up what the whole steps did not use; none if there is no such
    thing in this setting.
    """
    if not count:
        return []
    try:
        return child.request(command, count=1 + count)["samples"]
    except frameworks.ChildError as error:
        if error.kind == "unsupported":
            return []
        raise


def _facts(child: frameworks.Child, plan: Plan, state: _Ready) -> dict[str, Any]:
    """The columns of any finished run that the child answers for."""
    hello, built = state.hello, state.built
    return {
        "status": "finished",
        "parameters": built["parameters"],
        "build_s": built["build_s"],
        "peak_memory_bytes": child.request("memory")["peak_bytes"],
        "python_version": hello["versions"]["python"],
        "framework_version": hello["versions"]["framework"],
        "blas": hello["versions"]["blas"],
        "variables": told(hello["variables"], plan.memory_limit_gib),
        "timer": hello["timer"],
        "timer_resolution_s": hello["timer_resolution_s"],
    }


def told(variables: Mapping[str, str], memory_limit_gib: float | None) -> str | None:
    """What decides threads, compilers and memory, as one text without paths: NAME=value; NAME=value."""
    named = [f"{name}={without_paths(value)}" for name, value in sorted(variables.items())]
    if memory_limit_gib is not None:
        named.append(f"memory limit={memory_limit_gib:g} GiB")
    return "; ".join(named) or None


def _cut(count: int, plan: Plan) -> str | None:
    return None if count == plan.samples else f"steps cut to {count} by the run's time"


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


def _step_rows(warm: list[dict[str, Any]], timed: list[dict[str, Any]], *, own_delays: bool) -> list[dict[str, Any]]:
    """Two rows a step, its whole and its reading (`io`), numbered on through the warm-ups."""
    rows = []
    flags = [False] * len(warm) + disturbed(timed, own_delays=own_delays)
    for repeat, (sample, flag) in enumerate(zip([*warm, *timed], flags, strict=True)):
        shared = {"repeat": repeat, "is_warmup": repeat < len(warm), "is_disturbed": flag}
        covariates = {name: sample.get(name) for name in COVARIATES}
        rows.append({"phase": "step", "time_s": sample["time_s"], **shared, **covariates})
        rows.append({"phase": "io", "time_s": sample["io_s"], **shared})
    return rows


def _phase_rows(samples: list[dict[str, float]], warmups: int = 1) -> list[dict[str, Any]]:
    """The phases of steps taken apart, but for their reading: the whole steps have more of it."""
    return [
        {
            "phase": phase,
            "repeat": repeat,
            "is_warmup": repeat < warmups,
            "is_disturbed": False,
            "time_s": sample[phase],
        }
        for repeat, sample in enumerate(samples)
        for phase in PHASES
        if phase in sample
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


def _part_rows(profiles: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of profiled steps that are no layer, and the plain step before each, under the key "plain"."""
    return [
        {
            "phase": "profiled",
            "layer": part,
            "repeat": repeat,
            "is_warmup": repeat == 0,
            "is_disturbed": False,
            "time_s": seconds,
        }
        for repeat, profile in enumerate(profiles)
        for part, seconds in profile["parts"].items()
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
