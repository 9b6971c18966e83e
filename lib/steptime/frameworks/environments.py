"""The frameworks' own environments: which interpreter and packages each needs. Nothing here is loaded by a child.

Environment NAME is `.envs/NAME`, made by `steptime env create NAME` (creation.py). What pip installs is locked in
`lib/locks/vintage/NAME.txt`; `NAME.sh` beside it, where there is one, is run in the new environment's folder after.
"""

from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
FOLDER = PROJECT / ".envs"
LOCKS = PROJECT / "lib/locks/vintage"
COMPLETE = "complete"
"""The file that is written last."""


@dataclass(frozen=True)
class Environment:
    """How one environment is made.

    `version`: the framework's; `python`: the interpreter's minor version, e.g. "3.8"; `packages`: system packages,
    names of lib/locks/system-packages.txt; `settings`: what its children find set, {folder} being its folder;
    `runs_with`: those of the packages that are programs its children start.
    """

    name: str
    version: str
    python: str
    packages: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    runs_with: tuple[str, ...] = ()

    def variables(self) -> dict[str, str]:
        """What a child in this environment needs set. Packages from outside it stay outside."""
        folder = str(environment_folder(self.name))
        own = {key: value.replace("{folder}", folder) for key, value in self.settings.items()}
        return {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1"} | own


_CAFFE = (
    *("g++", "cmake", "libopenblas-dev", "libprotobuf-dev", "protobuf-compiler", "libhdf5-dev", "libgflags-dev"),
    *("libgoogle-glog-dev", "libgtest-dev", "libboost-system-dev", "libboost-thread-dev", "libboost-filesystem-dev"),
    *("libboost-regex-dev", "libboost-python-dev"),
)
_MPI = ("openmpi-bin", "libopenmpi-dev")

ENVIRONMENTS: dict[str, Environment] = {
    environment.name: environment
    for environment in (
        # Built from source; level 2 of its log are errors.
        Environment("caffe", "1.0.0", "3.11", _CAFFE, {"GLOG_minloglevel": "2"}),
        # Its wheel wants libraries of an older OpenMPI by name: links to Debian's, made by cntk.sh.
        Environment("cntk", "2.7", "3.6", _MPI, {"LD_LIBRARY_PATH": "{folder}/lib-links"}),
        Environment("mxnet", "1.9.1", "3.8"),
        Environment("tensorflow1", "1.14.0", "3.7"),
        Environment("chainer", "7.8.1", "3.8", _MPI),
        # Without a BLAS named it falls back to a slow one; what it compiles stays in its own folder.
        Environment(
            "theano",
            "1.0.5",
            "3.8",
            ("g++", "libopenblas-dev"),
            {"THEANO_FLAGS": "blas.ldflags=-lopenblas,cxx=g++,base_compiledir={folder}/compiled"},
        ),
        # The last release that trains.
        Environment("onnxruntime", "1.19.2", "3.11"),
        Environment("h2o", "3.46.0.12", "3.11", ("openjdk-17-jre-headless",), runs_with=("openjdk-17-jre-headless",)),
    )
}


def environment_folder(name: str) -> Path:
    """Where environment `name` is, or would be."""
    return FOLDER / name


def environment_packages(name: str) -> list[str]:
    """The folders that hold its packages; none unless it was made to the end."""
    folder = environment_folder(name)
    # The interpreter is a link into the Python that it was made from, which may have been removed since.
    made = (folder / COMPLETE).is_file() and (folder / "bin/python").exists()
    return [str(path) for path in folder.glob("lib/python*/site-packages")] if made else []
