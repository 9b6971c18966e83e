"""What Git holds: notebooks in equal pairs without outputs, parameters and stages that fit them, no private names."""

import getpass
import re
import socket
import subprocess
import tomllib
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from steptime import notebook, pairs
from steptime.core.errors import InputError
from steptime.core.files import read_text


@pytest.fixture(scope="module")
def stages(root: Path) -> dict:
    return yaml.safe_load(read_text(root / "dvc.yaml"))["stages"]


def tracked(root: Path) -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [root / name for name in names.split("\0") if name and (root / name).is_file()]


def test_pairs_are_equal_and_without_outputs(root: Path) -> None:
    assert pairs.faults(root) == []
    assert len(pairs.pairs(root)) >= 5


def test_one_stage_a_notebook_and_one_section_a_size(root: Path, stages: dict) -> None:
    names = list(notebook.text_notebooks(root))
    assert [name for name in stages if name not in ("fingerprint", "site")] == names
    params = yaml.safe_load(read_text(root / "params.yaml"))
    for size in notebook.SIZES:
        assert list(params[size]) == names
    for name in names:
        assert stages[name]["cmd"] == f"steptime run {name}"
        assert stages[name]["params"] == [f"${{size}}.{name}"]


@pytest.mark.parametrize("size", notebook.SIZES)
def test_the_parameters_of_both_sizes_fit_the_notebooks(root: Path, size: str, tmp_path: Path) -> None:
    params = yaml.safe_load(read_text(root / "params.yaml")) | {"size": size}
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/text").symlink_to(root / "notebooks/text")
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    for name in notebook.text_notebooks(tmp_path):
        values = notebook.stage_parameters(tmp_path, name)
        assert values == params[size][name]
        if name == "measure":
            notebook.check_inputs(tmp_path, name, values)


def test_measured_outs_are_never_cached(stages: dict) -> None:
    """A cached out would let DVC's run cache bring another machine's timings back."""
    for name in ("fingerprint", "machine", "measure"):
        assert all(
            isinstance(out, dict) and next(iter(out.values())) == {"cache": False} for out in stages[name]["outs"]
        )


def test_measuring_depends_on_its_code_and_on_nothing_of_the_report(stages: dict) -> None:
    for name in ("machine", "measure"):
        code = {dep for dep in stages[name]["deps"] if dep.startswith("lib/steptime")}
        assert {"lib/steptime/core", "lib/steptime/measure", "lib/steptime/networks"} <= code
        assert not [dep for dep in code if "report" in dep or "model" in dep]


def test_derived_stages_depend_on_every_package_that_their_notebook_imports(root: Path, stages: dict) -> None:
    for name, path in notebook.text_notebooks(root).items():
        if name in ("machine", "measure"):
            continue
        deps = stages[name]["deps"]
        for package in set(re.findall(r"^(?:from|import) steptime\.?(\w*)", read_text(path), re.MULTILINE)) - {
            "",
            "notebook",
        }:
            assert any(dep.startswith(f"lib/steptime/{package}") for dep in deps), f"{name}: {package}"


def test_the_site_stage_declares_a_page_for_every_notebook(root: Path, stages: dict) -> None:
    for name, path in notebook.text_notebooks(root).items():
        assert f"data/reports/{name}.html" in stages["site"]["outs"]
        assert f"data/reports/notebooks/{path.stem}.ipynb" in stages["site"]["deps"]


def test_nothing_in_git_names_this_host_its_user_or_a_path_of_theirs(root: Path) -> None:
    words = {str(Path.home()) + "/", str(root) + "/"}
    words |= {word for word in (socket.gethostname(), getpass.getuser()) if len(word) > 4}
    for path in tracked(root):
        if path.suffix in (".csv", ".json", ".yaml", ".md", ".py", ".ipynb", ".lock"):
            text = path.read_text(encoding="utf-8")
            assert not [word for word in words if word in text], path


def test_the_lock_holds_exact_versions_of_what_pyproject_asks_for(root: Path) -> None:
    lines = [line for line in read_text(root / "lib/locks/cpu.txt").splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    locked = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines}
    project = tomllib.loads(read_text(root / "lib/pyproject.toml"))["project"]
    asked = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    assert {re.split(r"[=<>]", name)[0].lower() for name in asked} <= locked


def test_the_locked_packages_run_on_every_python_3_11() -> None:
    """Debian 12 has 3.11.2, and some packages ask for a later one."""
    asked = {found.metadata["Name"]: found.metadata["Requires-Python"] for found in distributions()}
    late = {name: wanted for name, wanted in asked.items() if wanted and not SpecifierSet(wanted).contains("3.11.0")}
    assert late == {}


class TestSync:
    """Pairs in a folder of their own: which side wins."""

    TEXT = '# %% [markdown]\n# # Question\n\n# %% tags=["parameters"]\nout: str = ""\n\n# %%\n1 + 1\n'

    @pytest.fixture
    def pair(self, tmp_path: Path) -> pairs.Pair:
        (tmp_path / "notebooks/text").mkdir(parents=True)
        pair = pairs.Pair(tmp_path / "notebooks/text/10_x.py", tmp_path / "notebooks/10_x.ipynb")
        pair.text.write_text(self.TEXT)
        assert pairs.sync(tmp_path) == ["10_x: taken from the text"]
        return pair

    def test_a_synced_pair_stays_as_it_is(self, pair: pairs.Pair, tmp_path: Path) -> None:
        before = pair.ipynb.read_bytes()
        assert pairs.sync(tmp_path) == []
        assert (pair.text.read_text(), pair.ipynb.read_bytes()) == (self.TEXT, before)

    def test_an_edit_on_either_side_wins(self, pair: pairs.Pair, tmp_path: Path) -> None:
        pair.text.write_text(self.TEXT.replace("1 + 1", "2 + 2"))
        assert pairs.sync(tmp_path) == ["10_x: taken from the text"]
        pair.ipynb.write_text(pair.ipynb.read_text().replace("2 + 2", "3 + 3"))
        assert pairs.sync(tmp_path) == ["10_x: taken from the ipynb"]
        assert "3 + 3" in pair.text.read_text()

    def test_edits_on_both_sides_are_one_line_and_change_nothing(self, pair: pairs.Pair, tmp_path: Path) -> None:
        pair.text.write_text(self.TEXT.replace("1 + 1", "2 + 2"))
        pair.ipynb.write_text(pair.ipynb.read_text().replace("1 + 1", "3 + 3"))
        with pytest.raises(InputError, match="--prefer") as error:
            pairs.sync(tmp_path)
        assert "\n" not in str(error.value)
        assert pairs.sync(tmp_path, prefer="ipynb") == ["10_x: taken from the ipynb"]
        assert "3 + 3" in pair.text.read_text()

    def test_outputs_are_found_and_taken_out(self, pair: pairs.Pair, tmp_path: Path) -> None:
        clean = pair.ipynb.read_text()
        pair.ipynb.write_text(clean.replace('"execution_count": null', '"execution_count": 7'))
        assert pairs.faults(tmp_path) == ["10_x: the .ipynb holds outputs or metadata; run make clean-notebooks"]
        assert pairs.strip(tmp_path) == ["10_x"]
        assert pair.ipynb.read_text() == clean
