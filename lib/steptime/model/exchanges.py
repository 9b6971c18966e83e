"""How one message of gradients gets from every worker to every worker, as stages on resources.

Each exchange says what its stages are, `stages(n_bytes)`, and what a whole one costs, `cost`, which the merging rules
weigh. Two stages of different messages overlap where they use different resources. Seconds and bytes.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from steptime.core.errors import InputError
from steptime.core.machine import Link
from steptime.model.collectives import Cost, Stages, hierarchical, ring
from steptime.model.parameter_server import ParameterServer
from steptime.model.sparse import Sparse


@dataclass(frozen=True)
class Stage:
    """One part of an exchange; `time_s` has an entry a message.

    `scope`: "all", one task for all workers, begun when all are ready; "each", one task a worker on its own resource;
    "queue", one task a worker on a common resource, first come first served, `time_s` of one worker. `shared`: another
    stage uses the same resource, so that it serves them as they come. `chosen_s`: how long the resource first waits for
    each message to be chosen (compressed).
    """

    resource: str
    time_s: np.ndarray
    scope: str = "all"
    shared: bool = False
    chosen_s: np.ndarray | None = None


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
class SparseCollective:
    """A sparse all-reduce: what is sent is chosen first, and the link waits for it (`sparse.Sparse`)."""

    workers: int
    cost: Sparse

    def stages(self, n_bytes: np.ndarray) -> list[Stage]:
        sent = self.cost.dense.time_s((1 - self.cost.sparsity) * n_bytes)
        return [Stage("link", sent, chosen_s=self.cost.time_s(n_bytes) - sent)]


@dataclass(frozen=True)
class CentralServer:
    """One parameter server with a node of its own: every worker's push comes in one after the other, and once all are
    there the sums go out one after the other. `message` is what one costs between two nodes, both directions at once.

    On an idle server the 2 N messages of `parameter_server.ParameterServer`: it grows with the workers.
    """

    workers: int
    message: Cost

    @property
    def cost(self) -> Cost:
        return ParameterServer(self.workers, 1, self.message, shared_nodes=False)

    def stages(self, n_bytes: np.ndarray) -> list[Stage]:
        one = self.message.time_s(n_bytes)
        return [Stage("server in", one, "queue"), Stage("server out", one * self.workers)]


@dataclass(frozen=True)
class ShardedServer:
    """Every node is a worker and the server of 1/N of each message: N - 1 pushes of n/N a node, and as many pulls.

    `parameter_server.ParameterServer` with as many servers as workers, whose two phases of different messages take
    turns on a node's interface. As many bytes as a ring's.
    """

    workers: int
    message: Cost

    @property
    def cost(self) -> Cost:
        return ParameterServer(self.workers, self.workers, self.message)

    def stages(self, n_bytes: np.ndarray) -> list[Stage]:
        half = self.cost.time_s(n_bytes) / 2
        return [Stage("nic", half, "each", shared=True), Stage("nic", half, "each", shared=True)]


@dataclass(frozen=True)
class SufficientFactors:
    """A sharded server, or, for a dense layer for which that is fewer bytes, broadcasts of sufficient factors.

    `factor_bytes`: the bytes of one worker's vectors, batch x (rows + columns) values, in sending order; infinite for a
    layer that has none. A worker then sends them to N - 1 others. (Poseidon's HybComm, arXiv 1706.03292; rebuilding the
    gradient is not counted.) For schedules that send a message a layer.
    """

    workers: int
    message: Cost
    factor_bytes: np.ndarray

    @property
    def cost(self) -> Cost:
        return ShardedServer(self.workers, self.message).cost

    def by_factors(self, n_bytes: np.ndarray) -> np.ndarray:
        """Which messages travel as factors: `sufficient_factors.is_factored` with a server on every node, in bytes."""
        if len(n_bytes) != len(self.factor_bytes):
            raise InputError(
                f"sufficient factors: {len(self.factor_bytes)} layers for {len(n_bytes)} messages: "
                "needs a schedule that sends a message a layer"
            )
        return self.factor_bytes <= 2 * n_bytes / self.workers

    def stages(self, n_bytes: np.ndarray) -> list[Stage]:
        factors = self.by_factors(n_bytes)
        push, pull = ShardedServer(self.workers, self.message).stages(n_bytes)
        broadcast = (self.workers - 1) * self.message.time_s(np.where(factors, self.factor_bytes, 0.0))
        return [
            Stage("nic", np.where(factors, broadcast, push.time_s), "each", shared=True),
            Stage("nic", np.where(factors, 0.0, pull.time_s), "each", shared=True),
        ]


@dataclass(frozen=True)
class Hierarchical:
    """Reduced to a leader in each node, all-reduced among the leaders, broadcast in the node: ChainerMN's communicator,
    `collectives.hierarchical`. `intra` and `inter` are what a message costs inside a node and between nodes; the node's
    bus serves reductions and broadcasts as they come."""

    nodes: int
    per_node: int
    intra: Cost
    inter: Cost

    @property
    def workers(self) -> int:
        return self.nodes * self.per_node

    @property
    def cost(self) -> Stages:
        return hierarchical(self.per_node, self.nodes, self.intra, self.inter)

    def stages(self, n_bytes: np.ndarray) -> list[Stage]:
        (inside, _), (leaders, _) = self.cost.parts
        one_way = inside.time_s(n_bytes) / 2
        return [
            Stage("bus", one_way, shared=True),
            Stage("link", leaders.time_s(n_bytes)),
            Stage("bus", one_way, shared=True),
        ]
