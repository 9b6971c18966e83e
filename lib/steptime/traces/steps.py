"""What a trace holds: its steps, its collectives over all ranks on one clock, and where each step's time goes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from steptime.core.errors import InputError
from steptime.core.recorded import RecordedStep
from steptime.core.step import Task, Timeline
from steptime.traces.intervals import NONE, Intervals, clipped, covered_s, total_s, union, without
from steptime.traces.kineto import ANNOTATION, COPY, CPU_OP, KERNEL, MODULE, NOTHING, Trace, shifted

STEP_NAME = r"ProfilerStep#\d+$"
INPUT_NAME = r"([Ii]nput$|[Ll]oad$|[Dd]ata$|[Dd]ata[ _.]?[Ll]oad|enumerate\(DataLoader\))"
"""Annotations that mean: the next batch is read (torch's own DataLoader range, and plain names)."""
WAIT_NAME = r"(c10d::(wait|barrier|monitored)|record_param_comms)"
SHORTEST_WAIT_S = 20e-6
"""Shorter gaps between operations or kernels are launching, not waiting."""
_ROUNDING_S = 1e-9
"""The files round to nanoseconds."""
WHOLE_FILE = 0
"""The step's number where the file marks no steps."""
PARTS = ("compute_s", "communication_s", "copy_s", "input_s", "idle_s")


@dataclass(frozen=True)
class Activity:
    """What a rank did when: sets of intervals. `input` is cut to the host's time, `compute` to the device's if any."""

    compute: Intervals
    communication: Intervals
    copy: Intervals
    input: Intervals


def steps(trace: Trace) -> pd.DataFrame:
    """Columns step, start_s, end_s: the profiler's steps, or the whole file as step WHOLE_FILE where none is marked."""
    rows = trace.rows(ANNOTATION)
    rows = rows[trace.named(STEP_NAME)[trace.name[rows]]]
    if not len(rows):
        return pd.DataFrame({"step": [WHOLE_FILE], "start_s": [trace.start_s.min()], "end_s": [trace.end_s.max()]})
    numbers = [int(trace.names[name].partition("#")[2]) for name in trace.name[rows]]
    table = pd.DataFrame({"step": numbers, "start_s": trace.start_s[rows], "end_s": trace.end_s[rows]})
    return table.drop_duplicates("step").sort_values("start_s", ignore_index=True)


def step_span(trace: Trace, step: int) -> tuple[float, float]:
    """Start and end of a step. Raises InputError naming the known ones for another."""
    known = steps(trace).set_index("step")
    if step not in known.index:
        numbers = ", ".join(map(str, known.index))
        raise InputError(f"{trace.source}: step {step} is not in it; its steps are {numbers}")
    return float(known.loc[step, "start_s"]), float(known.loc[step, "end_s"])


def collectives(trace: Trace) -> pd.DataFrame:
    """A row a collective that ran: row (of the trace), step, operation, group, n_bytes, occurrence, start_s, end_s.

    Kernels where there are any, else the host's ranges (gloo). Bytes that the kernel does not tell are taken from
    the call that launched it; NOTHING if none does. `occurrence` counts equal ones within their step.
    """
    rows = [row for row in trace.messages if trace.category[row] == KERNEL]
    rows = rows or [row for row in trace.messages if trace.category[row] == ANNOTATION]
    calls = {int(trace.external[row]): trace.messages[row] for row in trace.messages if trace.category[row] == CPU_OP}
    found = []
    for row in sorted(rows):
        message = trace.messages[row]
        call = calls.get(int(trace.external[row]))
        if message.n_bytes == NOTHING and call is not None and trace.external[row] != NOTHING:
            message = call
        found.append((row, message.operation, message.group, message.n_bytes, trace.start_s[row], trace.end_s[row]))
    table = pd.DataFrame(found, columns=["row", "operation", "group", "n_bytes", "start_s", "end_s"])
    known = steps(trace)
    place = np.searchsorted(known["start_s"].to_numpy(), table["start_s"].to_numpy(float), side="right") - 1
    table.insert(1, "step", np.where(place >= 0, known["step"].to_numpy()[np.maximum(place, 0)], NOTHING))
    table["occurrence"] = table.groupby(["step", "operation", "group", "n_bytes"]).cumcount()
    return table


def matched(traces: Sequence[Trace]) -> pd.DataFrame:
    """The collectives that every rank has, one row each a rank: `collectives` with `rank`, `place`, and `message`.

    `place` is the trace's in `traces`, `message` numbers what belongs together: the same step, operation, group,
    bytes and occurrence. Only unlike sizes in flight at once may swap their order, so sizes are part of the match.
    """
    tables = [collectives(trace).assign(rank=trace.rank, place=place) for place, trace in enumerate(traces)]
    table = pd.concat(tables, ignore_index=True)
    keys = ["step", "operation", "group", "n_bytes", "occurrence"]
    grouped = table.groupby(keys, sort=False)
    table["message"] = grouped.ngroup()
    table = table[grouped["rank"].transform("nunique") == len(traces)]
    return table.sort_values(["message", "rank"], ignore_index=True)


@dataclass(frozen=True)
class Alignment:
    """Ranks on the first one's clock. `offset_s` was added to each; `spread_s` is the median distance from it of the
    single collectives' offsets; `messages` how many there were."""

    traces: tuple[Trace, ...]
    offset_s: tuple[float, ...]
    spread_s: tuple[float, ...]
    messages: int


def aligned(traces: Sequence[Trace]) -> Alignment:
    """All ranks on the clock of the first: a collective ends on all ranks together.

    The offset is the median over the collectives of the differences of their ends, kept within what causality
    allows: no rank's all-reduce ends before another's has begun. Before, times are from each file's own base. Raises
    InputError where ranks share no collective.
    """
    first = traces[0]
    based = [shifted(trace, (trace.origin_ns - first.origin_ns) * 1e-9) for trace in traces]
    if len(traces) == 1:
        return Alignment(tuple(based), (0.0,), (0.0,), len(collectives(first)))
    table = matched(based)
    if table.empty:
        sources = ", ".join(trace.source for trace in traces)
        raise InputError(f"{sources}: share no collective of the same step, kind and size; give files of one job")
    offsets, spreads = [0.0], [0.0]
    own = table[table["place"] == 0]
    for place in range(1, len(based)):
        other = table[table["place"] == place]
        ends = own["end_s"].to_numpy() - other["end_s"].to_numpy()
        low = np.max(own["start_s"].to_numpy() - other["end_s"].to_numpy())
        high = np.min(own["end_s"].to_numpy() - other["start_s"].to_numpy())
        offset = float(np.median(ends))
        if low <= high:
            offset = float(np.clip(offset, low, high))
        offsets.append(offset)
        spreads.append(float(np.median(np.abs(ends - offset))))
    moved = tuple(shifted(trace, offset) for trace, offset in zip(based, offsets, strict=True))
    return Alignment(moved, tuple(offsets), tuple(spreads), table["message"].nunique())


def activity(trace: Trace, bridge_s: float = 0.0) -> Activity:
    """When a rank computed, communicated, copied and read input.

    With a device, computing is a kernel that is no collective; without one, an operation of the host, except those
    that only wait. Gaps in computing of at most `bridge_s` count as computing.
    """
    collective = np.zeros(len(trace), dtype=bool)
    collective[collectives(trace)["row"].to_numpy(int)] = True
    notes = trace.rows(ANNOTATION)
    reading = notes[trace.named(INPUT_NAME)[trace.name[notes]]]
    if trace.has_device:
        working = np.flatnonzero((trace.category == KERNEL) & ~collective)
    else:
        working = trace.rows(CPU_OP)
        working = working[~trace.named(WAIT_NAME)[trace.name[working]]]

    def spans(rows: np.ndarray, bridge_s: float = 0.0) -> Intervals:
        return union(trace.start_s[rows], trace.end_s[rows], bridge_s)

    reads = spans(reading)
    compute = spans(working, bridge_s)
    if not trace.has_device:
        compute = without(compute, reads)
    return Activity(compute, spans(np.flatnonzero(collective)), spans(trace.rows(COPY)), reads)


def breakdown(trace: Trace) -> pd.DataFrame:
    """Where each step's time goes: step, rank, step_s and PARTS, which sum to step_s; and hidden_s.

    Each moment counts once, for the first that applies: computing; communicating (so `communication_s` is the exposed
    part, `hidden_s` what is hidden); copying to or from the device; reading input; idle. Without a device reading is
    the host's work and goes before communicating. A step is the time between the profiler's marks on the host, also
    for the device, whose queue shifts all steps alike.
    """
    done = activity(trace)
    order = ["compute", "communication", "copy", "input"]
    if not trace.has_device:
        order = ["compute", "input", "communication", "copy"]
    rows = []
    for step in steps(trace).itertuples(index=False):
        left: Intervals = (np.array([step.start_s]), np.array([step.end_s]))
        whole = total_s(left)
        parts = {}
        for name in order:
            rest = without(left, clipped(getattr(done, name), step.start_s, step.end_s))
            parts[f"{name}_s"] = total_s(left) - total_s(rest)
            left = rest
        parts["idle_s"] = total_s(left)
        talking = total_s(clipped(done.communication, step.start_s, step.end_s))
        hidden = talking - parts["communication_s"]
        ordered = {name: parts[name] for name in PARTS}
        rows.append({"step": step.step, "rank": trace.rank, "step_s": whole, **ordered, "hidden_s": max(0.0, hidden)})
    return pd.DataFrame(rows)


def waits(traces: Sequence[Trace]) -> pd.DataFrame:
    """What is waiting and what is sending in each collective, of traces on one clock.

    Columns: message, step, operation, n_bytes, ranks, time_s (from the last rank's arrival to the last end),
    wait_s (mean over the ranks of waiting for that arrival), last_rank.
    """
    table = matched(traces)
    rows = []
    for message, part in table.groupby("message", sort=True):
        arrival = float(part["start_s"].max())
        first = part.iloc[0]
        rows.append(
            {
                "message": message,
                "step": first["step"],
                "operation": first["operation"],
                "n_bytes": first["n_bytes"],
                "ranks": len(part),
                "time_s": max(0.0, float(part["end_s"].max()) - arrival),
                "wait_s": float((arrival - part["start_s"]).mean()),
                "last_rank": int(part.loc[part["start_s"].idxmax(), "rank"]),
            }
        )
    columns = ["message", "step", "operation", "n_bytes", "ranks", "time_s", "wait_s", "last_rank"]
    return pd.DataFrame(rows, columns=columns)


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
    ended = np.searchsorted(np.sort(ends), np.array([silent[0], silent[1] + _ROUNDING_S]), side="right")
    waiting: Intervals = (silent[0][ended[1] > ended[0]], silent[1][ended[1] > ended[0]])

    def computed_s(time: np.ndarray) -> np.ndarray:
        inside = np.clip(time, low, high)
        return inside - low - covered_s(waiting, inside)

    notes = trace.rows(ANNOTATION)
    updates = trace.start_s[notes[trace.named(r"Optimizer\.step")[trace.name[notes]]]]
    stops = np.unique(np.concatenate((waiting[1], updates[(updates > low) & (updates < high)], [high])))
    stop = stops[np.minimum(np.searchsorted(stops, ends - _ROUNDING_S), len(stops) - 1)]
    launch = computed_s(starts)
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
    )


def layers(trace: Trace) -> pd.DataFrame:
    """Forward and backward time of each layer in each step: step, layer, forward_s, backward_s.

    A layer is the innermost nn.Module, else the innermost annotation, around an operation that autograd points back
    to; without either it is that operation, numbered in the step. With a device the time is that of the kernels
    launched from there. Operations without a backward pass belong to no layer.
    """
    inside, known = _Ranges(trace), steps(trace)
    begins = known["start_s"].to_numpy()
    rows = []
    for lane, forward_at, back_lane, backward_at in trace.arrows:
        place = int(np.searchsorted(begins, forward_at, side="right")) - 1
        operation, back = inside.outermost(int(lane), forward_at), inside.outermost(int(back_lane), backward_at)
        if place >= 0 and operation is not None and back is not None:
            layer = inside.layer(int(lane), forward_at) or ""
            rows.append((int(known["step"].iloc[place]), layer, operation, back))
    table = pd.DataFrame(rows, columns=["step", "layer", "operation", "back"]).sort_values(["operation", "back"])
    unnamed = table["layer"] == ""
    table.loc[unnamed, "layer"] = [trace.names[trace.name[row]] for row in table.loc[unnamed, "operation"]]
    # Without a range to name them, the first, second … of the same operation in the step.
    number = table.groupby(["step", "layer"])["operation"].rank("dense").astype(int).astype(str)
    table.loc[unnamed, "layer"] = table["layer"] + "#" + number
    for name, column in (("forward_s", "operation"), ("backward_s", "back")):
        # An operation counts for the first layer that it is found for.
        own = ~table.duplicated(["step", column])
        table[name] = np.where(own, inside.seconds(table[column].to_numpy(int)), 0.0)
    return table.groupby(["step", "layer"], sort=False, as_index=False)[["forward_s", "backward_s"]].sum()


class _Ranges:
    """Which operation, module and annotation is around a moment on a thread, and what it costs."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        notes = trace.rows(ANNOTATION)
        other = rf"({STEP_NAME}|{INPUT_NAME}|\w+:\w+|Optimizer\.|DistributedDataParallel\.)"
        notes = notes[~trace.named(other)[trace.name[notes]]]
        self._modules = {lane: self._of(trace.rows(MODULE), lane) for lane in range(len(trace.lanes))}
        self._notes = {lane: self._of(notes, lane) for lane in range(len(trace.lanes))}
        self._tops = {lane: self._outer(self._of(trace.rows(CPU_OP), lane)) for lane in range(len(trace.lanes))}
        self._device_s = _launched_s(trace) if trace.has_device else None

    def _of(self, rows: np.ndarray, lane: int) -> np.ndarray:
        return rows[self.trace.lane[rows] == lane]

    def _outer(self, rows: np.ndarray) -> np.ndarray:
        """Those of sorted rows that are in none of the others."""
        if not len(rows):
            return rows
        reached = np.maximum.accumulate(self.trace.end_s[rows])
        return rows[np.concatenate(([True], self.trace.start_s[rows][1:] >= reached[:-1] - _ROUNDING_S))]

    def _around(self, rows: np.ndarray, time_s: float) -> int | None:
        """The last begun of the rows that are open at a time."""
        place = int(np.searchsorted(self.trace.start_s[rows], time_s + _ROUNDING_S, side="right"))
        for row in rows[:place][::-1][:200]:
            if self.trace.end_s[row] >= time_s:
                return int(row)
        return None

    def outermost(self, lane: int, time_s: float) -> int | None:
        return self._around(self._tops[lane], time_s)

    def layer(self, lane: int, time_s: float) -> str | None:
        for rows in (self._modules[lane], self._notes[lane]):
            row = self._around(rows, time_s)
            if row is not None:
                return self.trace.names[self.trace.name[row]].removeprefix("nn.Module: ")
        return None

    def seconds(self, rows: np.ndarray) -> np.ndarray:
        trace = self.trace
        if self._device_s is None:
            return trace.end_s[rows] - trace.start_s[rows]
        result = np.zeros(len(rows))
        for number, row in enumerate(rows):
            start, cumulated = self._device_s[int(trace.lane[row])]
            low, high = np.searchsorted(start, (trace.start_s[row], trace.end_s[row]))
            result[number] = cumulated[high] - cumulated[low]
        return result


def _launched_s(trace: Trace) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """For each thread: when it launched work, and the device seconds launched before each of these, from 0 on."""
    device = np.flatnonzero(np.isin(trace.category, (KERNEL, COPY)) & (trace.correlation != NOTHING))
    cost = pd.Series(trace.end_s[device] - trace.start_s[device]).groupby(trace.correlation[device]).sum()
    host = np.flatnonzero((trace.category != KERNEL) & (trace.category != COPY) & (trace.correlation != NOTHING))
    result = {}
    for lane in range(len(trace.lanes)):
        calls = host[trace.lane[host] == lane]
        seconds = cost.reindex(trace.correlation[calls]).fillna(0.0).to_numpy()
        result[lane] = (trace.start_s[calls], np.concatenate(([0.0], np.cumsum(seconds))))
    return result


def timeline(traces: Sequence[Trace], step: int) -> Timeline:
    """One measured step of traces on one clock as a timeline, from the first rank's start: the outermost operations,
    kernels, collectives and input ranges; the worker is the rank."""
    spans = [(trace, *step_span(trace, step)) for trace in traces]
    origin = min(low for _, low, _ in spans)
    tasks: list[Task] = []
    for trace, low, high in spans:
        for row, resource in _bars(trace):
            start, end = max(trace.start_s[row], low), min(trace.end_s[row], high)
            if end > start:
                name = trace.names[trace.name[row]]
                tasks.append(Task(name, resource, trace.rank, float(start - origin), float(end - origin)))
    return Timeline("measured", tuple(sorted(tasks, key=lambda task: (task.worker, task.start_s, task.resource))))


def _bars(trace: Trace) -> list[tuple[int, str]]:
    inside = _Ranges(trace)
    talking = collectives(trace)["row"].to_numpy(int).tolist()
    notes = trace.rows(ANNOTATION)
    reading = notes[trace.named(INPUT_NAME)[trace.name[notes]]].tolist()
    bars = [(row, "link") for row in talking] + [(row, "input") for row in reading]
    if trace.has_device:
        kernels = np.setdiff1d(trace.rows(KERNEL), talking).tolist()
        bars += [(row, "compute") for row in kernels] + [(row, "copy") for row in trace.rows(COPY).tolist()]
        return bars
    reads = union(trace.start_s[reading], trace.end_s[reading])
    for rows in inside._tops.values():
        outside = covered_s(reads, trace.end_s[rows]) - covered_s(reads, trace.start_s[rows]) <= 0
        bars += [(row, "compute") for row in rows[outside].tolist()]
    return bars
