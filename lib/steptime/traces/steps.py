"""What a trace holds: its steps, its collectives over all ranks on one clock, and where each step's time goes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from steptime.core.errors import InputError
from steptime.traces.intervals import Intervals, clipped, total_s, union, without
from steptime.traces.kineto import ANNOTATION, COPY, CPU_OP, KERNEL, NOTHING, Trace, shifted

STEP_NAME = r"ProfilerStep#\d+$"
INPUT_NAME = r"([Ii]nput$|[Ll]oad$|[Dd]ata$|[Dd]ata[ _.]?[Ll]oad|enumerate\(DataLoader\))"
"""Annotations that mean: the next batch is read (torch's own DataLoader range, and plain names)."""
WAIT_NAME = r"(c10d::(wait|barrier|monitored)|record_param_comms)"
SHORTEST_WAIT_S = 20e-6
"""Shorter gaps between operations or kernels are launching, not waiting."""
ROUNDING_S = 1e-9
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
