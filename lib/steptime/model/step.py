"""The S-SGD step model: from layer profile, schedule, workers and link to the seconds of one step.

Symbols as in Shi, Wang and Chu, arXiv 1711.05979: t_io read and decode, t_h2d copy to the device, t_f forward,
t_b backward, t_c aggregation, t_u update; t_c_no is the part of t_c that backward does not hide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from steptime.core.machine import Link
from steptime.core.step import LayerProfile, Schedule
from steptime.model import merging
from steptime.model.collectives import Cost, ring

AFTER_BACKWARD = ("end_of_backward", "layers_after_backward")
"""The aggregations that begin once the whole backward pass is done."""


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


@dataclass(frozen=True)
class Messages:
    """The messages of one step in sending order: what is in each, the position in sending order of its last gradient,
    the first moment it may be sent (from the start of backward), and the bytes that travel."""

    names: tuple[str, ...]
    last: np.ndarray
    ready_s: np.ndarray
    n_bytes: np.ndarray


def messages(profile: LayerProfile, schedule: Schedule, cost: Cost) -> Messages:
    """Gradients into messages. `cost` is what the merging rules weigh.

    end_of_backward: one message after the whole backward pass; layers_after_backward: one a layer, all after it;
    wait_free: one a layer, as soon as it is ready; merged: the contiguous grouping that ends earliest
    (`merging.optimal_groups`); published_merge: MG-WFBP's rule; buckets: closed once full (`merging.bucket_groups`).
    """
    ready, n_bytes, names = sending_order(profile)
    ends = _grouping(schedule, ready, n_bytes, cost)
    message_ready, sizes = merging.messages(ready, n_bytes, ends)
    if schedule.aggregation in AFTER_BACKWARD:
        message_ready = np.full(len(ends), profile.t_b_s)
    groups = [names[first:end] for first, end in zip((0, *ends), ends, strict=False)]
    titles = tuple(group[0] if len(group) == 1 else f"{group[0]} … {group[-1]}" for group in groups)
    return Messages(titles, np.array(ends, dtype=int) - 1, message_ready, sizes)


def _grouping(schedule: Schedule, ready_s: np.ndarray, n_bytes: np.ndarray, cost: Cost) -> merging.Ends:
    if schedule.aggregation == "end_of_backward":
        return merging.one_message(len(ready_s))
    if schedule.aggregation == "merged":
        return merging.optimal_groups(ready_s, n_bytes, cost)
    if schedule.aggregation == "published_merge":
        return merging.published_groups(ready_s, n_bytes, cost)
    if schedule.aggregation == "buckets":
        return merging.bucket_groups(n_bytes, schedule.bucket_bytes)
    return merging.layer_wise(len(ready_s))


def aggregation(profile: LayerProfile, schedule: Schedule, cost: Cost) -> Aggregation:
    """When the gradients are aggregated: `messages` one after the other on one link."""
    sent = messages(profile, schedule, cost)
    times = cost.time_s(sent.n_bytes)
    return Aggregation(sent.names, merging.start_times(sent.ready_s, times), times)


def predict_step(
    profile: LayerProfile, schedule: Schedule, workers: int, link: Link, *, shared_cores: bool = False
) -> StepTime:
    """The seconds of one synchronous step of `workers`, each with its own input and `profile`, on a ring of `link`.

    Sequential: t = t_io + t_h2d + t_f + t_b + t_c_no + t_u. With prefetch the next batch is read and copied
    meanwhile: t = max(t_io + t_h2d, t_f + t_b + t_c_no + t_u); k loaders divide t_io (with their copy, where they
    copy) by k, a copy engine of its own makes it max(t_io, t_h2d, …), a copy by the device max(t_io, t_h2d + …). With
    `shared_cores` reading and computing use the same
    cores, so prefetch hides nothing and the sum holds again. t_c_no = max(0, end of the last message - t_b); one
    worker sends nothing. (S-SGD, arXiv 1711.05979, iteration time on one and on N devices; wait-free
    back-propagation: t_c_no = tau_c[1] + t_c[1] - tau_b[1] - t_b[1].)
    """
    sent = _sent(profile, schedule, workers, link)
    exposed = max(0.0, sent.end_s - profile.t_b_s)
    computing = profile.t_f_s + profile.t_b_s + exposed + profile.t_u_s
    if schedule.prefetch and not shared_cores:
        step = _with_prefetch(schedule, profile.t_io_s, profile.t_h2d_s, computing)
    else:
        step = profile.t_io_s + profile.t_h2d_s + computing
    return StepTime(
        t_io_s=profile.t_io_s,
        t_h2d_s=profile.t_h2d_s,
        t_f_s=profile.t_f_s,
        t_b_s=profile.t_b_s,
        t_c_s=float(sent.time_s.sum()),
        t_c_no_s=exposed,
        t_u_s=profile.t_u_s,
        step_s=step,
        messages=len(sent.names),
    )


def _with_prefetch(schedule: Schedule, t_io_s: float, t_h2d_s: float, computing_s: float) -> float:
    if schedule.copy == "own_engine":
        return max(t_io_s / schedule.loaders, t_h2d_s, computing_s)
    if schedule.copy == "with_compute":
        return max(t_io_s / schedule.loaders, t_h2d_s + computing_s)
    return max((t_io_s + t_h2d_s) / schedule.loaders, computing_s)


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


def pipeline_step_s(t_f_s: float, t_b_s: float, stages: int, microbatches: int) -> float:
    """One step of `stages` equal pipeline stages, free sends, 1F1B: (m + p - 1)(t_f + t_b), t of a stage and a
    microbatch; the bubble is the p - 1 of it (PipeDream, arXiv 1806.03377; GPipe, arXiv 1811.06965, bubble time)."""
    return (microbatches + stages - 1) * (t_f_s + t_b_s)


def local_sgd_step_s(compute_s: float, average_s: float, local_steps: int) -> float:
    """The mean step where the parameters are averaged every `local_steps` steps: t + T/H (Stich, arXiv 1805.09767)."""
    return compute_s + average_s / local_steps


def overlap_bound_s(t_f_s: float, t_b_s: float, t_c_s: float) -> float:
    """The step with perfect overlap of t_c and t_b: t_f + t_b + t_c - min(t_b, t_c); no wait-free step is shorter."""
    return t_f_s + t_b_s + t_c_s - min(t_b_s, t_c_s)
