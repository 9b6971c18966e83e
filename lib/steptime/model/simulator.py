"""Simulating a task graph: when each task starts and ends, and the steady state of endless iterations.

Semantics. A task starts when all it waits for has ended (plus each edge's lag) and its resource serves it: an ordered
resource in the graph's order, a fifo one in the order of becoming ready, a fair one at once, at an equal share of its
rate. Tasks are not interrupted. `simulate` begins with everything idle and unfilled: edges from earlier iterations do
not hold the first one back.
"""

import bisect
import heapq
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from steptime.core.errors import InputError
from steptime.core.step import Task, Timeline
from steptime.model.tasks import KINDS, TaskGraph, order_edges


@dataclass(frozen=True, eq=False)
class Simulated:
    """Start and end of each task of `graph`, seconds from the beginning. `step_of`: each task's iteration."""

    graph: TaskGraph
    start_s: np.ndarray
    end_s: np.ndarray
    step_of: np.ndarray

    @property
    def step_s(self) -> float:
        """From the beginning to the end of the last task."""
        return float(self.end_s.max(initial=0.0))

    @property
    def tasks(self) -> int:
        """How many tasks were simulated; of folded workers one stands for all."""
        return len(self.graph)

    def timeline(self) -> Timeline:
        """The tasks that take time, with what each waited for. What all workers do together is shown at worker 0."""
        graph = self.graph
        shown = np.flatnonzero(self.end_s > self.start_s)
        place = np.full(len(graph), -1)
        place[shown] = np.arange(len(shown))
        tasks = tuple(
            Task(
                name=graph.name(int(task)),
                resource=graph.resources[graph.resource[task]].name if graph.resource[task] >= 0 else "",
                worker=max(0, int(graph.worker[task])),
                start_s=float(self.start_s[task]),
                end_s=float(self.end_s[task]),
                kind=KINDS[graph.kind[task]],
                layer=graph.layers[graph.layer[task]] if graph.layer[task] >= 0 else "",
                step=int(self.step_of[task]),
            )
            for task in shown
        )
        now = graph.iterations == 0
        pairs = np.stack([place[graph.before[now]], place[graph.after[now]]], axis=1)
        pairs = pairs[(pairs >= 0).all(axis=1)]
        return Timeline("simulated", tasks, tuple((int(a), int(b)) for a, b in pairs))


def simulate(graph: TaskGraph) -> Simulated:
    """One iteration from an idle beginning. Raises InputError naming a task where the graph has a cycle."""
    if all(resource.discipline == "ordered" for resource in graph.resources):
        starts = _longest_paths(graph)
        return Simulated(graph, starts, starts + graph.duration_s, np.zeros(len(graph), dtype=int))
    return simulate_events(graph)


def edges_of(graph: TaskGraph) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All edges: those of the graph and those that its ordered resources add; before, after, lag, iterations."""
    before, after, iterations = order_edges(graph)
    return (
        np.concatenate([graph.before, before]),
        np.concatenate([graph.after, after]),
        np.concatenate([graph.lag_s, np.zeros(len(before))]),
        np.concatenate([graph.iterations, iterations]),
    )


# ---------------------------------------------------------------------------------------- ordered: the longest path


def _longest_paths(graph: TaskGraph) -> np.ndarray:
    """Start of each task where every order is given: the longest path to it.

    Tasks that wait for one other only are contracted into it (their start is its end plus the lag). What is left is
    visited in runs of consecutive tasks none of which waits for another of the run, each run as arrays.
    """
    before, after, lag, iterations = edges_of(graph)
    now = iterations == 0
    before, after, lag = before[now], after[now], lag[now]
    place = np.arange(len(graph))
    if not (before < after).all():
        place[topological_order(graph)] = np.arange(len(graph))
    single = np.bincount(after, minlength=len(graph))[after] == 1
    root, offset = _contracted(graph, before[single], after[single], lag[single])
    many = ~single
    before, after, lag = before[many], after[many], lag[many]
    starts = np.zeros(len(graph))
    targets, arrivals = _visited(
        place[root[before]], place[after], offset[before] + graph.duration_s[before] + lag, len(graph)
    )
    inverse = np.empty(len(graph), dtype=np.int64)
    inverse[place] = np.arange(len(graph))
    starts[inverse[targets]] = arrivals
    return starts[root] + offset


def _contracted(
    graph: TaskGraph, before: np.ndarray, after: np.ndarray, lag: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each task the task whose start decides its own, and how long after that it starts (pointer jumping)."""
    root = np.arange(len(graph))
    offset = np.zeros(len(graph))
    root[after] = before
    offset[after] = graph.duration_s[before] + lag
    while True:
        following = root[root]
        if np.array_equal(following, root):
            return root, offset
        offset = offset + offset[root]
        root = following


def _visited(before: np.ndarray, after: np.ndarray, weight_s: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The nodes with an edge into them and the longest path to each; `before` < `after`, others are at 0."""
    by_target = np.argsort(after, kind="stable")
    before, after, weight_s = before[by_target], after[by_target], weight_s[by_target]
    first = np.flatnonzero(np.diff(after, prepend=-1))
    targets = after[first]
    if not len(targets):
        return targets, np.zeros(0)
    # numbered anew: node 0 is whatever starts at 0, node n + 1 the n-th target
    number = np.zeros(count, dtype=np.int64)
    number[targets] = np.arange(1, len(targets) + 1)
    before = number[before]
    latest = np.maximum.accumulate(np.maximum.reduceat(before, first)).tolist()
    bounds = [*first.tolist(), len(before)]
    paths = np.zeros(len(targets) + 1)
    begin = 0
    while begin < len(targets):
        end = bisect.bisect_right(latest, begin, begin + 1)  # up to the first that waits for one of this run
        edges = slice(bounds[begin], bounds[end])
        arrivals = paths[before[edges]] + weight_s[edges]
        paths[begin + 1 : end + 1] = np.maximum.reduceat(arrivals, first[begin:end] - bounds[begin])
        begin = end
    return targets, paths[1:]


def _cycle(graph: TaskGraph) -> InputError:
    """Names the tasks of one cycle: walks back from a task that never gets ready until one comes again."""
    before, after, _, iterations = edges_of(graph)
    now = iterations == 0
    before, after = before[now], after[now]
    waits_for = np.bincount(after, minlength=len(graph))
    alive = np.ones(len(graph), dtype=bool)
    while True:
        gone = alive & (waits_for == 0)
        if not gone.any():
            break
        alive &= ~gone
        waits_for -= np.bincount(after[gone[before]], minlength=len(graph))
    into = {int(b): int(a) for a, b in zip(before, after, strict=True) if alive[a] and alive[b]}
    task, seen = next(iter(into)), []
    while task not in seen:
        seen.append(task)
        task = into[task]
    names = [f"{graph.name(each)} (task {each})" for each in [*seen[seen.index(task) :], task][::-1]]
    shown = names if len(names) < 6 else [*names[:4], "…", names[-1]]
    return InputError(f"task graph: {' → '.join(shown)}: is a cycle; take one of its edges or the order away")


# ----------------------------------------------------------------------------- fifo and fair: one event after another


def simulate_events(graph: TaskGraph) -> Simulated:
    """The same by a loop over events, one at a time: any discipline, and the check of what `simulate` does faster."""
    loop = _EventLoop(graph)
    loop.run()
    if loop.left:
        raise _cycle(graph)
    return Simulated(graph, np.array(loop.start), np.array(loop.end), np.zeros(len(graph), dtype=int))


class _EventLoop:
    """Waiting tasks, busy resources, and the heap of coming events (time, task index, what: 0 end, 1 ready)."""

    def __init__(self, graph: TaskGraph) -> None:
        before, after, lag, iterations = edges_of(graph)
        self.successors: list[list[tuple[int, float]]] = [[] for _ in range(len(graph))]
        self.missing = [0] * len(graph)
        for source, target, seconds, shift in zip(before, after, lag, iterations, strict=True):
            if shift == 0:
                self.successors[source].append((int(target), float(seconds)))
                self.missing[target] += 1
        self.duration = graph.duration_s.tolist()
        self.resource = graph.resource.tolist()
        self.discipline = [resource.discipline for resource in graph.resources]
        self.free = [resource.slots for resource in graph.resources]
        self.queue: list[deque[int]] = [deque() for _ in graph.resources]
        self.fair = [_Fair() for _ in graph.resources]
        self.ready_at = [0.0] * len(graph)
        self.start = [0.0] * len(graph)
        self.end = [0.0] * len(graph)
        self.left = len(graph)
        self.heap: list[tuple[float, int, int, int]] = []

    def run(self) -> None:
        for task, missing in enumerate(self.missing):
            if not missing:
                heapq.heappush(self.heap, (0.0, 1, task, 0))
        while self.heap:
            # all ends of a moment come before its readies, so that ties are served in the graph's order
            now, is_ready, task, version = heapq.heappop(self.heap)
            if is_ready:
                self._arrive(task, now)
            elif self._is_over(task, now, version):
                self._finish(task, now)

    def _arrive(self, task: int, now: float) -> None:
        resource = self.resource[task]
        if resource < 0 or self.discipline[resource] == "ordered":
            self._begin(task, now)
        elif self.discipline[resource] == "fair":
            self.start[task] = now
            self.fair[resource].enter(task, self.duration[task], now)
            self._plan(resource)
        elif self.free[resource]:
            self.free[resource] -= 1
            self._begin(task, now)
        else:
            self.queue[resource].append(task)

    def _begin(self, task: int, now: float) -> None:
        self.start[task] = now
        heapq.heappush(self.heap, (now + self.duration[task], 0, task, 0))

    def _plan(self, resource: int) -> None:
        coming = self.fair[resource].next_end()
        if coming is not None:
            when, task = coming
            heapq.heappush(self.heap, (when, 0, task, self.fair[resource].version))

    def _is_over(self, task: int, now: float, version: int) -> bool:
        """An end planned on a fair resource holds only if nothing has come or gone since."""
        resource = self.resource[task]
        if resource < 0 or self.discipline[resource] != "fair":
            return True
        if self.fair[resource].version != version:
            return False
        self.fair[resource].leave(task, now)
        self._plan(resource)
        return True

    def _finish(self, task: int, now: float) -> None:
        self.end[task] = now
        self.left -= 1
        for target, lag in self.successors[task]:
            self.ready_at[target] = max(self.ready_at[target], now + lag)
            self.missing[target] -= 1
            if not self.missing[target]:
                heapq.heappush(self.heap, (self.ready_at[target], 1, target, 0))
        resource = self.resource[task]
        if resource >= 0 and self.discipline[resource] == "fifo":
            if self.queue[resource]:
                self._begin(self.queue[resource].popleft(), now)
            else:
                self.free[resource] += 1


class _Fair:
    """A resource whose tasks share its rate equally: each one's end in the time that a task alone on it would see."""

    def __init__(self) -> None:
        self.served = 0.0
        self.at = 0.0
        self.version = 0
        self.ends: list[tuple[float, int]] = []

    def _advance(self, now: float) -> None:
        if self.ends:
            self.served += (now - self.at) / len(self.ends)
        self.at = now
        self.version += 1

    def enter(self, task: int, work_s: float, now: float) -> None:
        self._advance(now)
        heapq.heappush(self.ends, (self.served + work_s, task))

    def leave(self, task: int, now: float) -> None:
        self._advance(now)
        self.served = heapq.heappop(self.ends)[0]

    def next_end(self) -> tuple[float, int] | None:
        if not self.ends:
            return None
        end, task = self.ends[0]
        return self.at + max(0.0, end - self.served) * len(self.ends), task


def as_served(simulated: Simulated) -> Simulated:
    """The same with every fifo resource ordered as it served its tasks (renumbered), for what needs a given order.

    Raises InputError for a fair resource: it has no order.
    """
    graph = simulated.graph
    for resource in graph.resources:
        if resource.discipline == "fair":
            raise InputError(f"resource {resource.name}: discipline = 'fair': has no order; use fifo or ordered")
    order = np.arange(len(graph))
    for index, resource in enumerate(graph.resources):
        if resource.discipline == "fifo":
            tasks = graph.on(index)
            order[tasks] = tasks[np.lexsort((tasks, simulated.end_s[tasks], simulated.start_s[tasks]))]
    new = np.empty(len(graph), dtype=np.int64)
    new[order] = np.arange(len(graph))
    served = replace(
        graph,
        kind=graph.kind[order],
        layer=graph.layer[order],
        worker=graph.worker[order],
        resource=graph.resource[order],
        duration_s=graph.duration_s[order],
        before=new[graph.before],
        after=new[graph.after],
        resources=tuple(replace(resource, discipline="ordered") for resource in graph.resources),
    )
    return Simulated(served, simulated.start_s[order], simulated.end_s[order], simulated.step_of[order])


# ------------------------------------------------------------------------------------------------ many iterations


def unroll(graph: TaskGraph, iterations: int) -> TaskGraph:
    """`iterations` copies of the graph one after the other; edges from before the first are left out."""
    if iterations < 1:
        raise InputError(f"iterations = {iterations}: must be at least 1")
    count = len(graph)
    copies = np.arange(iterations)[:, None]
    source = copies - graph.iterations
    kept = (source >= 0).ravel()
    lags = np.broadcast_to(graph.lag_s, source.shape).ravel()[kept]
    return replace(
        graph,
        kind=np.tile(graph.kind, iterations),
        layer=np.tile(graph.layer, iterations),
        worker=np.tile(graph.worker, iterations),
        resource=np.tile(graph.resource, iterations),
        duration_s=np.tile(graph.duration_s, iterations),
        before=(graph.before + source * count).ravel()[kept],
        after=(graph.after + copies * count).ravel()[kept],
        lag_s=lags,
        iterations=np.zeros(len(lags), dtype=np.int32),
    )


def simulate_iterations(graph: TaskGraph, iterations: int) -> Simulated:
    """That many iterations from an idle beginning; `step_of` says which each task belongs to."""
    simulated = simulate(unroll(graph, iterations))
    return replace(simulated, step_of=np.repeat(np.arange(iterations), len(graph)))


def iteration_ends_s(simulated: Simulated) -> np.ndarray:
    """When the last task of each iteration ended."""
    return simulated.end_s.reshape(int(simulated.step_of[-1]) + 1, -1).max(axis=1)


def steady_step_s(graph: TaskGraph) -> float:
    """Seconds an iteration in the long run: the largest ratio of a cycle's length to the iterations that it spans.

    Exact where every order is given, also where the gaps between iterations alternate for ever (max-plus spectral
    theory: Baccelli, Cohen, Olsder, Quadrat, Synchronization and Linearity, 1992, chapter 3). Only the ends of tasks
    that a later iteration waits for are kept: how one iteration's follow from the earlier ones' is a small max-plus
    matrix, whose largest cycle mean is found by Karp's method (Karp, 1978). 0 without a cycle.
    """
    if any(resource.discipline != "ordered" for resource in graph.resources):
        raise InputError("steady state: a fifo or fair resource has no given order; see simulator.as_served")
    before, after, lag, iterations = edges_of(graph)
    carried = iterations > 0
    ends, at = np.unique(before[carried], return_inverse=True)
    if not len(ends):
        return 0.0
    deepest = int(iterations[carried].max())
    # state: the ends of `ends` in the last `deepest` iterations, the latest first
    size = len(ends)
    matrix = np.full((size * deepest, size * deepest), -np.inf)
    matrix[np.arange(size, size * deepest), np.arange(size * (deepest - 1))] = 0.0
    arrivals = np.full((len(graph), size * deepest), -np.inf)
    columns = (iterations[carried] - 1) * size + at
    np.maximum.at(arrivals, (after[carried], columns), lag[carried])
    now = ~carried
    reached = _propagated(graph, before[now], after[now], lag[now], arrivals)
    matrix[:size] = reached[ends] + graph.duration_s[ends, None]
    return _largest_cycle_mean(matrix)


def _propagated(
    graph: TaskGraph, before: np.ndarray, after: np.ndarray, lag: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """Starts (tasks x columns) pushed along the edges of one iteration, every column for itself."""
    starts = starts.copy()
    into = np.argsort(after, kind="stable")
    bounds = np.searchsorted(after[into], np.arange(len(graph) + 1))
    for task in topological_order(graph):
        for edge in into[bounds[task] : bounds[task + 1]]:
            source = before[edge]
            np.maximum(starts[task], starts[source] + (graph.duration_s[source] + lag[edge]), out=starts[task])
    return starts


def topological_order(graph: TaskGraph) -> np.ndarray:
    """The tasks in an order in which none comes before what it waits for. Raises InputError for a cycle."""
    before, after, _, iterations = edges_of(graph)
    now = iterations == 0
    by_source = np.argsort(before[now], kind="stable")
    targets = after[now][by_source].tolist()
    bounds = np.searchsorted(before[now][by_source], np.arange(len(graph) + 1)).tolist()
    missing = np.bincount(after[now], minlength=len(graph)).tolist()
    order = [task for task, count in enumerate(missing) if not count]
    for task in order:
        for target in targets[bounds[task] : bounds[task + 1]]:
            missing[target] -= 1
            if not missing[target]:
                order.append(target)
    if len(order) < len(graph):
        raise _cycle(graph)
    return np.array(order, dtype=np.int64)


def _largest_cycle_mean(matrix: np.ndarray) -> float:
    """The largest mean weight of a cycle; matrix[v, u] is the weight of the edge from u to v, -inf for none."""
    size = len(matrix)
    walks = np.full((size + 1, size), -np.inf)
    walks[0] = 0.0  # walks may begin anywhere
    for length in range(1, size + 1):
        walks[length] = (matrix + walks[length - 1]).max(axis=1)
    alive = walks[size] > -np.inf
    if not alive.any():
        return 0.0
    lengths = size - np.arange(size)
    with np.errstate(invalid="ignore"):
        means = (walks[size] - walks[:size]) / lengths[:, None]
    means[np.isnan(means) | (walks[:size] == -np.inf)] = np.inf
    return float(means.min(axis=0)[alive].max())
