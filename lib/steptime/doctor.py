"""What this machine lacks for the study and its tests, and the one command that mends it."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from steptime.core.errors import InputError
from steptime.core.files import read_text
from steptime.core.packages import install_command, system_packages
from steptime.frameworks.creation import environment_states

FREE_MEMORY_GB = 6
FREE_DISK_GB = 8


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `mend` is the command that mends it, empty when nothing is wrong or nothing can be done."""

    what: str
    found: str
    ok: bool
    mend: str = ""
    required: bool = True


def findings(root: Path) -> Iterator[Finding]:
    """Everything that the study needs, in the order in which to mend it."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("Python", version, sys.version_info >= (3, 11), "make env PYTHON=python3.11")
    yield _environment(root)
    yield from _system_packages(root)
    yield _vintage()
    yield _memory()
    free = shutil.disk_usage(root).free / 1e9
    yield Finding("free disk", f"{free:.0f} GB", free >= FREE_DISK_GB, f"df -h {root}  # free {FREE_DISK_GB} GB")
    yield _gpu()
    yield _measuring()


def _environment(root: Path) -> Finding:
    """The locked packages against those installed; torch may be any build of the locked version."""
    lines = [line for line in read_text(root / "lib/locks/cpu.txt").splitlines() if line and not line.startswith("#")]
    wrong = []
    for line in lines:
        name, _, locked = line.partition("==")
        try:
            installed = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            installed = "missing"
        if installed != locked:
            wrong.append(f"{name} {installed} (lock: {locked})")
    found = f"{len(lines) - len(wrong)} of {len(lines)} as locked"
    return Finding("Python packages", "; ".join([found, *wrong[:3]]), not wrong, "touch lib/locks/cpu.txt && make env")


def _system_packages(root: Path) -> Iterator[Finding]:
    for package in system_packages(root):
        if package.needed_by != "vintage":
            found = package.found
            required = package.needed_by == "study"
            text = found or f"missing: {package.purpose}"
            yield Finding(package.name, text, found is not None, install_command([package.name]), required)


def _vintage() -> Finding:
    """The frameworks' own environments; without them the study shows what was recorded with them."""
    states = list(environment_states())
    lacking = [state.environment.name for state in states if state.state != "complete"]
    found = f"{len(states) - len(lacking)} of {len(states)} complete"
    text = f"{found}; not: {', '.join(lacking)}" if lacking else found
    return Finding("frameworks' own environments", text, not lacking, "steptime env list", required=False)


def _memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available / 1e9
    mend = f"free  # close programs until {FREE_MEMORY_GB} GB are available"
    return Finding("free memory", f"{free:.0f} GB", free >= FREE_MEMORY_GB, mend)


def _gpu() -> Finding:
    """Names the GPUs; without one the study runs and lists the GPU cases as not run."""
    try:
        import pynvml

        pynvml.nvmlInit()
        names = [
            pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())
        ]
    except Exception:  # no driver, no library, no device: the same to the study
        names = []
    return Finding("GPU", ", ".join(names) or "none: GPU cases are listed as not run", True)


def _measuring() -> Finding:
    """Two measurements at once would time each other, so the second one is refused."""
    from steptime.measure.lock import measuring_lock

    try:
        with measuring_lock():
            return Finding("measuring now", "nobody", True)
    except InputError as error:
        return Finding("measuring now", str(error), False, "wait until it ends", required=False)
