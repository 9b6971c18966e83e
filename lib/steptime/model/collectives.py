"""What an all-reduce costs: the ring over one link, and lines fitted to measured all-reduces. Seconds and bytes."""

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
    if workers < 1:
        raise InputError(f"workers = {workers}: must be at least 1; correct the number")
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
