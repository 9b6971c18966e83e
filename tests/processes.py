"""Whether processes still run."""

import time
from collections.abc import Sequence
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids: Sequence[int], within_s: float = 5.0) -> bool:
    """Whether all have ended, or do so within the time."""
    end = time.monotonic() + within_s
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(alive(pid) for pid in pids)
