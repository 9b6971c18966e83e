"""Steps of many workers on one machine over shaped links: what the processors and the links make of a schedule.

The measurements are `core.workers`': compute is replayed by waiting, gradients really travel. Three things limit a
message, and each is a number of this machine or of the link:

* the link: a token bucket. Bytes leave at its rate; after a pause `burst_bytes` leave at once. A pause between the
  rounds of a collective therefore costs no bandwidth as long as the bucket does not overflow.
* the way from process to process: `Host.round_s` a round. It is waking up, not work: other ranks' rounds take place
  meanwhile.
* the processors: work in proportion to messages and bytes of every rank, shared by `Host.cores`. Ranks that are more
  than the cores queue for them; where that takes longer than the waking up, it decides.

Fitted on few workers (`fit_host`), the same numbers give the step on more. Seconds and bytes.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize

from steptime.core.errors import InputError
from steptime.core.step import LayerProfile, Task, Timeline
from steptime.model.merging import Ends, layer_wise, messages
from steptime.model.step import AFTER_BACKWARD, sending_order

ALL_REDUCED = ("end_of_backward", "layers_after_backward", "wait_free", "buckets", "lazy", "merged")
SERVED = ("ps_central", "ps_sharded")
PREDICTED = (*ALL_REDUCED, *SERVED, "sufficient_factors")
"""Schedules that this model describes, without their values."""


@dataclass(frozen=True)
class ShapedLink:
    """A link held back by a token bucket: `alpha_s` there without waiting for tokens, `beta_s_per_byte` with."""

    alpha_s: float
    beta_s_per_byte: float
    burst_bytes: float


@dataclass(frozen=True)
class Host:
    """What communicating costs on a machine, of one rank with a core to itself.

    `round_s`: of a round of a collective beyond the link; `message_cpu_s`: processor time at one end of a message;
    `copy_s_per_byte`: of packing a message of several tensors and unpacking it; `sum_s_per_byte`: of adding and
    dividing what has come; `stagger`: of what a central server sends, the share that does not overlap with what comes
    in, since a reply waits for the slowest of the pushes.
    """

    cores: int
    round_s: float
    message_cpu_s: float
    copy_s_per_byte: float
    sum_s_per_byte: float
    stagger: float = 0.0

    def queueing(self, ranks: int) -> float:
        """How much longer `ranks` that all work at the same time take than one: they share the cores."""
        return max(1.0, ranks / self.cores)


@dataclass(frozen=True)
class Cell:
    """One schedule (without its value) on a number of workers over a link, its messages `ends`.

    `factor_bytes`: by layer in sending order, what a worker's sufficient factors are, infinite where there are none.
    """

    schedule: str
    workers: int
    ends: Ends
    link: ShapedLink | None
    factor_bytes: tuple[float, ...] = ()


@dataclass(frozen=True)
class Replayed:
    """What each worker waits through: a layer profile, and the step of a lone worker beyond it (`rest_s`)."""

    profile: LayerProfile
    rest_s: float = 0.0

    @property
    def forward_s(self) -> float:
        return self.profile.t_io_s + self.profile.t_h2d_s + self.profile.t_f_s


@dataclass(frozen=True)
class _Sent:
    """When each message is handed over and when its average is there, from the start of backward."""

    names: tuple[str, ...]
    start_s: np.ndarray
    end_s: np.ndarray


@dataclass(frozen=True)
class WorkerStep:
    """A predicted step: its seconds, what of it the exchange shows, and its tasks."""

    step_s: float
    exposed_s: float
    timeline: Timeline


def predict(replayed: Replayed, cell: Cell, host: Host) -> WorkerStep:
    """The step of `cell`. Raises InputError for a schedule that is not PREDICTED, or workers without a link."""
    profile = replayed.profile
    sent = _Sent((), np.zeros(0), np.zeros(0))
    if cell.workers > 1:
        sent = _exchanged(profile, cell, host)
    exposed_s = max(0.0, float(sent.end_s.max(initial=0.0)) - profile.t_b_s)
    forward_s, backward_s = replayed.forward_s, replayed.forward_s + profile.t_b_s
    step_s = backward_s + exposed_s + profile.t_u_s + replayed.rest_s
    tasks = [
        Task("forward", "device", 0, 0.0, forward_s, "forward"),
        Task("backward", "device", 0, forward_s, backward_s, "backward"),
        *(
            Task("exchange", "link", 0, forward_s + start, forward_s + end, "communicate", name)
            for name, start, end in zip(sent.names, sent.start_s, sent.end_s, strict=True)
        ),
        Task("update", "device", 0, backward_s + exposed_s, backward_s + exposed_s + profile.t_u_s, "update"),
    ]
    return WorkerStep(step_s, exposed_s, Timeline("simulated", tuple(tasks)))


def _exchanged(profile: LayerProfile, cell: Cell, host: Host) -> _Sent:
    if cell.schedule not in PREDICTED:
        raise InputError(f"schedule = {cell.schedule!r}: has no model; known are {', '.join(PREDICTED)}")
    if cell.link is None:
        raise InputError(f"{cell.schedule} on {cell.workers} workers: has no link; measure it over one")
    ready_s, n_bytes, names = sending_order(profile)
    ends = cell.ends or layer_wise(len(n_bytes))
    message_ready, sizes = messages(ready_s, n_bytes, ends)
    if cell.schedule in AFTER_BACKWARD:
        message_ready = np.full(len(ends), profile.t_b_s)
    firsts = (0, *ends[:-1])
    titles = tuple("+".join(names[first:end]) for first, end in zip(firsts, ends, strict=True))
    if cell.schedule in SERVED:
        serve = _central if cell.schedule == "ps_central" else _sharded
        start_s, end_s = serve(message_ready, sizes, cell, cell.link, host)
    else:
        merged = np.diff(ends, prepend=0) > 1
        start_s, end_s = _collectives(message_ready, sizes, merged, cell, cell.link, host)
    return _Sent(titles, start_s, end_s)


def _collectives(
    ready_s: np.ndarray, n_bytes: np.ndarray, is_merged: np.ndarray, cell: Cell, link: ShapedLink, host: Host
) -> tuple[np.ndarray, np.ndarray]:
    """One collective after the other on a thread that packs, exchanges and unpacks: starts and ends.

    A ring of N sends 2 (N - 1) / N n bytes a worker in 2 (N - 1) rounds (Patarasuk and Yuan, 2009); sufficient factors
    of f bytes go round in N - 1 rounds of f (a ring all-gather), where that is fewer bytes.
    """
    workers, queueing = cell.workers, host.queueing(cell.workers)
    sent, rounds = 2 * (workers - 1) / workers * n_bytes, np.full(len(n_bytes), 2.0 * (workers - 1))
    if cell.factor_bytes:
        factors = (workers - 1) * np.asarray(cell.factor_bytes)
        rounds = np.where(factors <= sent, workers - 1, rounds)
        n_bytes = np.where(factors <= sent, 0.0, n_bytes)
        sent = np.minimum(factors, sent)
    copied_s = queueing * host.copy_s_per_byte * n_bytes * is_merged / 2
    summed_s = queueing * host.sum_s_per_byte * n_bytes
    # a round is a message sent and one received
    rounds_s = rounds * (link.alpha_s + max(host.round_s, 2 * queueing * host.message_cpu_s))
    starts, ends = np.empty(len(n_bytes)), np.empty(len(n_bytes))
    bucket = _Bucket(link)
    free_s = 0.0
    for number in range(len(n_bytes)):
        starts[number] = max(free_s, ready_s[number])
        begun_s = starts[number] + copied_s[number]
        left_s = bucket.left_s(begun_s, sent[number], rounds_s[number])
        free_s = ends[number] = left_s + summed_s[number] + copied_s[number]
    return starts, ends


class _Bucket:
    """The tokens of one interface. They are as many as the burst at the start of a step, after the forward pass."""

    def __init__(self, link: ShapedLink) -> None:
        self._link, self._tokens, self._at_s = link, link.burst_bytes, 0.0

    def left_s(self, begun_s: float, n_bytes: float, least_s: float = 0.0) -> float:
        """When n bytes, handed over from `begun_s` on and during at least `least_s`, have left."""
        tokens = self._after(begun_s)
        left_s = begun_s + max(least_s, (n_bytes - tokens) * self._link.beta_s_per_byte)
        self._tokens, self._at_s = tokens, begun_s
        self._tokens = (
            self._after(left_s)
            if n_bytes == 0
            else min(self._link.burst_bytes, tokens + (left_s - begun_s) / self._link.beta_s_per_byte - n_bytes)
        )
        self._at_s = left_s
        return left_s

    def _after(self, moment_s: float) -> float:
        return min(self._link.burst_bytes, self._tokens + (moment_s - self._at_s) / self._link.beta_s_per_byte)


def _central(
    ready_s: np.ndarray, n_bytes: np.ndarray, cell: Cell, link: ShapedLink, host: Host
) -> tuple[np.ndarray, np.ndarray]:
    """All workers' pushes of a layer come in through the server's interface, all its replies go out through it."""
    workers = cell.workers
    busy_s = workers * host.message_cpu_s * host.queueing(workers + 1)
    into, out = _Bucket(link), _Bucket(link)
    come_s = left_s = 0.0
    ends = np.empty(len(n_bytes))
    for number, size in enumerate(n_bytes):
        come_s = into.left_s(max(come_s, ready_s[number]), workers * size, busy_s)
        summed_s = come_s + workers * size * host.sum_s_per_byte
        left_s = out.left_s(max(left_s, summed_s), workers * size, busy_s)
        ends[number] = left_s + 2 * (link.alpha_s + host.round_s)
    # over the step the replies fall behind the pushes
    late_s = host.stagger * workers * link.beta_s_per_byte * np.cumsum(n_bytes)
    return ready_s, ends + late_s


def _sharded(
    ready_s: np.ndarray, n_bytes: np.ndarray, cell: Cell, link: ShapedLink, host: Host
) -> tuple[np.ndarray, np.ndarray]:
    """Every node pushes (N - 1) / N of a layer, and as a server sends as much back once all pushes have come.

    One interface a node serves both as they come; all nodes are alike.
    """
    workers = cell.workers
    size = (workers - 1) / workers * n_bytes
    busy_s = workers * host.message_cpu_s * host.queueing(2 * workers)
    waiting = [(float(moment_s), number, False) for number, moment_s in enumerate(ready_s)]
    heapq.heapify(waiting)
    bucket, free_s = _Bucket(link), 0.0
    ends = np.empty(len(n_bytes))
    while waiting:
        moment_s, number, is_reply = heapq.heappop(waiting)
        free_s = bucket.left_s(max(free_s, moment_s), size[number], busy_s)
        arrived_s = free_s + link.alpha_s + host.round_s
        if is_reply:
            ends[number] = arrived_s
        else:
            summed_s = arrived_s + n_bytes[number] * host.sum_s_per_byte * host.queueing(2 * workers)
            heapq.heappush(waiting, (summed_s, number, True))
    return ready_s, ends


# ---------------------------------------------------------------------------------------------------------- fitting


@dataclass(frozen=True)
class Observed:
    """A measured cell: the median step."""

    replayed: Replayed
    cell: Cell
    step_s: float


FITTED = {"round_s": 3e-4, "copy_s_per_byte": 4e-10, "sum_s_per_byte": 2e-10, "stagger": 0.1}
"""What step times decide, each with where its search begins: some wake-ups, memory at a few GB/s, a tenth."""
PULL = 0.002
"""How strongly a number that the observations leave open is held near its typical one: a factor e counts as much as an
error of 0.2 % in one observation."""


def fit_host(observed: Sequence[Observed], cores: int, message_cpu_s: float) -> Host:
    """The host whose predictions of the `observed` steps have the smallest squared relative errors.

    The processor time of a message is given: on no more workers than cores, time does not tell it from waiting; the
    ranks' own accounts do. Raises InputError without cells of more than one worker.
    """
    many = [each for each in observed if each.cell.workers > 1]
    if not many:
        raise InputError("observed: has no step of more than one worker; nothing can be fitted")

    def host_of(logs: np.ndarray) -> Host:
        values = {name: typical * float(np.exp(log)) for (name, typical), log in zip(FITTED.items(), logs, strict=True)}
        return Host(cores, message_cpu_s=message_cpu_s, **values)

    def errors(logs: np.ndarray) -> np.ndarray:
        host = host_of(logs)
        found = [np.log(predict(each.replayed, each.cell, host).step_s / each.step_s) for each in many]
        return np.concatenate([found, PULL * logs])

    best = optimize.least_squares(errors, np.zeros(len(FITTED)), diff_step=1e-3)
    return host_of(best.x)


def relative_errors(observed: Sequence[Observed], host: Host) -> np.ndarray:
    """predicted / measured - 1 of each."""
    return np.array([predict(each.replayed, each.cell, host).step_s / each.step_s - 1 for each in observed])


def with_rest(replayed: Replayed, lone_step_s: float) -> Replayed:
    """`replayed` with what a lone worker's measured step has beyond the profile."""
    plain = replace(replayed, rest_s=0.0)
    profile = plain.profile
    return replace(plain, rest_s=lone_step_s - (plain.forward_s + profile.t_b_s + profile.t_u_s))
