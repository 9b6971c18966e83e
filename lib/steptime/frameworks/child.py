"""The parent's side of a child process that trains in one framework."""

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from steptime.core.errors import InputError
from steptime.frameworks.settings import SETTINGS

WORKER = Path(__file__).with_name("worker.py")
SCRATCH = Path(__file__).resolve().parents[3] / "data/.scratch/jpeg"
"""Where the JPEG files are that the inputs jpeg-0, jpeg-1 and jpeg-2 read: made once, ignored by Git."""
OUT_OF_MEMORY_WORDS = ("bad_alloc", "out of memory", "cannot allocate memory", "can't allocate memory")


class ChildError(RuntimeError):
    """A child reported an error, died, or took too long: one line.

    `kind`: "unsupported" (the framework cannot express what was asked), "out_of_memory", or "error".
    """

    def __init__(self, message: str, kind: str = "error") -> None:
        super().__init__(message)
        self.kind = kind


class Child:
    """One child process with its own interpreter, ready for requests.

    `device` is "cpu" or "cuda"; `cores` the only cores it may use (None: the parent's); `threads` bounds what the
    framework's libraries start, `memory_limit_bytes` its private memory. It is killed when the thread that made it
    ends, so make it in one that lasts. `adapter`: a file to run in place of the setting's own. The requests are the
    commands of worker.py.
    """

    def __init__(
        self,
        setting: str,
        device: str = "cpu",
        cores: Sequence[int] | None = None,
        threads: int = 1,
        memory_limit_bytes: int | None = None,
        adapter: Path | None = None,
    ) -> None:
        if setting not in SETTINGS:
            raise InputError(f"framework = {setting!r}: unknown; known: {', '.join(SETTINGS)}")
        if device not in ("cpu", "cuda"):
            raise InputError(f"device = {device!r}: unknown; known: cpu, cuda")
        self.setting = setting
        chosen = SETTINGS[setting]
        options = {
            "device": device,
            "cores": sorted(cores) if cores else None,
            "mode": chosen.mode,
            "dtypes": chosen.dtypes,
            "parent": os.getpid(),
            "scratch": str(SCRATCH),
            "memory_limit_bytes": memory_limit_bytes,
        }
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self._received = b""
        self._killed_here = False
        self._process = subprocess.Popen(
            [str(chosen.interpreter), str(WORKER), str(adapter or chosen.adapter), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=_environment(device, threads) | chosen.child_environment,
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(self, command: str, *, timeout_s: float = 600, **arguments: Any) -> dict[str, Any]:
        """The child's answer to one command. Raises ChildError when it reports an error, is dead or exceeds the time.

        A child that exceeded its time is killed: what it would answer later belongs to no request.
        """
        line = json.dumps({"command": command, **arguments}) + "\n"
        try:
            self._write(line.encode())
            answer = json.loads(self._read_line(command, timeout_s))
        except BrokenPipeError:
            raise self._death(command) from None
        if "error" in answer:
            raise ChildError(f"{self.setting}: {command}: {answer['error']}", answer["kind"])
        return answer

    def close(self) -> None:
        """End the child, at once if it is idle, by force if it does not go."""
        if self._process.poll() is None:
            assert self._process.stdin
            self._process.stdin.close()
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(timeout=3)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream:
                stream.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin
        if self._process.stdin.closed:
            raise ChildError(f"{self.setting}: the child is closed")
        while data:
            data = data[self._process.stdin.write(data) or 0 :]

    def _read_line(self, command: str, timeout_s: float) -> bytes:
        assert self._process.stdout
        end = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            readable, _, _ = select.select([self._process.stdout], [], [], max(0, end - time.monotonic()))
            if not readable:
                self._killed_here = True
                self._process.kill()
                self._process.wait()
                raise ChildError(f"{self.setting}: {command}: no answer in {timeout_s:g} s; the child was ended")
            block = os.read(self._process.stdout.fileno(), 1 << 20)
            if not block:
                raise self._death(command)
            self._received += block
        line, self._received = self._received.split(b"\n", 1)
        return line

    def _death(self, command: str) -> ChildError:
        """The error that says how the child ended and what it said last.

        Frameworks in C++ abort when they get no memory; the kernel sends SIGKILL to the largest process when the
        machine has none left, and nothing else here sends it.
        """
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        kind = "error"
        if code == -signal.SIGKILL and not self._killed_here:
            how, kind = f"{how}, as the system does when memory runs out", "out_of_memory"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if any(word in line.lower() for word in OUT_OF_MEMORY_WORDS for line in lines[-20:]):
            kind = "out_of_memory"
        said = f"; it said: {last}" if last else ""
        return ChildError(f"{self.setting}: {command}: the child {how}{said}", kind)


def _environment(device: str, threads: int) -> dict[str, str]:
    """The child's environment: this one's, with threads bounded and the GPU hidden unless it is asked for."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
    environment = {**os.environ, **{name: str(threads) for name in names}, "TF_NUM_INTEROP_THREADS": "1"}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment
