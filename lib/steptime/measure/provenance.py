"""Where a run comes from: code, machine and state, with nothing in it that names a host, a user or a path."""

import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import steptime

PACKAGE = Path(steptime.__file__).parent
MEASURING_CODE = ("core", "networks", "frameworks", "measure")
ABSOLUTE_PATH = re.compile(r"(?<![\w./~-])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\'\",;:()]+[/\\])*[^\s/\\'\",;:()]+")
QUOTED_PATH = re.compile(r"(['\"])((?:~|[A-Za-z]:)?[/\\][^'\"\n]*)\1")
"""A path in quotes, which may hold spaces."""
GPU_QUERY = ("name", "driver_version", "clocks.sm", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")


def without_paths(text: str) -> str:
    """`text` with every absolute path in it reduced to its last part."""
    text = QUOTED_PATH.sub(lambda match: match[1] + re.split(r"[/\\]", match[2])[-1] + match[1], text)
    return ABSOLUTE_PATH.sub(lambda match: re.split(r"[/\\]", match.group())[-1], text)


@cache
def machine_facts() -> dict[str, Any]:
    """The machine's columns of runs.csv, but for the load."""
    return {
        "platform": platform.platform(),
        "cpu_model": cpu_model(),
        "cores_present": os.cpu_count(),
        "cores_allowed": cores_allowed(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "is_virtual": " hypervisor" in _cpuinfo("flags"),
    }


@cache
def code_facts() -> dict[str, Any]:
    """The code's columns of runs.csv. The revision is missing outside a checkout."""
    return {
        "git_revision": _git("rev-parse", "HEAD"),
        "git_dirty": _is_dirty(),
        "code_hash": code_hash(),
        "steptime_version": steptime.__version__,
    }


def code_hash() -> str:
    """Hash of the Python files that decide what is timed and how."""
    digest = hashlib.sha256()
    for folder in MEASURING_CODE:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def cpu_model() -> str:
    return _cpuinfo("model name").strip() or platform.machine()


def cores_allowed(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may use: its affinity, or its cgroup's quota (v1 or v2) rounded up if that is less."""
    allowed = len(os.sched_getaffinity(0))
    quota = min(_quotas(cgroups, membership), default=math.inf)
    return max(1, min(allowed, math.ceil(quota))) if quota < math.inf else allowed


def gpus() -> list[dict[str, Any]]:
    """Model, driver, clock (MHz), power (W), temperature (C) and throttle reasons of every NVIDIA GPU; [] without."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [_gpu(line.split(", ")) for line in answer.splitlines() if line.count(", ") == len(GPU_QUERY) - 1]


def _gpu(fields: list[str]) -> dict[str, Any]:
    name, driver, clock, power, temperature, throttle = (field.strip() for field in fields)
    return {
        "gpu_model": name,
        "gpu_driver": driver,
        "gpu_clock_mhz": _number(clock),
        "gpu_power_w": _number(power),
        "gpu_temperature_c": _number(temperature),
        "gpu_throttle": throttle,
    }


def _number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:
        return None


def _quotas(cgroups: Path, membership: Path) -> list[float]:
    """Every quota in cores that binds this process: its own cgroup's and those of the cgroups around it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            root = cgroups
        elif "cpu" in controllers.split(","):
            root = next((cgroups / name for name in (controllers, "cpu") if (cgroups / name).is_dir()), cgroups / "cpu")
        else:
            continue
        own = root / inside.lstrip("/")
        # a container sees its own cgroup as the root, under a path that is not there
        for folder in (own, *own.parents):
            if folder == root or root in folder.parents:
                found += _quota(folder)
    return found


def _quota(folder: Path) -> list[float]:
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
    except (OSError, ValueError):
        return []
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]


@cache
def _cpuinfo(key: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(rf"^{key}\s*:(.*)$", text, re.MULTILINE)
    return found.group(1) if found else ""


def _is_dirty() -> bool | None:
    """Are there changes against the revision? Running the study rewrites dvc.lock, which changes nothing timed."""
    state = _git("status", "--porcelain", "--", ":/", ":(exclude,top)dvc.lock")
    return None if state is None else bool(state)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", PACKAGE, *arguments], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
