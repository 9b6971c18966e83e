"""The S-SGD step model: from layer profile, schedule, workers and link to the seconds of one step.

Symbols as in Shi, Wang and Chu, arXiv 1711.05979: t_io read and decode, t_h2d copy to the device, t_f forward,
t_b backward, t_c aggregation, t_u update; t_c_no is the part of t_c that backward does not hide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from steptime.core.errors import InputError
from steptime.core.machine import Link
from steptime.core.step import SCHEDULES, LayerProfile, Schedule, Task, Timeline
from steptime.model import merging
from steptime.model.collectives import Cost, ring


@dataclass(frozen=True)
class StepTime:
    """One step of one worker in steady state, seconds, and the number of messages sent."""

    t_io_s: float
    t_h2d_s: float
    t_f_s: float
    t_b_s: float
    t_c_s: float
    t_c_no_s: float
    t_u_s: float
    step_s: float
    messages: int


@dataclass(frozen=True)
class Aggregation:
    """The messages of one step in sending order: what is in each, when it starts (from the start of backward), how
    long it takes."""

    names: tuple[str, ...]
    start_s: np.ndarray
    time_s: np.ndarray

    @property
    def end_s(self) -> float:
        return float(self.start_s[-1] + self.time_s[-1]) if len(self.names) else 0.0


def sending_order(profile: LayerProfile) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Ready times (from the start of backward), bytes and names of the learnable layers, last layer first.

    r[l] = sum of t_b[k] for k = L .. l (S-SGD, arXiv 1711.05979, wait-free back-propagation).
    """
    learnable = profile.parameter_bytes[::-1] > 0
    ready = np.cumsum(profile.backward_s[::-1])[learnable]
    names = tuple(np.array(profile.layers, dtype=object)[::-1][learnable])
    return ready, profile.parameter_bytes[::-1][learnable].astype(float), names


def aggregation(profile: LayerProfile, schedule: Schedule, cost: Cost) -> Aggregation:
    """When the gradients are aggregated. Raises InputError for an unknown schedule.

    end_of_backward: one message after the whole backward pass; wait_free: one a layer, as soon as it is ready and
    the link is free; merged: the contiguous grouping that ends earliest (`merging.optimal_groups`).
    """
    ready, n_bytes, names = sending_order(profile)
    if schedule.aggregation == "end_of_backward":
        ends = merging.one_message(len(ready))
    elif schedule.aggregation == "wait_free":
        ends = merging.layer_wise(len(ready))
    elif schedule.aggregation == "merged":
        ends = merging.optimal_groups(ready, n_bytes, cost)
    else:
        raise InputError(f"schedule = {schedule.aggregation!r}: unknown; known are {', '.join(SCHEDULES)}")
    message_ready, sizes = merging.messages(ready, n_bytes, ends)
    if schedule.aggregation == "end_of_backward":
        message_ready = np.full(len(ends), profile.t_b_s)
    times = cost.time_s(sizes)
    groups = [names[first:end] for first, end in zip((0, *ends), ends, strict=False)]
    titles = tuple(group[0] if len(group) == 1 else f"{group[0]} … {group[-1]}" for group in groups)
    return Aggregation(titles, merging.start_times(message_ready, times), times)


def predict_step(
    profile: LayerProfile, schedule: Schedule, workers: int, link: Link, *, shared_cores: bool = False
) -> StepTime:
    """The seconds of one synchronous step of `workers`, each with its own input and `profile`, on a ring of `link`.

    Sequential: t = t_io + t_h2d + t_f + t_b + t_c_no + t_u. With prefetch the next batch is read and copied
    meanwhile: t = max(t_io + t_h2d, t_f + t_b + t_c_no + t_u). With `shared_cores` reading and computing use the same
    cores, so prefetch hides nothing and the sum holds again. t_c_no = max(0, end of the last message - t_b); one
    worker sends nothing. (S-SGD, arXiv 1711.05979, iteration time on one and on N devices; wait-free
    back-propagation: t_c_no = tau_c[1] + t_c[1] - tau_b[1] - t_b[1].)
    """
    sent = _sent(profile, schedule, workers, link)
    exposed = max(0.0, sent.end_s - profile.t_b_s)
    reading = profile.t_io_s + profile.t_h2d_s
    computing = profile.t_f_s + profile.t_b_s + exposed + profile.t_u_s
    overlapped = schedule.prefetch and not shared_cores
    return StepTime(
        t_io_s=profile.t_io_s,
        t_h2d_s=profile.t_h2d_s,
        t_f_s=profile.t_f_s,
        t_b_s=profile.t_b_s,
        t_c_s=float(sent.time_s.sum()),
        t_c_no_s=exposed,
        t_u_s=profile.t_u_s,
        step_s=max(reading, computing) if overlapped else reading + computing,
        messages=len(sent.names),
    )


def timeline(
    profile: LayerProfile, schedule: Schedule, workers: int, link: Link, *, shared_cores: bool = False
) -> Timeline:
    """The step of `predict_step` as tasks on the resources input, compute and link; its end is the step time.

    All workers do the same at the same time, so worker 0 stands for all. With prefetch the tasks on `input` are
    those of the next batch. Tasks that take no time are left out.
    """
    tasks: list[Task] = []

    def add(name: str, resource: str, start: float, seconds: float) -> float:
        if seconds > 0:
            tasks.append(Task(name, resource, 0, start, start + seconds))
        return start + seconds

    now = add("copy", "input", add("read", "input", 0.0, profile.t_io_s), profile.t_h2d_s)
    if schedule.prefetch and not shared_cores:
        now = 0.0
    for name, seconds in zip(profile.layers, profile.forward_s, strict=True):
        now = add(f"forward {name}", "compute", now, float(seconds))
    backward_start = now
    for name, seconds in zip(profile.layers[::-1], profile.backward_s[::-1], strict=True):
        now = add(f"backward {name}", "compute", now, float(seconds))
    sent = _sent(profile, schedule, workers, link)
    for name, start, seconds in zip(sent.names, sent.start_s, sent.time_s, strict=True):
        now = max(now, add(f"aggregate {name}", "link", backward_start + float(start), float(seconds)))
    add("update", "compute", now, profile.t_u_s)
    return Timeline("modelled", tuple(tasks))


def predict_table(
    profile: LayerProfile, schedules: Sequence[Schedule], workers: Sequence[int], link: Link
) -> pd.DataFrame:
    """One row a schedule and worker count: the step's terms, samples a second, speed-up and efficiency.

    Weak scaling (the batch of each worker stays): speed-up S = N t(1) / t(N), efficiency S / N (S-SGD, arXiv
    1711.05979). Columns: network, source, batch, link, schedule, prefetch, workers, those of `StepTime`,
    samples_per_s, speed_up, efficiency.
    """
    rows = []
    for schedule in schedules:
        one = predict_step(profile, schedule, 1, link).step_s
        for count in workers:
            step = predict_step(profile, schedule, count, link)
            rows.append(
                {
                    "network": profile.network,
                    "source": profile.source,
                    "batch": profile.batch,
                    "link": link.name,
                    "schedule": schedule.aggregation,
                    "prefetch": schedule.prefetch,
                    "workers": count,
                    **vars(step),
                    "samples_per_s": count * profile.batch / step.step_s,
                    "speed_up": count * one / step.step_s,
                    "efficiency": one / step.step_s,
                }
            )
    return pd.DataFrame(rows)


def _sent(profile: LayerProfile, schedule: Schedule, workers: int, link: Link) -> Aggregation:
    cost = ring(workers, link)
    if workers == 1:
        return Aggregation((), np.zeros(0), np.zeros(0))
    return aggregation(profile, schedule, cost)
