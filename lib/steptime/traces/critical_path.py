"""The critical path of a recorded step: which chain of operations, kernels and collectives decided its length.

Backwards from the step's last end: before each task stands the one whose end let it start. That is the task before it
on its thread or stream, or the call that launched it; where it started later than these allow, what of its rank
ended last before it (the thread was waiting; on a device, what of the device). A collective starts when the last rank
has arrived, so the path goes on at that rank. As in trace analysis of message-passing programs (Boehme et al.,
"Scalable critical-path based performance analysis", IPDPS 2012).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from steptime.traces.kineto import ANNOTATION, COPY, KERNEL, MODULE, RUNTIME, Trace, launches
from steptime.traces.steps import SHORTEST_WAIT_S, collectives, matched, step_span, steps

WAITS_FOR_DEVICE = r"(cuda|hip)(Device|Stream|Event|Ctx)Synchronize|(cuda|hip)Memcpy(_v\d+)?$"

_ROWS = 2**40
"""More rows than a trace has: (place, row) as one number."""


@dataclass(frozen=True)
class Tasks:
    """What can be on a path, sorted by end: the innermost operation of each moment, on all ranks. Arrays over tasks.

    `place` is the trace's place among the ranks, `lane` unique over all. A task starts when `ready_lane` of
    `ready_place` lets it, which for a collective is that of the last rank to arrive.
    """

    name: np.ndarray
    place: np.ndarray
    lane: np.ndarray
    ready_place: np.ndarray
    ready_lane: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    launch_s: np.ndarray
    launch_lane: np.ndarray
    on_device: np.ndarray

    def __len__(self) -> int:
        return len(self.start_s)


def innermost(start_s: np.ndarray, end_s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nested ranges of one thread, sorted by start and longest first, as pieces that do not overlap.

    (row, start, end) of each piece: the time in which that row is the innermost. Where ranges overlap without
    nesting, the earlier one ends when the later one starts.
    """
    starts, ends = start_s.tolist(), end_s.tolist()
    pieces: list[tuple[int, float, float]] = []
    stack: list[int] = []
    now = 0.0
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        while stack:
            top = stack[-1]
            until = ends[top]
            if until > start:
                if start > now:
                    pieces.append((top, now, start))
                    now = start
                if until >= end:
                    break
            elif until > now:
                pieces.append((top, now, until))
                now = until
            stack.pop()
        now = start
        stack.append(row)
    while stack:
        top = stack.pop()
        if ends[top] > now:
            pieces.append((top, now, ends[top]))
            now = ends[top]
    if not pieces:
        return np.zeros(0, dtype=int), np.zeros(0), np.zeros(0)
    rows, begins, finishes = zip(*pieces, strict=True)
    return np.array(rows), np.array(begins), np.array(finishes)


def tasks(traces: Sequence[Trace]) -> Tasks:
    """The tasks of the ranks, which are on one clock (see `steps.aligned`)."""
    arrivals = _arrivals(traces)
    parts = []
    first_lane = 0
    for place, trace in enumerate(traces):
        talking = set(collectives(trace)["row"].tolist())
        launched = launches(trace)
        working = np.flatnonzero(~np.isin(trace.category, (ANNOTATION, MODULE)))
        working = np.union1d(working, np.array(sorted(talking), dtype=int)).astype(int)
        order = working[np.argsort(trace.lane[working], kind="stable")]
        bounds = np.searchsorted(trace.lane[order], np.arange(len(trace.lanes) + 1))
        for lane in range(len(trace.lanes)):
            rows = order[bounds[lane] : bounds[lane + 1]]
            own, start, end = innermost(trace.start_s[rows], trace.end_s[rows])
            start = _released(trace, rows[own], start, end)
            parts.append(_lane_tasks(trace, place, first_lane + lane, rows[own], start, end, launched, first_lane))
        first_lane += len(trace.lanes)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    name, place_, lane_, row, start_s, end_s, launch_s, launch_lane, on_device = columns
    ready_place, ready_lane = place_.copy(), lane_.copy()
    keys = place_ * _ROWS + row
    for number in np.flatnonzero(np.isin(keys, np.array(list(arrivals), dtype=np.int64))):
        arrival, last_place, last_lane = arrivals[int(keys[number])]
        if arrival > start_s[number]:
            start_s[number] = min(arrival, end_s[number])
            launch_s[number] = np.nan
        ready_place[number], ready_lane[number] = last_place, last_lane
    order = np.argsort(end_s, kind="stable")
    fields = (name, place_, lane_, ready_place, ready_lane, start_s, end_s, launch_s, launch_lane, on_device)
    return Tasks(*(column[order] for column in fields))


def _lane_tasks(
    trace: Trace,
    place: int,
    lane: int,
    row: np.ndarray,
    start_s: np.ndarray,
    end_s: np.ndarray,
    launched: tuple[np.ndarray, np.ndarray],
    first_lane: int,
) -> tuple[np.ndarray, ...]:
    names = np.array(trace.names, dtype=object)
    count = len(row)
    launch_s, launch_lane = launched[0][row], launched[1][row] + first_lane
    return (
        names[trace.name[row]],
        np.full(count, place),
        np.full(count, lane),
        row,
        start_s,
        end_s,
        launch_s,
        launch_lane,
        np.full(count, bool(count) and trace.lanes[trace.lane[row[0]]].is_device),
    )


def _released(trace: Trace, row: np.ndarray, start_s: np.ndarray, end_s: np.ndarray) -> np.ndarray:
    """When pieces begin to be work: a call that waits for the device does so until the last of its ends within."""
    waiting = (trace.category[row] == RUNTIME) & trace.named(WAITS_FOR_DEVICE)[trace.name[row]]
    ends = np.sort(trace.end_s[trace.rows(KERNEL, COPY)])
    if not waiting.any() or not len(ends):
        return start_s
    place = np.searchsorted(ends, end_s, side="right") - 1
    last = np.where(place >= 0, ends[np.maximum(place, 0)], -np.inf)
    return np.where(waiting, np.maximum(start_s, last), start_s)


def _arrivals(traces: Sequence[Trace]) -> dict[int, tuple[float, int, int]]:
    """For each collective's task: when the last rank arrived, that rank's place, and the lane it arrived on."""
    if len(traces) < 2:
        return {}
    table = matched(traces)
    firsts = np.cumsum([0] + [len(trace.lanes) for trace in traces])
    last = table.loc[table.groupby("message")["start_s"].idxmax()].set_index("message")
    result = {}
    for item in table.itertuples(index=False):
        late = last.loc[item.message]
        lane = int(firsts[int(late["place"])] + traces[int(late["place"])].lane[int(late["row"])])
        key = item.place * _ROWS + item.row
        result[key] = (float(late["start_s"]), int(late["place"]), lane)
    return result


def predecessors(given: Tasks) -> np.ndarray:
    """For each task, the one whose end (or, for a launch, start) let it start; -1 for none. Sorted, not looped."""
    count = len(given)
    before = _last_before(given.lane, given.end_s, given.ready_lane, given.start_s)
    before_s = np.where(before >= 0, given.end_s[before], -np.inf)
    launcher = _last_before(given.lane, given.start_s, given.launch_lane, given.launch_s)
    known = (launcher >= 0) & (given.launch_s <= given.start_s)
    launch_s = np.where(known, given.launch_s, -np.inf)
    by_launch = launch_s > before_s
    chosen, at_s = np.where(by_launch, launcher, before), np.where(by_launch, launch_s, before_s)
    is_waiting = given.start_s - at_s > SHORTEST_WAIT_S
    # The host waits for anything; what was launched on a device waits for the device only.
    for asking, others in ((~given.on_device, np.arange(count)), (given.on_device, np.flatnonzero(given.on_device))):
        waiting = np.flatnonzero(is_waiting & asking)
        place, end = given.place[others], given.end_s[others]
        found = _last_before(place, end, given.ready_place[waiting], given.start_s[waiting])
        waiting, released = waiting[found >= 0], others[found[found >= 0]]
        later = (given.end_s[released] > at_s[waiting]) & (released != waiting)
        chosen[waiting[later]] = released[later]
    return np.where(chosen == np.arange(count), -1, chosen)


def _last_before(kind: np.ndarray, time_s: np.ndarray, of: np.ndarray, at_s: np.ndarray) -> np.ndarray:
    """For each query (of, at_s): which of those whose `kind` is `of` has the latest time not after at_s; else -1."""
    order = np.lexsort((time_s, kind))
    result = np.full(len(of), -1)
    for value in np.unique(of):
        low, high = np.searchsorted(kind[order], (value, value + 1))
        asked = np.flatnonzero(of == value)
        place = np.searchsorted(time_s[order[low:high]], at_s[asked] + 1e-10, side="right") - 1
        found = place >= 0
        result[asked[found]] = order[low:high][place[found]]
    return np.where(np.isnan(at_s), -1, result)


def critical_path(traces: Sequence[Trace], step: int | None = None, given: Tasks | None = None) -> pd.DataFrame:
    """The path of one step (None: of all) over all ranks, first task first: rank, name, lane, start_s, end_s, gap_s.

    Times are from the step's start (the first rank's); `gap_s` is what passed before a task after the one that let it
    start: launching, the host between operations. The column sums of (end_s - start_s) and gap_s make up the step from
    its first task to its last end. `given` saves making the tasks again. Raises InputError where a rank lacks the step.
    """
    low, high = _window(traces, step)
    given = tasks(traces) if given is None else given
    begins, finishes, before = given.start_s.tolist(), given.end_s.tolist(), predecessors(given).tolist()
    now = int(np.searchsorted(given.end_s, high + 1e-10, side="right")) - 1
    path: list[tuple[int, float, float]] = []
    until = np.inf
    seen: set[int] = set()  # tasks that take no time can each stand before the other
    while now >= 0 and finishes[now] > low and now not in seen:
        seen.add(now)
        # A launch ends the launching task's part of the path where the kernel could start.
        end = min(finishes[now], until)
        start = max(begins[now], low)
        if end > start:
            path.append((now, start, end))
        until = min(until, start)
        now = before[now]
    path.reverse()
    index = np.array([row for row, _, _ in path], dtype=int)
    starts, ends = (np.array([item[column] for item in path], dtype=float) for column in (1, 2))
    lanes = np.array([lane.thread for trace in traces for lane in trace.lanes], dtype=object)
    ranks = np.array([trace.rank for trace in traces])
    return pd.DataFrame(
        {
            "rank": ranks[given.place[index]],
            "name": given.name[index],
            "lane": lanes[given.lane[index]],
            "start_s": starts - low,
            "end_s": ends - low,
            "gap_s": np.maximum(0.0, starts - np.concatenate(([low], ends[:-1]))[: len(path)]),
        }
    )


def _window(traces: Sequence[Trace], step: int | None) -> tuple[float, float]:
    """The first start and the last end of a step over the ranks."""
    if step is None:
        tables = [steps(trace) for trace in traces]
        return min(table["start_s"].min() for table in tables), max(table["end_s"].max() for table in tables)
    spans = [step_span(trace, step) for trace in traces]
    return min(start for start, _ in spans), max(end for _, end in spans)


def by_name(path: pd.DataFrame) -> pd.DataFrame:
    """What is on a path, longest first: name, rank, time_s, times, share; the gaps as "(between tasks)"."""
    table = path.assign(time_s=path["end_s"] - path["start_s"])
    grouped = table.groupby(["name", "rank"], as_index=False).agg(time_s=("time_s", "sum"), times=("time_s", "size"))
    waited = table[table["gap_s"] > 0].groupby("rank", as_index=False)
    gaps = waited.agg(time_s=("gap_s", "sum"), times=("gap_s", "size"))
    grouped = pd.concat([grouped, gaps.assign(name="(between tasks)")], ignore_index=True)
    grouped["share"] = grouped["time_s"] / grouped["time_s"].sum()
    return grouped.sort_values(["time_s", "name"], ascending=[False, True], ignore_index=True)
