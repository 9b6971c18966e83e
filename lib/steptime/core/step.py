"""What a step is made of: the layer profile, the schedule that orders it, and the timeline that results."""

from dataclasses import dataclass

import numpy as np

from steptime.core.errors import InputError

SCHEDULES = ("end_of_backward", "wait_free", "merged")
"""How gradients are aggregated: one message after backward, one a layer as soon as it is ready, or merged messages."""

AGGREGATIONS = (*SCHEDULES, "layers_after_backward", "published_merge", "buckets")
"""SCHEDULES and three more: a message a layer, but only after backward; merged by MG-WFBP's own rule; in buckets of
`Schedule.bucket_bytes` (PyTorch's DDP; GradientFlow's lazy all-reduce)."""

COPIES = ("with_read", "own_engine", "with_compute")
"""Who copies a prefetched batch to the device: the engine that read it, an engine of its own, or the device itself."""


@dataclass(frozen=True)
class LayerProfile:
    """Per learnable or other layer, in forward order: times in seconds, sizes in bytes (one mini-batch).

    Arrays have one entry a layer. `t_io_s`, `t_h2d_s` and `t_u_s` are the step's other phases.
    """

    network: str
    source: str
    batch: int
    layers: tuple[str, ...]
    forward_s: np.ndarray
    backward_s: np.ndarray
    parameter_bytes: np.ndarray
    activation_bytes: np.ndarray
    t_io_s: float = 0.0
    t_h2d_s: float = 0.0
    t_u_s: float = 0.0

    @property
    def t_f_s(self) -> float:
        return float(self.forward_s.sum())

    @property
    def t_b_s(self) -> float:
        return float(self.backward_s.sum())


@dataclass(frozen=True)
class Schedule:
    """Which tasks a step has and what overlaps.

    `aggregation` is one of AGGREGATIONS; `prefetch` reads and copies the next batches while this one is computed, with
    `loaders` of them at work, each on every `loaders`-th batch, and the copy as in COPIES.
    """

    aggregation: str = "wait_free"
    prefetch: bool = False
    bucket_bytes: float = 25 * 2**20
    loaders: int = 1
    copy: str = "with_read"

    def __post_init__(self) -> None:
        if self.aggregation not in AGGREGATIONS:
            raise InputError(f"schedule = {self.aggregation!r}: unknown; known are {', '.join(AGGREGATIONS)}")
        checks = {
            "copy": (self.copy in COPIES, f"known are {', '.join(COPIES)}"),
            "bucket_bytes": (self.bucket_bytes > 0, "must be above 0"),
            "loaders": (self.loaders >= 1, "must be at least 1"),
        }
        for name, (good, mend) in checks.items():
            if not good:
                raise InputError(f"schedule: {name} = {getattr(self, name)!r}: {mend}")


@dataclass(frozen=True)
class Task:
    """One bar of a timeline, seconds from the step's start. `kind` is what it does, `layer` where, `step` in which
    iteration; `worker` may stand for others that do the same at the same time."""

    name: str
    resource: str
    worker: int
    start_s: float
    end_s: float
    kind: str = ""
    layer: str = ""
    step: int = 0


@dataclass(frozen=True)
class Timeline:
    """What a simulated or measured step looked like. `kind`: measured, emulated, modelled or simulated.

    `dependencies`: pairs of positions in `tasks`, the first of which the second waited for (may be empty).
    """

    kind: str
    tasks: tuple[Task, ...]
    dependencies: tuple[tuple[int, int], ...] = ()

    @property
    def end_s(self) -> float:
        return max((task.end_s for task in self.tasks), default=0.0)
