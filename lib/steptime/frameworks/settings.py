"""The frameworks that can be measured: adapter file, distribution and kind."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from steptime.core.errors import InputError

ADAPTERS = Path(__file__).with_name("adapters")


@dataclass(frozen=True)
class Setting:
    """`distributions`: names under which the framework is installed, the first found counts."""

    name: str
    adapter: Path
    distributions: tuple[str, ...]
    kind: Literal["eager", "graph"]

    @property
    def distribution(self) -> str:
        """The name to install it by."""
        return self.distributions[0]


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("torch", ADAPTERS / "torch_eager.py", ("torch",), "eager"),
        # The CPU build has a name of its own, which the GPU build's machines do not have.
        Setting("tensorflow", ADAPTERS / "tensorflow_graph.py", ("tensorflow-cpu", "tensorflow"), "graph"),
    )
}


def installed_version(name: str) -> str | None:
    """The framework's version without importing it, or None when it is not installed."""
    if name not in SETTINGS:
        raise InputError(f"framework = {name!r}: unknown; known: {', '.join(SETTINGS)}")
    for distribution in SETTINGS[name].distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
