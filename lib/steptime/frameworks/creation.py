"""Making the frameworks' own environments, whole or not at all.

Beside `.envs/NAME` lie NAME.log (what was run and what it said) and NAME.lock (held by whoever makes it). In it,
`recipe` says what it is made from, written first; `complete` says the same, written last, and only it counts.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from steptime.core.errors import InputError
from steptime.core.files import read_text, write_text
from steptime.core.packages import install_command, not_there
from steptime.frameworks.environments import COMPLETE, ENVIRONMENTS, LOCKS, PROJECT, Environment, environment_folder

Log = Callable[[str], None]

TOOLS = ("pip", "setuptools", "wheel")
"""What installs the rest comes first, since some old packages are built by it."""


class CreationFailed(RuntimeError):
    """A step of making an environment failed: one line with the place of the log."""


@dataclass(frozen=True)
class State:
    """What there is of one environment, with the command that mends it and why it cannot be made or run here, if so."""

    environment: Environment
    state: Literal["complete", "half made", "not made", "cannot be made here"]
    mend: str = ""
    why: str = ""


def find_environment(name: str) -> Environment:
    """The recipe called `name`. Raises InputError when there is none."""
    if name not in ENVIRONMENTS:
        raise InputError(f"environment = {name!r}: unknown; known: {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[name]


def environment_states() -> Iterator[State]:
    """The state of every environment that there is a recipe for."""
    for name, environment in ENVIRONMENTS.items():
        folder = environment_folder(name)
        lacking = _lacking(environment)
        if _is_complete(environment):
            gone = not_there(PROJECT, environment.runs_with)
            why = f"system packages are missing: {', '.join(gone)}" if gone else ""
            yield State(environment, "complete", install_command(gone) if gone else "", why)
        elif lacking:
            yield State(environment, "cannot be made here", lacking[1], lacking[0])
        else:
            yield State(environment, "half made" if folder.exists() else "not made", f"steptime env create {name}")


def create_environment(name: str, log: Log) -> Path:
    """Make environment `name`, or go on where its making was interrupted; one that is complete is left alone.

    Returns its folder. Raises InputError when this machine lacks an interpreter or a system package for it, and
    CreationFailed when a step fails.
    """
    environment = find_environment(name)
    folder = environment_folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder, log) as lock:
        if _is_complete(environment):
            log("complete")
            return folder
        lacking = _lacking(environment)
        if lacking:
            raise InputError(f"{name}: {lacking[0]}; mend it: {lacking[1]}")
        python = find_interpreter(environment.python)
        assert python
        _make(environment, folder, python, _Runner(folder, lock, log))
    log("complete")
    return folder


def find_interpreter(version: str) -> Path | None:
    """A Python of the minor version, e.g. "3.8": pythonX.Y on PATH, else pyenv's newest, else None."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = sorted(root.glob(f"versions/{version}.*/bin/python"), key=lambda path: _numbers(path.parts[-3]))
    on_path = shutil.which(f"python{version}")
    for path in ([Path(on_path)] if on_path else []) + installed[::-1]:
        # pyenv's stand-ins on PATH exist for versions that are not switched on.
        command = [str(path), "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2]); print(sys.executable)"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, errors="replace").stdout.splitlines()
        except OSError:
            continue
        if said[:1] == [version]:
            return Path(said[1])
    return None


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _lacking(environment: Environment) -> tuple[str, str] | None:
    """(what this machine lacks for it, the command that mends that), or None."""
    missing = not_there(PROJECT, environment.packages)
    if missing:
        return f"system packages are missing: {', '.join(missing)}", install_command(missing)
    if find_interpreter(environment.python) is None:
        return f"Python {environment.python} is neither on PATH nor under pyenv", f"pyenv install {environment.python}"
    return None


def _recipe(environment: Environment) -> str:
    """A hash of everything that decides what is installed."""
    digest = hashlib.sha256(f"{environment.version} {environment.python}".encode())
    for path in (_lock_file(environment), _script(environment)):
        digest.update(path.read_bytes() if path.is_file() else b"-")
    return digest.hexdigest() + "\n"


def _lock_file(environment: Environment) -> Path:
    return LOCKS / f"{environment.name}.txt"


def _script(environment: Environment) -> Path:
    return LOCKS / f"{environment.name}.sh"


def _is_complete(environment: Environment) -> bool:
    folder = environment_folder(environment.name)
    stamp = folder / COMPLETE
    # The interpreter is a link into the Python that it was made from, which may have been removed since.
    return (folder / "bin/python").exists() and stamp.is_file() and stamp.read_bytes() == _recipe(environment).encode()


@contextmanager
def _lock(folder: Path, log: Log) -> Iterator[int]:
    """Hold the right to make `folder`. The programs that make it inherit it, so it outlasts a killed parent."""
    handle = os.open(f"{folder}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("is being made by another process: waiting for its end")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


class _Runner:
    """Runs the programs that make one environment, their output in its log."""

    def __init__(self, folder: Path, lock: int, log: Log) -> None:
        self._folder, self._lock, self.log = folder, lock, log
        self.path = folder.with_name(f"{folder.name}.log")

    def __call__(self, step: str, command: Sequence[str | Path]) -> None:
        """Run `command` in the environment's folder, or raise CreationFailed with its last line and the log's path."""
        self.log(step)
        last, shown = "", -1
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n== {step}: {' '.join(map(str, command))}\n")
            file.flush()
            with subprocess.Popen(
                command,
                cwd=self._folder if self._folder.is_dir() else self._folder.parent,
                env={key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                pass_fds=(self._lock,),
            ) as process:
                for line in process.stdout or ():
                    file.write(line)
                    file.flush()
                    last = line.strip() or last
                    # make says how far it is
                    percent = re.match(r"\[ *(\d+)%\]", line)
                    if percent and int(percent[1]) // 10 * 10 > shown:
                        shown = int(percent[1]) // 10 * 10
                        self.log(f"{step}: {shown} %")
        if process.returncode:
            raise CreationFailed(
                f"{self._folder.name}: {step}: failed with status {process.returncode}: {last[:200]}; log: {self.path}"
            )


def _make(environment: Environment, folder: Path, interpreter: Path, run: _Runner) -> None:
    """The steps, each of which may find that an interrupted run has done a part of it."""
    recipe, python = _recipe(environment), folder / "bin/python"
    begun = folder / "recipe"
    if not begun.is_file() or begun.read_text() != recipe or not _has_pip(python):
        if folder.exists():
            run.log("what was there is half made or of another recipe: made anew")
            shutil.rmtree(folder)
        run(f"Python {environment.python} ({interpreter})", [interpreter, "-m", "venv", folder])
        write_text(begun, recipe)
    _remove_half_installed(folder)
    locked = [line for line in read_text(_lock_file(environment)).splitlines() if line and not line.startswith("#")]
    tools = [line for line in locked if line.partition("==")[0] in TOOLS]
    rest = [line for line in locked if line not in tools]
    # `bin/pip` would not start from a path with spaces.
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    if tools:
        run(f"{len(tools)} installers", [*pip, *tools])
    if rest:
        run(f"{len(rest)} packages", [*pip, "--no-build-isolation", *rest])
    if _script(environment).is_file():
        run(_script(environment).name, ["bash", _script(environment)])
    write_text(folder / COMPLETE, recipe)


def _has_pip(python: Path) -> bool:
    return python.exists() and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0


def _remove_half_installed(folder: Path) -> None:
    """Remove the metadata of packages whose installation was interrupted, so that pip does not count them as present.

    pip writes RECORD last, and renames to ~NAME what it is about to replace.
    """
    for packages in folder.glob("lib/python*/site-packages"):
        for found in packages.glob("*.dist-info"):
            if not (found / "RECORD").is_file():
                shutil.rmtree(found)
        for left in packages.glob("~*"):
            shutil.rmtree(left, ignore_errors=True)
