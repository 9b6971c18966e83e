"""What this machine lacks for the study and its tests, and the one command that mends it."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from steptime.core.errors import InputError
from steptime.core.files import read_text

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
    for package, binary, purpose, needed_by in system_packages(root):
        path = shutil.which(binary)
        sudo = "" if os.geteuid() == 0 else "sudo "
        mend = f"{sudo}apt-get install -y {package}"
        yield Finding(binary, path or f"missing: {purpose}", path is not None, mend, needed_by == "study")


def system_packages(root: Path) -> list[tuple[str, str, str, str]]:
    """The one list of system packages: package, its binary, what it is for, who needs it (study or test)."""
    rows = []
    for line in read_text(root / "lib/locks/system-packages.txt").splitlines():
        if line and not line.startswith("#"):
            package, binary, rest = line.split(maxsplit=2)
            purpose, needed_by = rest.rsplit(maxsplit=1)
            rows.append((package, binary, purpose, needed_by))
    return rows


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
