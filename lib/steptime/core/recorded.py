"""A recorded step of one rank, reduced to what decides its length when its collectives take another time."""

from dataclasses import dataclass

import numpy as np

from steptime.core.step import Task


@dataclass(frozen=True)
class RecordedStep:
    """`launch_s` and `needed_s` are in computing time: seconds of the step without its waits for collectives.

    Arrays have one entry a collective, in the order of launch; `time_s` is what each took on this rank from the last
    rank's arrival on; `n_bytes` is the larger of what goes in and out on one rank, below 0 where it is not recorded.
    Each launch_s <= needed_s, both within 0 to compute_s. `step_s` is what the step took, waits included.
    `tasks` are what the rank did besides communicating, in computing time too.
    """

    step: int
    rank: int
    step_s: float
    compute_s: float
    operations: tuple[str, ...]
    n_bytes: np.ndarray
    launch_s: np.ndarray
    needed_s: np.ndarray
    time_s: np.ndarray
    tasks: tuple[Task, ...]
