"""The frameworks' own environments: made whole or not at all, with planted recipes and a package made on the spot."""

import base64
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from steptime.cli import cli
from steptime.core import packages
from steptime.core.errors import InputError
from steptime.core.packages import SystemPackage, system_packages
from steptime.frameworks import Setting, creation, environments, installed_version, settings
from steptime.frameworks.environments import ENVIRONMENTS, LOCKS, Environment

HERE = ".".join(map(str, sys.version_info[:2]))


def make_wheel(folder: Path, version: str) -> None:
    """The package `tinyframework` as pip finds it."""
    info = f"tinyframework-{version}.dist-info"
    files = {
        "tinyframework.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tinyframework\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    with zipfile.ZipFile(folder / f"tinyframework-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(text)}\n")
        wheel.writestr(f"{info}/RECORD", "".join([*rows, f"{info}/RECORD,,\n"]))


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One recipe, "tiny", whose only package is a local wheel; the folder's name has a space. No index is asked."""
    place = tmp_path / "a place"
    for folder in ("wheels", "locks", "envs"):
        (place / folder).mkdir(parents=True)
    make_wheel(place / "wheels", "1.5")
    make_wheel(place / "wheels", "1.6")
    (place / "locks/tiny.txt").write_text("# one package\ntinyframework==1.5\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", (place / "wheels").as_uri())
    monkeypatch.setattr(environments, "FOLDER", place / "envs")
    monkeypatch.setattr(creation, "LOCKS", place / "locks")
    for name in list(ENVIRONMENTS):
        monkeypatch.delitem(ENVIRONMENTS, name)
    monkeypatch.setitem(ENVIRONMENTS, "tiny", Environment("tiny", "1.5", HERE, (), {"WHERE": "{folder}/there"}))
    setting = Setting("tiny", Path("x.py"), ("tinyframework",), "eager", environment="tiny")
    monkeypatch.setitem(settings.SETTINGS, "tiny", setting)
    return place


def run(*arguments: str) -> tuple[int, str]:
    """(exit status, what was said) of the command, where bad input is one line and 2 as in `main`."""
    done = CliRunner().invoke(cli, ["env", *arguments])
    if isinstance(done.exception, InputError):
        return 2, f"{done.exception}\n"
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_an_environment_is_made_listed_and_left_alone(planted: Path) -> None:
    assert installed_version("tiny") is None
    status, said = run("list")
    assert (status, "not made; mend: steptime env create tiny" in said) == (0, True)
    status, said = run("create", "tiny")
    assert status == 0
    assert said.splitlines()[-1] == "tiny: complete"
    folder = planted / "envs/tiny"
    version = [folder / "bin/python", "-c", "import tinyframework; print(tinyframework.__version__)"]
    assert subprocess.run(version, capture_output=True, text=True, check=True).stdout == "1.5\n"
    assert installed_version("tiny") == "1.5"
    assert "tinyframework==1.5" in (planted / "envs/tiny.log").read_text()
    before = (folder / "complete").stat().st_mtime_ns
    assert run("create", "--all") == (0, "tiny: complete\n")
    assert (folder / "complete").stat().st_mtime_ns == before
    assert run("list")[1].split() == ["tiny", "1.5", "Python", HERE, "complete"]


def test_a_changed_recipe_makes_it_anew(planted: Path) -> None:
    run("create", "tiny")
    (planted / "envs/tiny/left-over").touch()
    (planted / "locks/tiny.txt").write_text("tinyframework==1.6\n")
    assert "half made" in run("list")[1]
    assert run("create", "tiny")[0] == 0
    assert installed_version("tiny") == "1.6"
    assert not (planted / "envs/tiny/left-over").exists()


def test_a_failed_step_names_its_last_words_and_the_log_and_is_not_complete(planted: Path) -> None:
    script = planted / "locks/tiny.sh"
    script.write_text("echo '[ 37%] Building'\necho the reason\nexit 7\n")
    status, said = run("create", "tiny")
    assert status == 1
    assert "tiny: tiny.sh: 30 %" in said
    assert said.splitlines()[-1] == (
        f"steptime: tiny: tiny.sh: failed with status 7: the reason; log: {planted}/envs/tiny.log"
    )
    assert installed_version("tiny") is None
    assert "half made; mend: steptime env create tiny" in run("list")[1]


def test_an_interrupted_one_goes_on_where_it_was(planted: Path) -> None:
    """Interrupted in its last step: the packages stay; a package without RECORD is installed again."""
    script = planted / "locks/tiny.sh"
    script.write_text('[[ -e "$TINY_READY" ]] || kill -9 $PPID; touch built\n')
    code = (
        "import sys; from pathlib import Path; import test_environments as t\n"
        "from steptime.frameworks import creation, environments\n"
        "place = Path(sys.argv[1]); environments.FOLDER = place / 'envs'; creation.LOCKS = place / 'locks'\n"
        "environments.ENVIRONMENTS['tiny'] = t.Environment('tiny', '1.5', t.HERE)\n"
        "creation.create_environment('tiny', print)\n"
    )
    command = [sys.executable, "-c", code, str(planted)]
    marker = planted / "ready"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "TINY_READY": str(marker)}
    assert subprocess.run(command, env=environment, capture_output=True).returncode == -signal.SIGKILL
    assert installed_version("tiny") is None
    (packages,) = (planted / "envs/tiny").glob("lib/python*/site-packages")
    (packages / "tinyframework-1.5.dist-info/RECORD").unlink()
    (packages / "tinyframework.py").unlink()
    (packages / "~inyframework").mkdir()
    kept = packages / "kept"
    kept.touch()
    marker.touch()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "made anew" not in done.stdout
    assert kept.exists()
    assert (packages / "tinyframework.py").exists()
    assert not (packages / "~inyframework").exists()
    assert (planted / "envs/tiny/built").exists()
    assert installed_version("tiny") == "1.5"


def test_two_at_once_make_it_once(planted: Path) -> None:
    (planted / "locks/tiny.sh").write_text("sleep 1; echo once >>../count\n")
    said: list[str] = []
    threads = [threading.Thread(target=creation.create_environment, args=("tiny", said.append)) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert (planted / "envs/count").read_text() == "once\n"
    assert said.count("complete") == 2
    assert "is being made by another process: waiting for its end" in said
    assert installed_version("tiny") == "1.5"


def test_a_missing_interpreter_is_one_line_with_the_command(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "tiny", Environment("tiny", "1.5", "3.99"))
    reason = "Python 3.99 is neither on PATH nor under pyenv"
    assert run("create", "tiny") == (2, f"steptime: tiny: {reason}; mend it: pyenv install 3.99\n")
    status, said = run("list")
    assert status == 0
    assert said.rstrip().endswith(f"cannot be made here: {reason}; mend: pyenv install 3.99")


def test_missing_system_packages_are_one_line_with_the_command(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "tiny", Environment("tiny", "1.5", HERE, ("cmake", "libhdf5-dev")))
    monkeypatch.setattr(SystemPackage, "found", None)
    status, said = run("create", "tiny")
    assert (status, said.count("\n")) == (2, 1)
    assert "system packages are missing: cmake, libhdf5-dev; mend it: " in said
    assert said.endswith("apt-get install -y cmake libhdf5-dev\n")


def test_what_is_asked_for_must_be_known(planted: Path) -> None:
    assert run("create", "torch7") == (2, "environment = 'torch7': unknown; known: tiny\n")
    assert run("create")[0] == 2
    assert run("create", "tiny", "--all")[0] == 2


def test_pyenvs_stand_ins_do_not_count_as_interpreters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PATH a program of the right name that says it is not there; under pyenv two versions, the newest wins."""
    (tmp_path / "shims").mkdir()
    programs = [tmp_path / "shims/python3.77"]
    for version in ("3.77.9", "3.77.10"):
        programs.append(tmp_path / f"pyenv/versions/{version}/bin/python")
        programs[-1].parent.mkdir(parents=True)
    for program, text in zip(programs, ("exit 127", "echo 3.77; echo $0", "echo 3.77; echo $0"), strict=True):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("PATH", f"{tmp_path}/shims:{os.environ['PATH']}")
    assert creation.find_interpreter("3.77") == programs[2]
    assert creation.find_interpreter("3.78") is None


def test_a_program_that_the_children_start_and_is_gone_is_one_line_with_the_command(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H2O's environment without Java: made, and of no use."""
    assert run("create", "tiny")[0] == 0
    assert settings.missing_packages("tiny") is None
    java = SystemPackage("openjdk-17-jre-headless", "no-such-java", "H2O", "vintage")
    monkeypatch.setattr(packages, "system_packages", lambda root: [java])
    recipe = Environment("tiny", "1.5", HERE, runs_with=("openjdk-17-jre-headless",))
    monkeypatch.setitem(ENVIRONMENTS, "tiny", recipe)
    said = settings.missing_packages("tiny")
    assert said is not None
    assert said.startswith("system packages are missing: openjdk-17-jre-headless: ")
    assert said.endswith("apt-get install -y openjdk-17-jre-headless")
    status, line = run("list")
    assert status == 0
    assert "complete: system packages are missing: openjdk-17-jre-headless; mend: " in line


def test_h2o_starts_java() -> None:
    assert settings.SETTINGS["h2o"].environment == "h2o"
    assert ENVIRONMENTS["h2o"].runs_with == ("openjdk-17-jre-headless",)


def test_a_child_gets_the_recipes_variables_and_no_packages_from_outside(planted: Path) -> None:
    found = ENVIRONMENTS["tiny"].variables()
    assert found == {"WHERE": f"{planted}/envs/tiny/there", "PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
    assert settings.SETTINGS["tiny"].interpreter == planted / "envs/tiny/bin/python"


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_recipe_locks_every_package_and_names_known_system_packages(name: str, root: Path) -> None:
    lines = (LOCKS / f"{name}.txt").read_text().splitlines()
    assert lines
    assert all(line.count("==") == 1 for line in lines if not line.startswith("#"))
    assert {"pip", "setuptools", "wheel"} <= {line.partition("==")[0] for line in lines}
    assert set(ENVIRONMENTS[name].packages) <= {package.name for package in system_packages(root)}
    assert set(ENVIRONMENTS[name].runs_with) <= set(ENVIRONMENTS[name].packages)
    distributions = [
        names
        for setting in settings.SETTINGS.values()
        if setting.environment == name
        for names in setting.distributions
    ]
    if distributions and name != "caffe":
        version = ENVIRONMENTS[name].version
        assert any(line.lower().startswith(f"{one}=={version}") for one in distributions for line in lines)
