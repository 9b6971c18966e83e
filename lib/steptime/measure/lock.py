"""One measuring process at a time on a machine: two would time each other."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from steptime.core.errors import InputError

LOCK = Path("/tmp/steptime-measuring.lock")
"""Outside any checkout and open to every user, so that two checkouts or two users exclude each other too."""


@contextmanager
def measuring_lock() -> Iterator[None]:
    """Hold the machine for measuring. Raises InputError, naming the holder's process id, when another holds it.

    The kernel lets go of the lock when the process ends, however it ends; children do not inherit it.
    """
    handle = _open()
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            raise InputError(
                f"{LOCK}: process {holder} is measuring on this machine; wait for its end or stop it, then start again"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def _open() -> int:
    """Opened without O_CREAT first: in a sticky folder the kernel refuses O_CREAT on another user's file."""
    flags = os.O_RDWR | os.O_NOFOLLOW
    try:
        return os.open(LOCK, flags)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise InputError(f"{LOCK}: cannot be opened ({error.strerror}); remove it or make it writable to all") from None
    try:
        handle = os.open(LOCK, flags | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return os.open(LOCK, flags)
    os.fchmod(handle, 0o666)
    return handle
