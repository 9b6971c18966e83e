"""What a step is made of: the layer profile, the schedule that orders it, and the timeline that results."""

from dataclasses import dataclass

import numpy as np

SCHEDULES = ("end_of_backward", "wait_free", "merged")
"""How gradients are aggregated: one message after backward, one a layer as soon as it is ready, or merged messages."""


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
    """`aggregation` is one of SCHEDULES; `prefetch` reads and copies the next batch while this one is computed."""

    aggregation: str = "wait_free"
    prefetch: bool = False


@dataclass(frozen=True)
class Task:
    """One bar of a timeline, seconds from the step's start."""

    name: str
    resource: str
    worker: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What a simulated or measured step looked like. `kind`: measured, emulated, modelled or simulated."""

    kind: str
    tasks: tuple[Task, ...]

    @property
    def end_s(self) -> float:
        return max((task.end_s for task in self.tasks), default=0.0)
