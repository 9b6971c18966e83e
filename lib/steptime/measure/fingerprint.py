"""Fingerprints: what must be the same for an old timing to count as this machine's and this framework's."""

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from steptime import frameworks
from steptime.core.files import write_json
from steptime.frameworks.environments import ENVIRONMENTS
from steptime.measure.provenance import gpus, machine_facts


def fingerprints() -> dict[str, dict[str, Any]]:
    """One for the machine and one for each framework (its version is null where it is not installed).

    No time of day, no host name, no kernel; no framework is imported.
    """
    facts = machine_facts()
    devices = [gpu["gpu_model"] for gpu in gpus()]
    machine = {
        "cpu_model": facts["cpu_model"],
        "cores_allowed": facts["cores_allowed"],
        "memory_gib": round(facts["memory_bytes"] / 2**30),
        "gpus": devices,
    }
    versions = {
        name: {
            "framework": name,
            "version": frameworks.installed_version(name),
            "python": _python(setting),
            "devices": ["cpu", *devices],
        }
        for name, setting in frameworks.SETTINGS.items()
    }
    return {"machine": machine, **versions}


def _python(setting: frameworks.Setting) -> str:
    """The version of the Python that runs the setting's child: the exact one here, the minor one elsewhere."""
    return platform.python_version() if setting.environment is None else ENVIRONMENTS[setting.environment].python


def write_fingerprints(folder: Path) -> None:
    """Write each fingerprint to NAME.json in `folder`; the bytes change only when the fingerprint does."""
    for name, fingerprint in fingerprints().items():
        write_json(Path(folder) / f"{name}.json", fingerprint)


def short_hash(value: Any) -> str:
    """A hash of a JSON value, for keys and columns."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
