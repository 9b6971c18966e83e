"""Who may import whom, and what a bare `import steptime` costs."""

import ast
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

OURS = {
    "core": set(),
    "networks": {"core"},
    "frameworks": {"core"},
    "measure": {"core", "networks", "frameworks"},
    "cluster": {"core", "networks", "frameworks", "measure"},
    "model": {"core", "networks"},
    "traces": {"core"},
    "report": {"core", "model"},
}
# The modules that tie the packages together may import all of them; nothing imports these back.
TOP = {"notebook", "pairs", "doctor", "cli"}
FRAMEWORKS = (
    *("torch", "tensorflow", "jax", "keras"),
    *("caffe", "cntk", "mxnet", "chainer", "theano", "onnx", "onnxruntime", "h2o"),
)
PROGRAMS = ("boot", "exchanges", "gloo", "ranks", "replay", "training")
OTHERS = {
    "core": {"numpy", "pandas", "pandera", "pydantic", "yaml", "scipy"},
    "networks": {"numpy", "pydantic"},
    "frameworks": {"numpy", "pynvml", "PIL", "jpegs", "worker", "adapters"},
    "measure": {"numpy", "pandas", "pandera", "pydantic", "scipy"},
    "cluster": {"numpy", "pandas", "pandera", "pydantic", "mpi4py", "chainermn", *PROGRAMS},
    "model": {"numpy", "pandas", "pandera", "pydantic", "scipy"},
    "traces": {"numpy", "pandas", "orjson"},
}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("steptime", include_external_packages=True, cache_dir=None)


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_package_is_in_the_table(graph: grimp.ImportGraph) -> None:
    assert {package_of(child) for child in graph.find_children("steptime")} == set(OURS) | TOP


@pytest.mark.parametrize("package", OURS)
def test_a_package_imports_only_what_the_table_allows(graph: grimp.ImportGraph, package: str) -> None:
    modules = {f"steptime.{package}"} | graph.find_descendants(f"steptime.{package}")
    imported = {target for module in modules for target in graph.find_modules_directly_imported_by(module)}
    ours = {package_of(name) for name in imported if name.startswith("steptime.")} - {package}
    assert ours <= OURS[package]
    external = {name for name in imported if not name.startswith("steptime")} - set(sys.stdlib_module_names)
    if package in OTHERS:
        # The ranks' programs are run by their paths, each in a process of its own.
        adapters = {"frameworks": set(FRAMEWORKS), "cluster": set(FRAMEWORKS)}.get(package, set())
        assert external <= OTHERS[package] | adapters


def test_the_files_that_run_under_other_interpreters_import_nothing_of_ours(root: Path) -> None:
    folder = root / "lib/steptime/frameworks"
    files = [folder / "worker.py", folder / "jpegs.py", *folder.glob("adapters/*.py")]
    files += (root / "lib/steptime/cluster/programs").glob("*.py")
    assert len(files) >= 3
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(), feature_version=(3, 7))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file.name}: relative import"
                names = [node.module or ""]
            assert not [name for name in names if name.split(".")[0] == "steptime"], file.name


@pytest.mark.parametrize("statement", ["import steptime", "import steptime.cli"])
def test_a_bare_import_loads_nothing_heavy(statement: str) -> None:
    heavy = (*FRAMEWORKS, "pandas", "numpy", "scipy", "matplotlib", "papermill", "pydantic", "steptime.core.files")
    code = f"import sys; {statement}; print(*[name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


@pytest.mark.parametrize("package", ["measure", "networks", "model", "traces", "frameworks"])
def test_the_study_never_loads_a_framework_into_its_own_process(package: str) -> None:
    code = f"import sys, steptime.{package}; print(*[name for name in {FRAMEWORKS!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []
