"""A recorded step as a timeline, and reduced to what `model.growing` replays with other collectives."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from steptime.core.errors import InputError
from steptime.core.recorded import RecordedStep
from steptime.core.step import Task, Timeline
from steptime.traces.intervals import NONE, Intervals, clipped, covered_s, union, without
from steptime.traces.kineto import ANNOTATION, COPY, KERNEL, Trace, launches
from steptime.traces.layers import Ranges
from steptime.traces.steps import (
    INPUT_NAME,
    ROUNDING_S,
    SHORTEST_WAIT_S,
    activity,
    collectives,
    matched,
    step_span,
    steps,
)

_KINDS = {"input": "input", "copy": "h2d", "link": "communicate"}
"""Resource -> kind of task; what computes is told by its time."""


def timeline(traces: Sequence[Trace], step: int) -> Timeline:
    """One measured step of traces on one clock as a timeline, from the first rank's start: the outermost operations,
    kernels, collectives and input ranges; the worker is the rank."""
    origin = min(step_span(trace, step)[0] for trace in traces)
    tasks = [task for trace in traces for task in _tasks(trace, step, origin)]
    return Timeline("measured", tuple(sorted(tasks, key=lambda task: (task.worker, task.start_s, task.resource))))


def _tasks(trace: Trace, step: int, origin_s: float) -> list[Task]:
    low, high = step_span(trace, step)
    kind_of = _kinds(trace, low, high)
    tasks = []
    for row, resource in _bars(trace):
        start, end = max(float(trace.start_s[row]), low), min(float(trace.end_s[row]), high)
        if end > start:
            kind = _KINDS.get(resource) or kind_of(row)
            name = trace.names[trace.name[row]]
            tasks.append(Task(name, resource, trace.rank, start - origin_s, end - origin_s, kind=kind, step=step))
    return tasks


def _kinds(trace: Trace, low_s: float, high_s: float) -> Callable[[int], str]:
    """Which pass computing belongs to: backward from autograd's first call on, update from the optimizer's step on.

    Of a kernel, the time of its launch counts.
    """
    starts = trace.start_s
    own = (starts >= low_s) & (starts < high_s)
    calls = starts[own & trace.named(r"autograd::")[trace.name]]
    updates = starts[own & (trace.category == ANNOTATION) & trace.named(r"Optimizer\.step")[trace.name]]
    backward, update = (float(times.min()) if len(times) else np.inf for times in (calls, updates))
    launched, _ = launches(trace)

    def kind(row: int) -> str:
        time = starts[row] if np.isnan(launched[row]) else launched[row]
        return "update" if time >= update else "backward" if time >= backward else "forward"

    return kind


def _bars(trace: Trace) -> list[tuple[int, str]]:
    inside = Ranges(trace)
    talking = collectives(trace)["row"].to_numpy(int).tolist()
    notes = trace.rows(ANNOTATION)
    reading = notes[trace.named(INPUT_NAME)[trace.name[notes]]].tolist()
    bars = [(row, "link") for row in talking] + [(row, "input") for row in reading]
    if trace.has_device:
        kernels = np.setdiff1d(trace.rows(KERNEL), talking).tolist()
        bars += [(row, "compute") for row in kernels] + [(row, "copy") for row in trace.rows(COPY).tolist()]
        return bars
    reads = union(trace.start_s[reading], trace.end_s[reading])
    for rows in inside.tops.values():
        outside = covered_s(reads, trace.end_s[rows]) - covered_s(reads, trace.start_s[rows]) <= 0
        bars += [(row, "compute") for row in rows[outside].tolist()]
    return bars


def recorded_step(traces: Sequence[Trace], step: int) -> RecordedStep:
    """One step of the rank that computed longest, of traces on one clock, as `model.growing` replays it.

    A wait is a time without computing in which a collective of the step ended; other gaps are the host's own and
    count as computing. A collective that was never waited for is needed at the next wait, else at the optimizer's
    step, else at the end.
    """
    table = matched(traces)
    if not (table["step"] == step).any():
        for trace in traces:
            step_span(trace, step)
        sources = ", ".join(trace.source for trace in traces)
        raise InputError(f"{sources}: step {step} has no collective that all files show; record two workers or more")
    arrival = table.groupby("message")["start_s"].transform("max")
    table["time_s"] = (table["end_s"] - arrival).clip(lower=0.0)
    candidates = []
    for place, trace in enumerate(traces):
        own = table[(table["place"] == place) & (table["step"] == step)].sort_values("start_s")
        candidates.append(_recorded(trace, step, own))
    return max(candidates, key=lambda candidate: candidate.compute_s)


def recorded_steps(traces: Sequence[Trace]) -> list[RecordedStep]:
    """`recorded_step` of each step that all traces have and in which something is communicated."""
    together = set.intersection(*(set(steps(trace)["step"]) for trace in traces))
    talking = set(matched(traces)["step"])
    if not together & talking:
        sources = ", ".join(trace.source for trace in traces)
        raise InputError(f"{sources}: no step has a collective that all files show; record two workers or more")
    return [recorded_step(traces, step) for step in sorted(together & talking)]


def _recorded(trace: Trace, step: int, own: pd.DataFrame) -> RecordedStep:
    low, high = step_span(trace, step)
    done = activity(trace, SHORTEST_WAIT_S)
    starts, ends = own["start_s"].to_numpy(float), own["end_s"].to_numpy(float)
    open_ = clipped(union(starts, ends), low, high)
    silent = without(without(open_, done.compute), NONE if trace.has_device else done.input)
    ended = np.searchsorted(np.sort(ends), np.array([silent[0], silent[1] + ROUNDING_S]), side="right")
    waiting: Intervals = (silent[0][ended[1] > ended[0]], silent[1][ended[1] > ended[0]])

    def computed_s(time: np.ndarray) -> np.ndarray:
        inside = np.clip(time, low, high)
        return inside - low - covered_s(waiting, inside)

    notes = trace.rows(ANNOTATION)
    updates = trace.start_s[notes[trace.named(r"Optimizer\.step")[trace.name[notes]]]]
    stops = np.unique(np.concatenate((waiting[1], updates[(updates > low) & (updates < high)], [high])))
    stop = stops[np.minimum(np.searchsorted(stops, ends - ROUNDING_S), len(stops) - 1)]
    launch = computed_s(starts)
    tasks = []
    for task in _tasks(trace, step, 0.0):
        begin, end = computed_s(np.array([task.start_s, task.end_s])).tolist()
        if task.resource != "link" and end > begin:
            tasks.append(replace(task, worker=0, start_s=begin, end_s=end))
    return RecordedStep(
        step=step,
        rank=trace.rank,
        step_s=high - low,
        compute_s=float(computed_s(np.array([high]))[0]),
        operations=tuple(own["operation"]),
        n_bytes=own["n_bytes"].to_numpy(np.int64),
        launch_s=launch,
        needed_s=np.maximum(computed_s(stop), launch),
        time_s=own["time_s"].to_numpy(float),
        tasks=tuple(tasks),
    )
