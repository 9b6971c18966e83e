"""GradientFlow's coarse-grained sparse communication: the chunks with the largest gradients are sent, the others wait.

Sun et al., arXiv 1902.06855. Its lazy all-reduce is `merging.bucket_groups`.
"""

from dataclasses import dataclass

import numpy as np

from steptime.core.errors import InputError
from steptime.model.collectives import Cost

BYTES_A_NORM = 4


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
