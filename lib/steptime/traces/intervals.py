"""Sets of time intervals as pairs of arrays (starts, ends), seconds: union, difference, what of a window they cover.

A set is sorted and its intervals are disjoint; `union` makes one of any intervals.
"""

import numpy as np

Intervals = tuple[np.ndarray, np.ndarray]
NONE: Intervals = (np.zeros(0), np.zeros(0))


def union(start_s: np.ndarray, end_s: np.ndarray, bridge_s: float = 0.0) -> Intervals:
    """The set that intervals cover together; gaps of at most `bridge_s` are closed, empty intervals left out."""
    keep = end_s > start_s
    start_s, end_s = start_s[keep], end_s[keep]
    if not len(start_s):
        return NONE
    order = np.argsort(start_s, kind="stable")
    start_s, reached = start_s[order], np.maximum.accumulate(end_s[order])
    opens = np.concatenate(([True], start_s[1:] > reached[:-1] + bridge_s))
    closes = np.concatenate((opens[1:], [True]))
    return start_s[opens], reached[closes]


def clipped(intervals: Intervals, low_s: float, high_s: float) -> Intervals:
    """What of the set lies between two times."""
    start, end = np.maximum(intervals[0], low_s), np.minimum(intervals[1], high_s)
    return start[end > start], end[end > start]


def without(intervals: Intervals, other: Intervals) -> Intervals:
    """What of the first set is not in the second."""
    if not len(intervals[0]) or not len(other[0]):
        return intervals
    edges = np.unique(np.concatenate((*intervals, *other)))
    start, end = edges[:-1], edges[1:]
    middle = start + (end - start) / 2
    keep = _contains(intervals, middle) & ~_contains(other, middle)
    return union(start[keep], end[keep])


def covered_s(intervals: Intervals, until_s: np.ndarray) -> np.ndarray:
    """Seconds of the set before each time of `until_s`."""
    start, end = intervals
    before = np.concatenate(([0.0], np.cumsum(end - start)))
    place = np.searchsorted(start, until_s, side="right")
    inside = np.zeros(np.shape(until_s))
    has = place > 0
    last = np.maximum(place - 1, 0)
    if len(start):
        inside = np.where(has, np.minimum(until_s, end[last]) - end[last], 0.0)
    return before[place] + inside


def total_s(intervals: Intervals) -> float:
    """Seconds of the set."""
    return float((intervals[1] - intervals[0]).sum())


def _contains(intervals: Intervals, times_s: np.ndarray) -> np.ndarray:
    place = np.searchsorted(intervals[0], times_s, side="right") - 1
    return (place >= 0) & (times_s < intervals[1][np.maximum(place, 0)])
