"""Sufficient factors: a dense layer's gradient is a sum of outer products, which may be fewer bytes than their sum.

Poseidon (Zhang et al., arXiv 1706.03292): a dense layer of `rows` x `columns` weights and a batch of `batch` samples a
worker can broadcast `batch` pairs of vectors instead of the matrix. Counts are values in and out of one node that is
worker and server; multiply by the bytes of a value.
"""

from steptime.core.errors import InputError


def server_values(rows: int, columns: int, workers: int, servers: int) -> float:
    """Sharded parameter server: 2 M N (P1 + P2 - 2) / P2."""
    return 2 * rows * columns * (workers + servers - 2) / servers


def factor_values(rows: int, columns: int, batch: int, workers: int) -> int:
    """Sufficient-factor broadcasting: 2 K (P1 - 1)(M + N)."""
    return 2 * batch * (workers - 1) * (rows + columns)


def is_factored(rows: int, columns: int, batch: int, workers: int, servers: int) -> bool:
    """Poseidon's best scheme for a dense layer: factors where they are no more values than the server's."""
    return factor_values(rows, columns, batch, workers) <= server_values(rows, columns, workers, servers)


def switch_workers(rows: int, columns: int, batch: int) -> float:
    """The number of workers, each a server too, from which on the server is better: 2 M N / (K (M + N)).

    From 2 K (P - 1)(M + N) = 2 M N (2 P - 2) / P. Raises InputError for a batch below one.
    """
    if batch < 1:
        raise InputError(f"batch = {batch}: must be at least 1; correct the number")
    return 2 * rows * columns / (batch * (rows + columns))
