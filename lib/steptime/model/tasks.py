"""The step as a directed acyclic graph: tasks on resources, what waits for what, in compact arrays.

A graph describes one iteration. An edge with `iterations` = k says that a task waits for another of k iterations
before, so one graph describes endless training (`steptime.model.simulator`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from steptime.core.errors import InputError

KINDS = ("input", "decode", "h2d", "host", "forward", "backward", "compress", "communicate", "update")
"""What a task does: read, decode, copy to the device, the host's delay, compute, choose what to send, send, update."""

DISCIPLINES = ("ordered", "fifo", "fair")
"""How a resource serves its tasks: in the order of the graph, in the order in which they become ready (ties in the
order of the graph), or all that are ready at once, each at an equal share of the rate."""


@dataclass(frozen=True)
class Resource:
    """One thing that serves tasks. `slots`: how many at once; an ordered one gives the n-th task the slot of the
    (n - slots)-th, as PyTorch's loader gives its workers batches in turn. `worker`: whose it is, -1 for all of them."""

    name: str
    discipline: str = "ordered"
    slots: int = 1
    worker: int = -1

    def __post_init__(self) -> None:
        if self.discipline not in DISCIPLINES:
            raise InputError(
                f"resource {self.name}: discipline = {self.discipline!r}: unknown; known are {', '.join(DISCIPLINES)}"
            )
        if self.slots < 1 or (self.slots > 1 and self.discipline == "fair"):
            raise InputError(f"resource {self.name}: slots = {self.slots}: must be at least 1, and 1 for a fair one")


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """Tasks and edges as arrays.

    Tasks (T): `kind` index into KINDS, `layer` index into `layers` or -1, `worker`, `resource` index into `resources`
    or -1 (none: starts as soon as its edges allow), `duration_s`. An ordered resource serves them by index. Edges (E):
    task `after` starts `lag_s` after the end of `before` or later; `iterations` as above. `stands_for`: how many equal
    workers each worker of the graph is (one for each if empty).
    """

    kind: np.ndarray
    layer: np.ndarray
    worker: np.ndarray
    resource: np.ndarray
    duration_s: np.ndarray
    before: np.ndarray
    after: np.ndarray
    lag_s: np.ndarray
    iterations: np.ndarray
    resources: tuple[Resource, ...]
    layers: tuple[str, ...] = ()
    stands_for: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, values in (("duration_s", self.duration_s), ("lag_s", self.lag_s)):
            bad = np.flatnonzero(~((values >= 0) & (values < np.inf)))
            if len(bad):
                what = self.name(int(bad[0])) if name == "duration_s" else f"edge {bad[0]}"
                raise InputError(f"{what}: {name} = {values[bad[0]]}: must be 0 or more, in seconds")
        ends = np.concatenate([self.before, self.after])
        wrong = ends[(ends < 0) | (ends >= len(self))]
        if len(wrong):
            raise InputError(f"edge to task {wrong[0]}: there are {len(self)} tasks, counted from 0")

    def __len__(self) -> int:
        return len(self.duration_s)

    def name(self, task: int) -> str:
        """What the task does and where, for people."""
        kind, layer = KINDS[self.kind[task]], self.layer[task]
        return f"{kind} {self.layers[layer]}" if layer >= 0 else kind

    def on(self, resource: int) -> np.ndarray:
        """The tasks on a resource, in the graph's order."""
        return np.flatnonzero(self.resource == resource)

    def of_kind(self, *kinds: str) -> np.ndarray:
        """A mask of the tasks of those kinds."""
        return np.isin(self.kind, [KINDS.index(kind) for kind in kinds])


@dataclass
class GraphBuilder:
    """Collects tasks and edges in blocks of arrays."""

    layers: tuple[str, ...] = ()
    resources: list[Resource] = field(default_factory=list)
    _ids: dict[tuple[str, int], int] = field(default_factory=dict)
    _tasks: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    _edges: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    _count: int = 0

    def on(self, name: str, worker: int = -1, discipline: str = "ordered", slots: int = 1) -> int:
        """The index of the worker's resource of that name, made at the first call."""
        if (name, worker) not in self._ids:
            self._ids[name, worker] = len(self.resources)
            self.resources.append(Resource(name, discipline, slots, worker))
        return self._ids[name, worker]

    def add(
        self,
        kind: str,
        resource: int | np.ndarray,
        duration_s: float | np.ndarray,
        *,
        layer: int | np.ndarray = -1,
        worker: int | np.ndarray = 0,
    ) -> np.ndarray:
        """Tasks of one kind; scalars and arrays broadcast together. Returns their indices, in that shape."""
        durations, resources, layers, workers = np.broadcast_arrays(duration_s, resource, layer, worker)
        kinds = np.full(durations.size, KINDS.index(kind), dtype=np.int8)
        self._tasks.append((kinds, layers.ravel(), workers.ravel(), resources.ravel(), durations.ravel()))
        first, self._count = self._count, self._count + durations.size
        return np.arange(first, self._count).reshape(durations.shape)

    def edge(
        self, before: int | np.ndarray, after: int | np.ndarray, lag_s: float | np.ndarray = 0.0, iterations: int = 0
    ) -> None:
        """`after` waits for `before`; arrays broadcast together."""
        edges = np.broadcast_arrays(before, after, lag_s, iterations)
        self._edges.append(tuple(np.ravel(part) for part in edges))

    def graph(self, stands_for: Sequence[int] = ()) -> TaskGraph:
        """The graph of everything added."""
        kinds, layers, workers, resources, durations = _joined(self._tasks, 5)
        before, after, lags, iterations = _joined(self._edges, 4)
        return TaskGraph(
            kind=kinds.astype(np.int8, copy=False),
            layer=layers.astype(np.int32),
            worker=workers.astype(np.int32),
            resource=resources.astype(np.int32),
            duration_s=durations.astype(float, copy=False),
            before=before.astype(np.int64, copy=False),
            after=after.astype(np.int64, copy=False),
            lag_s=lags.astype(float, copy=False),
            iterations=iterations.astype(np.int32),
            resources=tuple(self.resources),
            layers=self.layers,
            stands_for=tuple(stands_for),
        )


def _joined(blocks: list[tuple[np.ndarray, ...]], columns: int) -> list[np.ndarray]:
    if not blocks:
        return [np.zeros(0) for _ in range(columns)]
    return [np.concatenate(column) for column in zip(*blocks, strict=True)]


def order_edges(graph: TaskGraph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Before, after and iterations of the edges that ordered resources add: the n-th task waits for the (n - slots)-th.

    Where that lies before the iteration's first task it is one of an earlier iteration.
    """
    order = np.argsort(graph.resource, kind="stable")
    slots = np.array([r.slots if r.discipline == "ordered" else 0 for r in graph.resources] + [0], dtype=np.int64)
    resource = graph.resource[order]
    kept = slots[resource] > 0
    order, resource = order[kept], resource[kept]
    if not len(order):
        return order, order, order
    counts = np.bincount(resource, minlength=len(graph.resources))
    firsts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    place = np.arange(len(order)) - firsts[resource]
    shift, source = np.divmod(place - slots[resource], counts[resource])
    return order[firsts[resource] + source], order, -shift
