"""How one message of gradients gets from every worker to every worker, as stages on resources.

Each exchange says what its stages are, `stages(n_bytes)`, and what a whole one costs, `cost`, which the merging rules
weigh. Two stages of different messages overlap where they use different resources. Seconds and bytes.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from steptime.core.errors import InputError
from steptime.core.machine import Link
from steptime.model.collectives import AllReduce, Cost, ring


@dataclass(frozen=True)
class Stage:
    """One part of an exchange; `time_s` has an entry a message.

    `scope`: "all", one task for all workers, begun when all are ready; "each", one task a worker on its own resource;
    "queue", one task a worker on a common resource, first come first served, `time_s` of one worker. `shared`: another
    stage uses the same resource, so that it serves them as they come.
    """

    resource: str
    time_s: np.ndarray
    scope: str = "all"
    shared: bool = False


class Exchange(Protocol):
    """What `schedules.step_graph` needs of an exchange among `workers`."""

    @property
    def workers(self) -> int: ...
    @property
    def cost(self) -> Cost: ...
    def stages(self, n_bytes: np.ndarray) -> list[Stage]: ...


@dataclass(frozen=True)
class Collective:
    """An all-reduce that keeps every worker's link for `cost.time_s(n)`, whatever its algorithm."""

    workers: int
    cost: Cost

    def stages(self, n_bytes: np.ndarray) -> list[Stage]:
        return [Stage("link", self.cost.time_s(n_bytes))]


def ring_exchange(workers: int, link: Link) -> Collective:
    """The ring all-reduce over equal links, `collectives.ring`."""
    return Collective(workers, ring(workers, link))


@dataclass(frozen=True)
class CentralServer:
    """One parameter server with a full-duplex link: every worker's push comes in one after the other, and once all
    have, the sums go out one after the other. `request_s`: what handling a message costs the server (a copy, a thread).

    A message takes 2 N (alpha + n beta) on an idle server: it grows with the workers (Paleo's and Poseidon's central
    server, Qi et al. 2017; Zhang et al., arXiv 1706.03292).
    """

    workers: int
    link: Link
    request_s: float = 0.0

    @property
    def cost(self) -> AllReduce:
        return AllReduce(
            2 * self.workers * (self.link.alpha_s + self.request_s), 2 * self.workers * self.link.beta_s_per_byte
        )

    def stages(self, n_bytes: np.ndarray) -> list[Stage]:
        one = self.request_s + self.link.alpha_s + n_bytes * self.link.beta_s_per_byte
        return [Stage("server in", one, "queue"), Stage("server out", one * self.workers)]


@dataclass(frozen=True)
class ShardedServer:
    """Every node is worker and server of 1/N of each message: N - 1 pushes of n/N, and as many pulls, a node.

    Per node 2 n (N - 1) / N bytes go out, Poseidon's 2 M N (P1 + P2 - 2) / P2 of in and out with P1 = P2 (Zhang et
    al., arXiv 1706.03292, table of communication costs); as much as a ring sends.
    """

    workers: int
    link: Link
    request_s: float = 0.0

    @property
    def cost(self) -> AllReduce:
        messages, share = 2 * (self.workers - 1), 1 / self.workers
        return AllReduce(messages * (self.link.alpha_s + self.request_s), messages * share * self.link.beta_s_per_byte)

    def stages(self, n_bytes: np.ndarray) -> list[Stage]:
        half = self.cost.time_s(n_bytes) / 2
        return [Stage("nic", half, "each", shared=True), Stage("nic", half, "each", shared=True)]


@dataclass(frozen=True)
class SufficientFactors:
    """A sharded server, or, for a layer for which that is fewer bytes, broadcasts of sufficient factors.

    The gradient of a dense layer is a sum of outer products u v', one a sample: `factor_bytes[l]` are the bytes of all
    u and v of one worker's mini-batch, in sending order, infinite where a layer has none. A worker then sends them to
    N - 1 others. (Poseidon's HybComm, Zhang et al., arXiv 1706.03292, BestScheme.) Rebuilding the gradient is not
    counted. For schedules that send a message a layer.
    """

    workers: int
    link: Link
    factor_bytes: np.ndarray

    @property
    def cost(self) -> AllReduce:
        return ShardedServer(self.workers, self.link).cost

    def by_factors(self, n_bytes: np.ndarray) -> np.ndarray:
        """Which messages travel as factors: K (M + N) (P - 1) <= 2 M N (P - 1) / P."""
        if len(n_bytes) != len(self.factor_bytes):
            raise InputError(
                f"sufficient factors: {len(self.factor_bytes)} layers for {len(n_bytes)} messages: "
                "needs a schedule that sends a message a layer"
            )
        return self.factor_bytes <= 2 * n_bytes / self.workers

    def stages(self, n_bytes: np.ndarray) -> list[Stage]:
        factors = self.by_factors(n_bytes)
        push, pull = ShardedServer(self.workers, self.link).stages(n_bytes)
        sent = np.where(factors, self.factor_bytes, 0.0)
        broadcast = (self.workers - 1) * (self.link.alpha_s + sent * self.link.beta_s_per_byte)
        return [
            Stage("nic", np.where(factors, broadcast, push.time_s), "each", shared=True),
            Stage("nic", np.where(factors, 0.0, pull.time_s), "each", shared=True),
        ]


@dataclass(frozen=True)
class Hierarchical:
    """Reduced to a leader in each node, exchanged among the leaders, broadcast in the node.

    In a node of `per_node` workers each way n beta + (g - 1) alpha of `inside`; among leaders 2((n - 1) alpha +
    (n - 1)/n bytes beta) of `link` (ChainerMN's hierarchical communicator, Akiba, Fukuda, Suzuki, arXiv 1710.11351).
    """

    nodes: int
    per_node: int
    link: Link
    inside: Link

    @property
    def workers(self) -> int:
        return self.nodes * self.per_node

    @property
    def cost(self) -> AllReduce:
        leaders, inside = ring(self.nodes, self.link), self._inside
        return AllReduce(leaders.a_s + 2 * inside.a_s, leaders.b_s_per_byte + 2 * inside.b_s_per_byte)

    @property
    def _inside(self) -> AllReduce:
        if self.per_node == 1:
            return AllReduce(0.0, 0.0)
        return AllReduce((self.per_node - 1) * self.inside.alpha_s, self.inside.beta_s_per_byte)

    def stages(self, n_bytes: np.ndarray) -> list[Stage]:
        inside = self._inside.time_s(n_bytes)
        return [
            Stage("bus", inside, shared=True),
            Stage("link", ring(self.nodes, self.link).time_s(n_bytes)),
            Stage("bus", inside, shared=True),
        ]
