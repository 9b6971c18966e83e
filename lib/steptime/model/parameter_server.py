"""What synchronising through parameter servers costs: push all gradients, pull all weights. Seconds and bytes."""

from dataclasses import dataclass

import numpy as np

from steptime.core.errors import InputError
from steptime.model.collectives import Cost


@dataclass(frozen=True)
class ParameterServer:
    """`workers` push n bytes to `servers` that hold n / servers each, then pull as many; full duplex, all at once.

    The busiest interface decides each of the two phases. `shared_nodes`: every server runs on a worker's node and its
    own worker's part stays there (Poseidon, arXiv 1706.03292: 2 M (P1 + P2 - 2) / P2 bytes in and out of such a node);
    otherwise servers have nodes of their own.

    * a server with a node of its own: `workers` messages of n / servers (a worker sends `servers` of them)
    * shared: workers - 1 of them; in the same phase the node sends servers - 1 as a worker, never more

    One server is the central one: 2 N (alpha + n beta), shared 2 (N - 1)(alpha + n beta) (FireCaffe, arXiv 1511.00175,
    counts the phase that a server receives; Paleo both).
    """

    workers: int
    servers: int
    message: Cost
    shared_nodes: bool = True

    def __post_init__(self) -> None:
        for name in ("workers", "servers"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)}: must be at least 1; correct the number")
        if self.shared_nodes and self.servers > self.workers:
            raise InputError(
                f"servers = {self.servers}: more than {self.workers} workers whose nodes they share; lower it"
            )

    @property
    def messages_a_phase(self) -> int:
        """Messages through the busiest interface, in one direction."""
        if not self.shared_nodes:
            return max(self.workers, self.servers)
        return self.workers - 1

    @property
    def a_s(self) -> float:
        return 2 * self.messages_a_phase * self.message.a_s

    def time_s(self, n_bytes):  # type: ignore[no-untyped-def]
        part = np.asarray(n_bytes, dtype=float) / self.servers
        times = 2 * self.messages_a_phase * np.asarray(self.message.time_s(part))
        return times if np.ndim(n_bytes) else float(times)
