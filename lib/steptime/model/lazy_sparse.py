"""GradientFlow's two ways to send less often and less: lazy all-reduce and coarse-grained sparse communication.

Sun et al., arXiv 1902.06855. Sending order as in `model.merging`: the network's last layer first.
"""

from dataclasses import dataclass

import numpy as np

from steptime.core.errors import InputError
from steptime.model.collectives import Cost
from steptime.model.merging import Ends

BYTES_A_NORM = 4


def lazy_groups(n_bytes: np.ndarray, threshold_bytes: float) -> Ends:
    """Lazy all-reduce: gradients gather in one pool and leave as soon as more than `threshold_bytes` wait, the rest at
    the end of backward. 0: every gradient its own message. Raises InputError for a negative threshold."""
    if not threshold_bytes >= 0:
        raise InputError(f"threshold_bytes = {threshold_bytes}: must be 0 or more; correct the number")
    ends: list[int] = []
    waiting = 0.0
    for place, size in enumerate(n_bytes, start=1):
        waiting += float(size)
        if waiting > threshold_bytes:
            ends.append(place)
            waiting = 0.0
    if waiting or (len(n_bytes) and not ends):
        ends.append(len(n_bytes))
    return tuple(ends)


@dataclass(frozen=True)
class Sparse:
    """Coarse-grained sparse communication of what `dense` all-reduces: chunks of `chunk_bytes`, all workers agree on
    the share 1 - `sparsity` of them with the largest norms, and only those are summed.

    T(n) = dense(4 bytes a chunk) + select_s + dense((1 - sparsity) n): the norms' all-reduce, choosing and packing, and
    the chosen chunks' all-reduce. Raises InputError for a sparsity outside 0 <= s < 1 or an empty chunk.
    """

    dense: Cost
    sparsity: float
    chunk_bytes: float
    select_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise InputError(f"sparsity = {self.sparsity}: must be at least 0 and below 1; correct the number")
        if not self.chunk_bytes > 0:
            raise InputError(f"chunk_bytes = {self.chunk_bytes}: must be above 0; correct the number")

    @property
    def a_s(self) -> float:
        return 2 * self.dense.a_s + self.select_s

    def time_s(self, n_bytes):  # type: ignore[no-untyped-def]
        bytes_ = np.asarray(n_bytes, dtype=float)
        norms = self.dense.time_s(BYTES_A_NORM * np.ceil(bytes_ / self.chunk_bytes))
        times = norms + self.select_s + self.dense.time_s((1 - self.sparsity) * bytes_)
        return times if np.ndim(n_bytes) else float(times)
