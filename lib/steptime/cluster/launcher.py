"""Many processes as one run: started together, watched, and ended together, whatever ends first."""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

from steptime.core.errors import InputError

ResultT = TypeVar("ResultT")

PROGRAMS = Path(__file__).with_name("programs")
LAST_LINES = 3
"""Of a dead rank's output, in the error that it makes."""
CLONE_NEWNET = 0x40000000
AFTERWARDS_S = 0.5
"""After the first rank failed: how long others that failed before it are looked for. A rank whose peer died notices it
by a broken connection and may be the first whose end is seen."""


class RunFailed(RuntimeError):
    """A rank died, reported a fault or took too long: one line. `rank` is None when the time ran out."""

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class Place:
    """Where a rank runs: a network namespace (None: this process's own), the interface that its peers reach it on, and
    its address there."""

    namespace: str | None = None
    interface: str = "lo"
    address: str = "127.0.0.1"


@dataclass(frozen=True)
class Rank:
    """A command, what it reads from stdin, and where it runs. `handles`: open files that it inherits by number."""

    command: tuple[str, ...]
    place: Place = Place()
    stdin: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    handles: tuple[int, ...] = ()


def run_ranks(
    ranks: Sequence[Rank], timeout_s: float, started: Callable[[list[int]], None] = lambda pids: None
) -> list[str]:
    """What each rank wrote to stdout, once all have ended with status 0. `started` gets the process ids.

    When one ends otherwise, or `timeout_s` seconds have passed, all are ended and RunFailed says which and why, with
    the last lines that it wrote. Nothing is left behind: every rank has a session of its own and is killed with it,
    also when this is interrupted; and the kernel kills the ranks when the calling thread ends, so call it in one that
    lasts.
    """
    with ExitStack() as stack:
        running = [stack.enter_context(_Running(number, rank)) for number, rank in enumerate(ranks)]
        started([each.pid for each in running])
        _wait(running, timeout_s)
        return [each.said(each.stdout) for each in running]


class _Running:
    """A started rank. Its streams are files without a name: no pipe that fills, no file that is left."""

    def __init__(self, number: int, rank: Rank) -> None:
        self.number = number
        self._stack = ExitStack()
        stdin, self.stdout, self.stderr = (
            self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  closed by the stack
            for _ in range(3)
        )
        stdin.write(rank.stdin.encode())
        stdin.seek(0)
        boot = [sys.executable, "-ISB", str(PROGRAMS / "boot.py"), str(os.getpid()), rank.place.namespace or ""]
        try:
            self._process = subprocess.Popen(
                [*boot, *rank.command],
                stdin=stdin,
                stdout=self.stdout,
                stderr=self.stderr,
                env={**os.environ, **rank.environment},
                start_new_session=True,
                pass_fds=rank.handles,
            )
            self.handle = os.pidfd_open(self._process.pid)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def status(self) -> int | None:
        """None while it runs, else as subprocess has it. It stays a zombie until `close`, so that its session's number
        is nobody else's."""
        ended = os.waitid(os.P_PIDFD, self.handle, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def said(self, stream: IO[bytes]) -> str:
        stream.seek(0)
        return stream.read().decode(errors="replace")

    def failure(self, status: int) -> RunFailed:
        """The error of a rank that ended with `status`."""
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        lines = [line.strip() for line in self.said(self.stderr).splitlines() if line.strip()]
        said = f"; it said last: {' | '.join(line[:300] for line in lines[-LAST_LINES:])}" if lines else ""
        return RunFailed(f"rank {self.number} {how}{said}", self.number)

    def close(self) -> None:
        """End the rank and whatever it started in its session."""
        process = getattr(self, "_process", None)
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if hasattr(self, "handle"):
                os.close(self.handle)
        self._stack.close()

    def __enter__(self) -> "_Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _wait(running: Sequence[_Running], timeout_s: float) -> None:
    """Return when all have ended well; raise RunFailed for the first that did not."""
    end = time.monotonic() + timeout_s
    poll, alive = select.poll(), {each.handle: each for each in running}
    for handle in alive:
        poll.register(handle, select.POLLIN)
    while alive:
        ready = poll.poll(max(0.0, end - time.monotonic()) * 1e3)
        if not ready:
            names = ", ".join(str(each.number) for each in alive.values())
            raise RunFailed(f"ranks {names} did not end in {timeout_s:g} s; all were ended", None)
        failed = []
        for handle, _ in ready:
            each = alive[handle]
            if each.status():
                failed.append(each)
            else:
                poll.unregister(handle)
                del alive[handle]
        if failed:
            raise _first_cause(failed, list(alive.values()))


def _first_cause(failed: list[_Running], alive: list[_Running]) -> RunFailed:
    """The failure to report: one that was killed by a signal explains those that lost their peer, not the reverse."""
    by_signal = [each for each in failed if (each.status() or 0) < 0]
    if not by_signal:
        time.sleep(AFTERWARDS_S)
        by_signal = [each for each in alive if (each.status() or 0) < 0]
    chosen = (by_signal or failed)[0]
    return chosen.failure(chosen.status() or 0)


# ------------------------------------------------------------------------------------------------------- addresses


def resolved(host: str) -> str:
    """The IPv4 address of `host`. Raises InputError for a name that does not resolve."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"host = {host!r}: does not resolve ({why}); correct it or give an address") from None


def listening(place: Place, port: int = 0) -> socket.socket:
    """A socket that listens at `place`; a free port is chosen for 0. Held open until a rank has it: no race for it.

    Raises InputError for a port that is taken or an address that is not there.
    """
    server = in_namespace(place.namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((place.address, port))
        server.listen(1024)
    except (OSError, OverflowError) as error:
        server.close()
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{place.address}, port {port}: {why}; choose another port, or 0 for a free one") from None
    return server


def free_ports(count: int, place: Place | None = None) -> list[int]:
    """Different free ports at `place`, for engines that open them themselves. Free now: start the engine at once."""
    place = place or Place()
    with ExitStack() as stack:
        return [stack.enter_context(listening(place)).getsockname()[1] for _ in range(count)]


def in_namespace(namespace: str | None, call: Callable[[], ResultT]) -> ResultT:
    """`call()` inside a network namespace, in a thread of its own: a namespace is a thread's, and so is the way out."""
    if namespace is None:
        return call()
    outcome: list[ResultT | BaseException] = []

    def inside() -> None:
        try:
            handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(handle, CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
            finally:
                os.close(handle)
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
