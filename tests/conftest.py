"""Shared by all tests: where the checkout is, a copy of it with a tiny study, and how to run commands in one."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ["machine", "measure"]
DERIVED = [
    "fit",
    "predict",
    "board",
    "simulator",
    "parallelism",
    "planning",
    "trace",
    "single_device",
    "dlbench",
    "cpu_vs_gpu",
    "choosing",
    "bcaffe",
    "firecaffe",
    "chainermn",
    "poseidon",
    "gradientflow",
    "summary",
    "site",
]
TINY = {
    "quick.machine.seconds": 0.1,
    "quick.measure.frameworks": ["torch"],
    "quick.measure.networks": ["mlp"],
    "quick.measure.dtypes": ["float32"],
    "quick.measure.batch": {"mlp": 8},
    "quick.measure.rounds": 2,
    "quick.measure.min_rounds": 2,
    "quick.measure.samples": 10,
}


RUN_IN_CI = ("mxnet", "cntk")
"""Environments whose frameworks must really run where CI says so (.ci/run sets CI) and their Pythons exist."""


def may_skip(reason: str) -> bool:
    """Is this reason for a skipped test on the list? One that is not fails the session: a test must not fade away."""
    environment = re.search(r"steptime env create ([\w-]+)", reason)
    if environment:
        return not (os.environ.get("CI") and environment[1] in RUN_IN_CI and interpreter_of(environment[1]))
    return any(re.search(pattern, reason) for pattern in ALLOWED_SKIPS)


def interpreter_of(environment: str) -> bool:
    """Whether this machine has the Python that the environment needs."""
    from steptime.frameworks.creation import find_interpreter
    from steptime.frameworks.environments import ENVIRONMENTS

    return find_interpreter(ENVIRONMENTS[environment].python) is not None


ALLOWED_SKIPS = (
    r"apt-get install .*chromium",
    r"apt-get install .*openmpi-bin",
    r"data/reports is not built here",
    r"needs two cores",
    r"making them needs root",
    r"no Python [\d.]+ under",
    r"public measurements are not beside this checkout",
    r"the kernel does not count run delays",
    r"needs an NVIDIA GPU",
    r"no space in this environment's path",
)


class SkipsChecked:
    """Collects why tests were skipped, and fails the session over a reason that is not on the list."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look_at(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_at(report)

    def _look_at(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if not may_skip(reason):
                self.refused[report.nodeid] = reason

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.refused and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid, reason in self.refused.items():
            terminalreporter.write_line(f"REFUSED SKIP {nodeid}: {reason} (not in tests/conftest.py)", red=True)


MEASURING = re.compile(r"pipeline|jupyterlab|cluster_|measure|torch_module|doctor|test_cli|interference")
"""Files of tests that measure: one process at a time may, so one of pytest's processes runs them all."""


class ByFile(LoadFileScheduling):
    """A file's tests, which share its fixtures, stay in one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "measuring" if MEASURING.search(Path(file).name) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.pluginmanager.register(SkipsChecked())


@dataclass(frozen=True)
class Checkout:
    """A copy of the checkout, with commands run by this interpreter's environment on the copy's own code."""

    root: Path

    @property
    def environment(self) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return environment | {"PATH": path, "PYTHONPATH": str(self.root / "lib"), "COLUMNS": "200"}

    def run(self, *command: str, prefix: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
        """Run an entry point of this environment, e.g. ("steptime", "run", "fit"), and capture what it says."""
        executable = str(Path(sys.executable).parent / command[0])
        return subprocess.run(
            [*prefix, executable, *command[1:]],
            cwd=self.root,
            env=self.environment | environment,
            capture_output=True,
            text=True,
        )

    def repro(self, *arguments: str, prefix: tuple[str, ...] = ()) -> list[str]:
        """Run `dvc repro`, which must succeed; the stages that it ran, in the pipeline's order."""
        done = self.run("dvc", "repro", *arguments, prefix=prefix)
        assert done.returncode == 0, done.stdout + done.stderr
        stages = set(re.findall(r"Running stage '(\w+)'", done.stdout))
        return [stage for stage in ("fingerprint", *MEASURED, *DERIVED) if stage in stages]

    def git(self, *arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=self.root, capture_output=True, text=True, check=True
        ).stdout.strip()

    def edit_params(self, **values: object) -> None:
        """Set dotted keys of params.yaml, e.g. edit_params(**{"quick.measure.rounds": 2}); None removes a key."""
        path = self.root / "params.yaml"
        params = yaml.safe_load(path.read_text())
        for dotted, value in values.items():
            *parents, last = dotted.split(".")
            mapping = params
            for key in parents:
                mapping = mapping[key]
            mapping[last] = value
            if value is None:
                del mapping[last]
        path.write_text(yaml.safe_dump(params, sort_keys=False))


def copy_checkout(target: Path) -> Checkout:
    """The files that Git knows or would add, committed in a repository of their own."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    checkout = Checkout(target)
    checkout.git("init", "--quiet", "--initial-branch=main")
    checkout.git("add", "--all")
    checkout.git("-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "--quiet", "--message=copy")
    return checkout


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout under test."""
    return ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A fresh copy of the checkout; nothing has been run in it."""
    return copy_checkout(tmp_path / "checkout")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A tiny study, built once by a bare `dvc repro`; the tests that use it leave it built."""
    checkout = copy_checkout(tmp_path_factory.mktemp("pipeline") / "a checkout")
    checkout.edit_params(**TINY)
    checkout.git("-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "--quiet", "-am", "tiny")
    assert checkout.repro() == ["fingerprint", *MEASURED, *DERIVED]
    return checkout
