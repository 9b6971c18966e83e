"""The frameworks' own environments: which interpreter and packages each needs. Nothing here is loaded by a child."""

from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / ".envs"


@dataclass(frozen=True)
class Environment:
    """How one environment is made. `python`: the interpreter's minor version, e.g. "3.8"."""

    name: str
    python: str
    requirements: tuple[str, ...] = field(default=())

    def variables(self) -> dict[str, str]:
        """What a child in this environment needs set."""
        return {}


ENVIRONMENTS: dict[str, Environment] = {}


def environment_folder(name: str) -> Path:
    """Where environment `name` is, or would be."""
    return FOLDER / name
