"""The settings that can be measured: a framework in one of its ways of running, and where it is installed."""

import hashlib
import platform
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

from steptime.core.errors import InputError
from steptime.core.packages import install_command, not_there
from steptime.frameworks.environments import ENVIRONMENTS, PROJECT, environment_folder, environment_packages

ADAPTERS = Path(__file__).with_name("adapters")


@dataclass(frozen=True)
class Setting:
    """One way of running one framework. `distributions`: names under which it is installed, the first found counts.

    `mode` is what the adapter is told, for those that run in more than one way. `kind`: eager (one operation after the
    other, gradients from a tape), graph (built once, then run) or compiled (layers fused: no layer can be timed).
    `environment` is a key of ENVIRONMENTS, or None where the framework lives in the environment that runs this.
    `variables`: environment variables of the child; "{cache}" in a value stands for `compiled_folder()`.
    """

    name: str
    adapter: Path
    distributions: tuple[str, ...]
    kind: Literal["eager", "graph", "compiled"]
    mode: str = ""
    dtypes: tuple[str, ...] = ("float32",)
    environment: str | None = None
    variables: tuple[tuple[str, str], ...] = ()

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
        if self.environment is not None:
            return ENVIRONMENTS[self.environment].variables()
        return {name: value.format(cache=compiled_folder()) for name, value in self.variables}


# The CPU build of TensorFlow has a name of its own, which the GPU build's machines do not have.
_TENSORFLOW = (ADAPTERS / "tensorflow2.py", ("tensorflow-cpu", "tensorflow"))
_TORCH = (ADAPTERS / "pytorch.py", ("torch",))
_ONNXRUNTIME = ("onnxruntime-training-cpu",)
# Compiling takes minutes (a C++ compiler run for each fused kernel), and every round has fresh children: kept programs
# make the second child's compilation a matter of seconds, and change no program.
_INDUCTOR_CACHE = (("TORCHINDUCTOR_CACHE_DIR", "{cache}/inductor"),)
_JAX_CACHE = (("JAX_COMPILATION_CACHE_DIR", "{cache}/jax"), ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0"))

SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("torch", *_TORCH, "eager", "eager", ("float32", "bfloat16")),
        Setting("torch_channels_last", *_TORCH, "eager", "channels_last"),
        Setting("torch_compile", *_TORCH, "compiled", "compile", variables=_INDUCTOR_CACHE),
        Setting("tensorflow", *_TENSORFLOW, "graph", "graph"),
        Setting("tensorflow_eager", *_TENSORFLOW, "eager", "eager"),
        Setting("tensorflow_xla", *_TENSORFLOW, "compiled", "xla"),
        Setting("keras", ADAPTERS / "keras3.py", ("keras",), "graph"),
        Setting("jax", ADAPTERS / "jax_jit.py", ("jax",), "compiled", variables=_JAX_CACHE),
        Setting("caffe", ADAPTERS / "caffe1.py", ("caffe",), "graph", environment="caffe"),
        Setting("mxnet", ADAPTERS / "mxnet1.py", ("mxnet",), "graph", environment="mxnet"),
        Setting("cntk", ADAPTERS / "cntk2.py", ("cntk",), "graph", environment="cntk"),
        Setting("chainer", ADAPTERS / "chainer7.py", ("chainer",), "eager", environment="chainer"),
        Setting("tensorflow1", ADAPTERS / "tensorflow1.py", ("tensorflow",), "graph", environment="tensorflow1"),
        Setting("theano", ADAPTERS / "theano1.py", ("theano",), "graph", environment="theano"),
        Setting("onnxruntime", ADAPTERS / "onnxruntime_.py", _ONNXRUNTIME, "graph", environment="onnxruntime"),
        Setting("h2o", ADAPTERS / "h2o_.py", ("h2o",), "graph", environment="h2o"),
    )
}


@cache
def compiled_folder() -> Path:
    """Where compiled programs are kept: below the project, ignored by Git, apart for each kind of processor, since they
    use its instructions and a checkout may be shared by machines.
    """
    try:
        flags = re.search(r"^flags\b.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        kind = flags.group() if flags else ""
    except OSError:
        kind = ""
    return PROJECT / ".cache" / hashlib.sha256(f"{platform.processor()} {kind}".encode()).hexdigest()[:12]


def installed_version(name: str) -> str | None:
    """The framework's version without importing it, or None when it is not installed."""
    if name not in SETTINGS:
        raise InputError(f"framework = {name!r}: unknown; known: {', '.join(SETTINGS)}")
    setting = SETTINGS[name]
    places = sys.path if setting.environment is None else environment_packages(setting.environment)
    for distribution in setting.distributions:
        found = next(iter(distributions(name=distribution, path=places)), None)
        if found is not None:
            return found.version
    return None


def missing_packages(name: str) -> str | None:
    """The system packages without which the setting's children end at once, made as their environment may be, and the
    command that installs them: one line; None where nothing is missing.
    """
    environment = SETTINGS[name].environment
    missing = not_there(PROJECT, ENVIRONMENTS[environment].runs_with) if environment else []
    return f"system packages are missing: {', '.join(missing)}: {install_command(missing)}" if missing else None
