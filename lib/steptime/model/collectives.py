"""What an all-reduce costs: algorithms as rounds of messages, two levels of links, lines and curves of measurements.

Seconds and bytes. Everything that has `a_s` and `time_s` is a `Cost`: a message, a measured curve, a whole collective.
"""

from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np

from steptime.core.errors import InputError
from steptime.core.machine import Link


class Cost(Protocol):
    """Time of one all-reduce as a function of its bytes; `a_s` is what a message costs however small."""

    @property
    def a_s(self) -> float: ...

    @overload
    def time_s(self, n_bytes: float) -> float: ...
    @overload
    def time_s(self, n_bytes: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class AllReduce:
    """A whole all-reduce over a fixed set of workers: a_s + b_s_per_byte * n_bytes (MG-WFBP's T = a + b M)."""

    a_s: float
    b_s_per_byte: float

    def time_s(self, n_bytes):  # type: ignore[no-untyped-def]
        return self.a_s + self.b_s_per_byte * n_bytes


@dataclass(frozen=True)
class Piecewise:
    """Two lines: `small` below `switch_bytes`, `large` from there on (MPI changes its algorithm with the size)."""

    small: AllReduce
    large: AllReduce
    switch_bytes: float

    @property
    def a_s(self) -> float:
        return self.small.a_s

    def time_s(self, n_bytes):  # type: ignore[no-untyped-def]
        times = np.where(
            np.asarray(n_bytes) < self.switch_bytes, self.small.time_s(n_bytes), self.large.time_s(n_bytes)
        )
        return times if np.ndim(n_bytes) else float(times)


def ring(workers: int, link: Link) -> AllReduce:
    """The ring all-reduce of `workers` over `link`: 2(N-1) rounds, each of n/N bytes a worker; nothing for one.

    a = 2(N-1) alpha, b = 2(N-1)/N beta (MG-WFBP, arXiv 1811.11141, table of all-reduce costs, without its
    reduction term gamma). Raises InputError for fewer than one worker.
    """
    _check_workers(workers)
    return AllReduce(2 * (workers - 1) * link.alpha_s, 2 * (workers - 1) / workers * link.beta_s_per_byte)


def ring_time_s(n_bytes: float, workers: int, link: Link) -> float:
    """Seconds of one ring all-reduce of `n_bytes`: 2(N-1) alpha + 2(N-1)/N n beta; 0 for one worker."""
    return ring(workers, link).time_s(n_bytes)


def ring_link(name: str, measured: AllReduce, workers: int, source: str) -> Link:
    """The link whose ring over `workers` costs `measured`: the inverse of `ring`. Needs two workers or more."""
    if workers < 2:
        raise InputError(f"workers = {workers}: one worker sends nothing; a link needs at least 2")
    rounds = 2 * (workers - 1)
    return Link(
        name=name,
        alpha_s=measured.a_s / rounds,
        beta_s_per_byte=measured.b_s_per_byte * workers / rounds,
        source=source,
    )


@dataclass(frozen=True)
class Rounds:
    """A collective as rounds of equal messages, each `count` times a `share` of the bytes: sum of count T(share n).

    `message` is what one message costs between two workers; `flows` of them share the interface at a time, so each
    lasts as long as all their bytes. With a line T = alpha + beta n this is a + b n, without one (a switch of
    protocol, a floor of latency) it is what the message sizes of that algorithm make of it.
    """

    message: Cost
    rounds: tuple[tuple[int, float], ...]
    flows: int = 1

    @property
    def a_s(self) -> float:
        return sum(count for count, _ in self.rounds) * self.message.a_s

    def time_s(self, n_bytes):  # type: ignore[no-untyped-def]
        bytes_ = np.asarray(n_bytes, dtype=float)
        total = np.zeros(bytes_.shape)
        for count, share in self.rounds:
            total = total + count * self.message.time_s(bytes_ * (share * self.flows))
        return total if np.ndim(n_bytes) else float(total)


@dataclass(frozen=True)
class Stages:
    """One collective after the other, each with its `share` of the bytes (two-level collectives)."""

    parts: tuple[tuple[Cost, float], ...]

    @property
    def a_s(self) -> float:
        return sum(cost.a_s for cost, _ in self.parts)

    def time_s(self, n_bytes):  # type: ignore[no-untyped-def]
        bytes_ = np.asarray(n_bytes, dtype=float)
        total = np.zeros(bytes_.shape)
        for cost, share in self.parts:
            total = total + cost.time_s(bytes_ * share)
        return total if np.ndim(n_bytes) else float(total)


@dataclass(frozen=True)
class Floored:
    """`cost`, but never less than `floor_s`: small messages take as long as an empty one (Lin et al., arXiv 2404.12674,
    the first segment of their collectives' curve)."""

    cost: Cost
    floor_s: float

    @property
    def a_s(self) -> float:
        return max(self.floor_s, self.cost.a_s)

    def time_s(self, n_bytes):  # type: ignore[no-untyped-def]
        times = np.maximum(self.floor_s, self.cost.time_s(n_bytes))
        return times if np.ndim(n_bytes) else float(times)


@dataclass(frozen=True)
class Curve:
    """Measured times between the measured sizes (ascending), straight lines from point to point; `beyond` from the
    largest on; below the smallest, the smallest one's time."""

    n_bytes: tuple[float, ...]
    times_s: tuple[float, ...]
    beyond: Cost

    @property
    def a_s(self) -> float:
        return self.times_s[0]

    def time_s(self, n_bytes):  # type: ignore[no-untyped-def]
        bytes_ = np.asarray(n_bytes, dtype=float)
        measured = np.interp(bytes_, self.n_bytes, self.times_s)
        times = np.where(bytes_ <= self.n_bytes[-1], measured, self.beyond.time_s(bytes_))
        return times if np.ndim(n_bytes) else float(times)


def line(link: Link) -> AllReduce:
    """One message over `link`: alpha + beta n."""
    return AllReduce(link.alpha_s, link.beta_s_per_byte)


def eager_rendezvous(link: Link, switch_bytes: float, handshake_s: float) -> Piecewise:
    """One message over `link`; from `switch_bytes` on sender and receiver first agree, which costs `handshake_s`.

    An MPI library sends small messages at once into a buffer of the receiver (eager), large ones after a handshake
    (rendezvous). Since the chunks of a ring are n / N, the jump in an all-reduce of N workers is at N switch_bytes.
    """
    return Piecewise(
        AllReduce(link.alpha_s, link.beta_s_per_byte),
        AllReduce(link.alpha_s + handshake_s, link.beta_s_per_byte),
        switch_bytes,
    )


ALGORITHMS = ("ring", "tree", "double_tree", "recursive_doubling", "halving_doubling", "all_to_all")


def all_reduce(algorithm: str, workers: int, message: Cost, *, flows: int = 1) -> Rounds:
    """An all-reduce of `workers` in messages that cost `message`; nothing for one worker.

    N workers, n bytes, k = ceil(log2 N), P the largest power of two in N; every link full duplex:

    * ring: 2(N-1) rounds of n/N (Patarasuk & Yuan 2009), 2(N-1) alpha + 2(N-1)/N n beta
    * tree: a binomial tree up and down, 2k (alpha + n beta) (FireCaffe, arXiv 1511.00175, reduction tree; Paleo)
    * double_tree: two binary trees, half of the bytes each, a worker inner in one and leaf in the other, in the limit
      of fine pipelining (Sanders, Speck & Träff 2009; NCCL): 2k alpha + 2 n beta, and n beta for two workers, where
      each is the root of one
    * recursive_doubling: k exchanges of n, k (alpha + n beta), and for other N than a power of two one message before
      and one after, 2 (alpha + n beta) more (Thakur, Rabenseifner & Gropp 2005)
    * halving_doubling: 2 log2 P rounds of n/2, n/4 ... n/P, 2 log2 P alpha + 2(P-1)/P n beta, the same two messages
      more for other N (Rabenseifner; ibid.)
    * all_to_all: every worker sends each other one its part, sums, and sends the sum back: 2(N-1) messages of n/N, as
      many bytes as the ring (ChainerMN's communicators)

    Raises InputError for an unknown algorithm or fewer than one worker.
    """
    _check_workers(workers)
    if workers == 1:
        return Rounds(message, (), flows)
    levels, power = (workers - 1).bit_length(), 1 << (workers.bit_length() - 1)
    fold = () if power == workers else ((2, 1.0),)
    rounds: tuple[tuple[int, float], ...]
    match algorithm:
        case "ring" | "all_to_all":
            rounds = ((2 * (workers - 1), 1 / workers),)
        case "tree":
            rounds = ((2 * levels, 1.0),)
        case "double_tree":
            # the pipelined bytes fill the rounds evenly
            rounds = ((2 * levels, (1.0 if workers > 2 else 0.5) / levels),)
        case "recursive_doubling":
            rounds = ((power.bit_length() - 1, 1.0), *fold)
        case "halving_doubling":
            rounds = (*((2, 0.5**step) for step in range(1, power.bit_length())), *fold)
        case _:
            raise InputError(f"algorithm = {algorithm!r}: unknown; known are {', '.join(ALGORITHMS)}")
    return Rounds(message, rounds, flows)


def hierarchical(local: int, nodes: int, intra: Cost, inter: Cost, *, algorithm: str = "ring") -> Stages:
    """An all-reduce over `nodes` of `local` devices each, one leader a node: reduce to it, all-reduce of the leaders,
    broadcast (ChainerMN, arXiv 1710.11351, its communicator `hierarchical`).

    Inside a node reduce and broadcast are pipelined along a chain: local - 1 messages' latency and n beta each. Between
    nodes all n bytes of a node pass its interface once each way, however many devices it has.
    """
    _check_workers(local, "local")
    _check_workers(nodes, "nodes")
    inside = Rounds(intra, ((2 * (local - 1), 1 / max(1, local - 1)),) if local > 1 else ())
    return Stages(((inside, 1.0), (all_reduce(algorithm, nodes, inter), 1.0)))


def two_dimensional(
    local: int, nodes: int, intra: Cost, inter: Cost, *, interfaces: int = 1, algorithm: str = "ring"
) -> Stages:
    """An all-reduce over `nodes` of `local` devices: reduce-scatter inside the nodes, all-reduce of each device's part
    between them, all-gather (ChainerMN's `two_dimensional`; NCCL's intra-node first).

    Inside: 2(local - 1) messages of n / local. Between: local all-reduces of n / local at a time, which share
    `interfaces` network interfaces, so that ceil(local / interfaces) flows go through each. Raises InputError for
    counts below one.
    """
    _check_workers(local, "local")
    _check_workers(nodes, "nodes")
    _check_workers(interfaces, "interfaces")
    flows = -(-local // interfaces)
    inside = all_reduce("ring", local, intra)
    return Stages(((inside, 1.0), (all_reduce(algorithm, nodes, inter, flows=flows), 1 / local)))


def _check_workers(count: int, name: str = "workers") -> None:
    if count < 1:
        raise InputError(f"{name} = {count}: must be at least 1; correct the number")
