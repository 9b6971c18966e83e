"""The settings that can be measured: a framework in one of its ways of running, and where it is installed."""

import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

from steptime.core.errors import InputError
from steptime.frameworks.environments import ENVIRONMENTS, environment_folder

ADAPTERS = Path(__file__).with_name("adapters")


@dataclass(frozen=True)
class Setting:
    """One way of running one framework. `distributions`: names under which it is installed, the first found counts.

    `mode` is what the adapter is told, for those that run in more than one way. `kind`: eager (one operation after the
    other, gradients from a tape), graph (built once, then run) or compiled (layers fused: no layer can be timed).
    `environment` is a key of ENVIRONMENTS, or None where the framework lives in the environment that runs this.
    """

    name: str
    adapter: Path
    distributions: tuple[str, ...]
    kind: Literal["eager", "graph", "compiled"]
    mode: str = ""
    dtypes: tuple[str, ...] = ("float32",)
    environment: str | None = None

    @property
    def distribution(self) -> str:
        """The name to install it by."""
        return self.distributions[0]

    @property
    def interpreter(self) -> Path:
        """The Python that runs its child; it need not exist."""
        if self.environment is None:
            return Path(sys.executable)
        return environment_folder(self.environment) / "bin/python"

    @property
    def child_environment(self) -> dict[str, str]:
        """Environment variables that its child needs beside those of every child."""
        return {} if self.environment is None else ENVIRONMENTS[self.environment].variables()


# The CPU build of TensorFlow has a name of its own, which the GPU build's machines do not have.
_TENSORFLOW = (ADAPTERS / "tensorflow2.py", ("tensorflow-cpu", "tensorflow"))
_TORCH = (ADAPTERS / "pytorch.py", ("torch",))

SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("torch", *_TORCH, "eager", "eager", ("float32", "bfloat16")),
        Setting("tensorflow", *_TENSORFLOW, "graph", "graph"),
    )
}


def installed_version(name: str) -> str | None:
    """The framework's version without importing it, or None when it is not installed."""
    if name not in SETTINGS:
        raise InputError(f"framework = {name!r}: unknown; known: {', '.join(SETTINGS)}")
    setting = SETTINGS[name]
    if setting.environment is None:
        places = sys.path
    else:
        places = [str(path) for path in environment_folder(setting.environment).glob("lib/python*/site-packages")]
    for distribution in setting.distributions:
        found = next(iter(distributions(name=distribution, path=places)), None)
        if found is not None:
            return found.version
    return None
