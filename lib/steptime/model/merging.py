"""Gradients into messages: which layers travel together, and when each message is on the link.

Everything here is in sending order: the network's last learnable layer first. `ready_s` is when each gradient exists,
seconds from the start of backward, ascending; `n_bytes` its size. A grouping is the tuple of its groups' ends, so
(3, 7, 10) sends gradients 0-2, 3-6 and 7-9. One message is on the link at a time, in order.
"""

import numpy as np

from steptime.model.collectives import Cost

Ends = tuple[int, ...]


def layer_wise(count: int) -> Ends:
    """Every gradient its own message."""
    return tuple(range(1, count + 1))


def one_message(count: int) -> Ends:
    """All gradients in one message."""
    return (count,) if count else ()


def bucket_groups(n_bytes: np.ndarray, bucket_bytes: float) -> Ends:
    """Buckets in sending order, each closed by the gradient that fills it to `bucket_bytes` or beyond.

    The rule of PyTorch's DistributedDataParallel without its smaller first bucket (PyTorch documentation, "DDP",
    `bucket_cap_mb`), and of lazy all-reduce (GradientFlow, arXiv 1902.06855), which sends once that much waits.
    """
    ends, held = [], 0.0
    for index, size in enumerate(n_bytes):
        held += size
        if held >= bucket_bytes or index == len(n_bytes) - 1:
            ends.append(index + 1)
            held = 0.0
    return tuple(ends)


def messages(ready_s: np.ndarray, n_bytes: np.ndarray, ends: Ends) -> tuple[np.ndarray, np.ndarray]:
    """When each message of the grouping is ready (with its last gradient), and its bytes."""
    if not ends:
        return np.zeros(0), np.zeros(0)
    last = np.asarray(ends) - 1
    return ready_s[last], np.diff(np.cumsum(n_bytes)[last], prepend=0.0)


def start_times(ready_s: np.ndarray, time_s: np.ndarray) -> np.ndarray:
    """When each message starts: once it is ready and the one before has left the link.

    The wait-free recursion, tau_c[l] = max(tau_c[l+1] + t_c[l+1], tau_b[l] + t_b[l]) (S-SGD, arXiv 1711.05979, and
    MG-WFBP, arXiv 1811.11141, start time of a layer's aggregation).
    """
    starts = np.empty(len(ready_s))
    free = 0.0
    for index, (ready, time) in enumerate(zip(ready_s, time_s, strict=True)):
        starts[index] = max(free, ready)
        free = starts[index] + time
    return starts


def end_s(ready_s: np.ndarray, n_bytes: np.ndarray, ends: Ends, cost: Cost) -> float:
    """When the last message has been aggregated, seconds from the start of backward; 0 without gradients."""
    ready, sizes = messages(ready_s, n_bytes, ends)
    if not len(ready):
        return 0.0
    times = cost.time_s(sizes)
    return float(start_times(ready, times)[-1] + times[-1])


def published_groups(ready_s: np.ndarray, n_bytes: np.ndarray, cost: Cost) -> Ends:
    """The merging rule of MG-WFBP (arXiv 1811.11141) as its authors shipped it: one pass from the last layer down.

    A gradient is merged into the next if the next is ready before this one's aggregation would end, and either the
    link is still busy at that moment or waiting for the next costs less than the `a` that a message saves. After
    each merge the start times are computed anew. Not optimal where communication is exposed: see `optimal_groups`.
    """
    count = len(ready_s)
    sizes = np.array(n_bytes, dtype=float)
    times = cost.time_s(sizes)
    starts = start_times(ready_s, times)
    ends = []
    for index in range(count - 1):
        next_ready = ready_s[index + 1]
        overlaps = next_ready < starts[index] + times[index]
        if overlaps and (starts[index] > next_ready or next_ready - starts[index] < cost.a_s):
            sizes[index + 1] += sizes[index]
            sizes[index] = times[index] = 0.0
            times[index + 1] = cost.time_s(float(sizes[index + 1]))
            starts = start_times(ready_s, times)
        else:
            ends.append(index + 1)
    return (*ends, count) if count else ()


def optimal_groups(ready_s: np.ndarray, n_bytes: np.ndarray, cost: Cost) -> Ends:
    """The grouping that ends earliest of all contiguous ones, by dynamic programming in O(L^2).

    The end of a message never falls when the link is freed later, so the best grouping of the first j gradients
    extends a best grouping of some first i: E[j] = min over i < j of max(E[i], ready[j]) + T(bytes i..j). Where two
    choices of i end at the same time, the one with fewer messages is kept.
    """
    count = len(ready_s)
    total = np.concatenate([[0.0], np.cumsum(n_bytes)])
    best_end = np.zeros(count + 1)
    number = np.zeros(count + 1, dtype=int)
    before = np.zeros(count + 1, dtype=int)
    for j in range(1, count + 1):
        candidates = np.maximum(best_end[:j], ready_s[j - 1]) + cost.time_s(total[j] - total[:j])
        equal = np.flatnonzero(candidates == candidates.min())
        before[j] = equal[np.argmin(number[equal])]
        best_end[j] = candidates[before[j]]
        number[j] = number[before[j]] + 1
    ends: list[int] = []
    j = count
    while j:
        ends.insert(0, j)
        j = int(before[j])
    return tuple(ends)
