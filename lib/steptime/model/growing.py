"""A recorded step grown to more workers: the computing of one rank as it was, every collective costed anew.

What is recorded of a step is how long the rank computed, when (in computing time) each collective was launched, and
when computing had to wait for it; see `core.recorded`. Growing replays this with other collective times: they run one
after the other in the order of their launch, computing stops where it has to wait. All workers are alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pandas as pd

from steptime.core.errors import InputError
from steptime.core.machine import Link
from steptime.core.recorded import RecordedStep
from steptime.core.step import Task, Timeline
from steptime.model.collectives import ring


@dataclass(frozen=True)
class Grown:
    """A step on `workers`: its seconds, those of them that wait for collectives, and the collectives' start and end."""

    workers: int
    step_s: float
    exposed_s: float
    start_s: np.ndarray
    end_s: np.ndarray


def collective_time_s(operation: str, n_bytes: float, workers: int, link: Link) -> float:
    """Seconds of one collective of `workers` on a ring of `link`; 0 for one worker.

    all_reduce 2(N-1)(alpha + n/N beta); all_gather, reduce_scatter and all_to_all (N-1)(alpha + n/N beta) with n the
    bytes of the whole, gathered message; broadcast and reduce, pipelined, (N-1) alpha + n beta; barrier 2(N-1) alpha.
    (Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005.) Raises
    InputError for an operation whose cost is not known here, and for unknown bytes.
    """
    whole = ring(workers, link)
    if operation == "barrier":
        return 2 * (workers - 1) * link.alpha_s
    if n_bytes < 0:
        raise InputError(f"collective {operation}: its bytes are not recorded; record with shapes (record_shapes=True)")
    if operation == "all_reduce":
        return whole.time_s(n_bytes)
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return whole.time_s(n_bytes) / 2
    if operation in ("broadcast", "reduce"):
        return (workers - 1) * link.alpha_s + (n_bytes * link.beta_s_per_byte if workers > 1 else 0.0)
    known = "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, barrier"
    raise InputError(f"collective {operation!r}: no cost is known for it; known are {known}")


def replay(recorded: RecordedStep, workers: int, time_s: np.ndarray) -> Grown:
    """The step with other collective times, seconds in the order of `recorded`.

    start[k] = max(launch[k], end[k - 1]), end[k] = start[k] + time[k]; where computing needs collective k it goes on
    at max(now, end[k]). Raises InputError for negative or infinite times.
    """
    if workers < 1 or not (np.isfinite(time_s).all() and (np.asarray(time_s) >= 0).all()):
        raise InputError(f"workers = {workers}, times {time_s}: need at least one worker and finite times from 0 on")
    count = len(recorded.operations)
    moments = [(float(recorded.launch_s[k]), 0, k) for k in range(count)]
    moments += [(float(recorded.needed_s[k]), 1, k) for k in range(count)]
    start, end = np.zeros(count), np.zeros(count)
    waited = free = 0.0
    for computed, is_needed, k in sorted(moments):
        if is_needed:
            waited = max(waited, float(end[k]) - computed)
        else:
            start[k] = max(computed + waited, free)
            free = end[k] = start[k] + time_s[k]
    return Grown(workers, recorded.compute_s + waited, waited, start, end)


def grow(recorded: RecordedStep, workers: int, link: Link) -> Grown:
    """The step on `workers` with every collective on a ring of `link` (modelled)."""
    sizes = zip(recorded.operations, recorded.n_bytes, strict=True)
    times = np.array([collective_time_s(name, float(size), workers, link) for name, size in sizes])
    return replay(recorded, workers, times)


def grown_timeline(recorded: RecordedStep, grown: Grown) -> Timeline:
    """The grown step as a timeline of one worker, which stands for all: its tasks between its waits, and the link."""
    sent = zip(recorded.operations, recorded.n_bytes, grown.start_s, grown.end_s, strict=True)
    tasks = [
        Task(f"{name} {int(size)} B", "link", 0, float(start), float(end), kind="communicate", step=recorded.step)
        for name, size, start, end in sent
        if end > start
    ]
    order = np.argsort(recorded.needed_s, kind="stable")
    stops = recorded.needed_s[order]
    waited = np.maximum.accumulate(np.concatenate(([0.0], grown.end_s[order] - stops)))
    for task in recorded.tasks:
        # A wait within a task cuts it.
        edges = [task.start_s, *np.unique(stops[(stops > task.start_s) & (stops < task.end_s)]).tolist(), task.end_s]
        for start, end in pairwise(edges):
            shift = float(waited[np.searchsorted(stops, start, side="right")])
            tasks.append(replace(task, start_s=start + shift, end_s=end + shift))
    return Timeline("modelled", tuple(sorted(tasks, key=lambda task: (task.start_s, task.resource))))


def grow_table(recorded: Sequence[RecordedStep], workers: Sequence[int], link: Link) -> pd.DataFrame:
    """A row a recorded step and number of workers: what it would take on a ring of `link` (modelled), seconds.

    Columns: step, rank (whose computing it is), link, workers, recorded_s (what the step took), compute_s,
    step_time_s, exposed_s, kind.
    """
    rows = []
    for step in recorded:
        for count in workers:
            grown = grow(step, count, link)
            rows.append(
                {
                    "step": step.step,
                    "rank": step.rank,
                    "link": link.name,
                    "workers": count,
                    "recorded_s": step.step_s,
                    "compute_s": step.compute_s,
                    "step_time_s": grown.step_s,
                    "exposed_s": grown.exposed_s,
                    "kind": "modelled",
                }
            )
    return pd.DataFrame(rows)
