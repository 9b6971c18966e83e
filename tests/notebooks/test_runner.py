"""The runner on a toy notebook: what it publishes, what is left when a cell fails, and that no kernel outlives it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from steptime import notebook
from steptime.core.errors import InputError

HEAD = (
    '# %% [markdown]\n# # A toy\n\n# %% tags=["parameters"]\nout: str = ""\nlevel: int = 1\nrate: float = 0.5\n\n# %%\n'
)
IMPORTS = """import os, sys, time, warnings
from steptime.core.errors import InputError
from steptime.core.files import project_root, write_text
from steptime.notebook import out_folder, progress
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A checkout with nothing but the notebook `toy`."""
    root = tmp_path / "a toy"
    (root / "lib/steptime").mkdir(parents=True)
    (root / "notebooks/text").mkdir(parents=True)
    (root / "dvc.yaml").touch()
    (root / "params.yaml").write_text("size: quick\nquick: {toy: {level: 2, rate: 1}}\nfull: {}\n")
    return root


def write(root: Path, code: str) -> None:
    (root / "notebooks/text/10_toy.py").write_text(f"{HEAD}{IMPORTS}{code}\n")


def run(root: Path) -> list[str]:
    """Run the toy; what it said on stderr."""
    lines: list[str] = []
    notebook.run(root, "toy", lines.append)
    return lines


def test_outs_go_where_the_pipeline_declares_them_and_replace_the_old(toy: Path) -> None:
    old = toy / "data/derived/toy/old.csv"
    old.parent.mkdir(parents=True)
    old.touch()
    write(
        toy,
        "folder = out_folder(out, 'toy')\n"
        "for name in ('derived/a.csv', 'derived/claims/toy.json', 'figures/a.svg', 'raw/runs.csv'):\n"
        "    write_text(folder / name, f'{level}')",
    )
    run(toy)
    data = toy / "data"
    assert [(data / name).read_text() for name in ("derived/toy/a.csv", "derived/claims/toy.json")] == ["2", "2"]
    assert [(data / name).read_text() for name in ("figures/toy/a.svg", "raw/toy/runs.csv")] == ["2", "2"]
    assert not old.exists()
    assert not (data / "derived/toy/claims").exists()


def test_two_runs_publish_the_same_bytes_with_no_trace_of_place_or_time(toy: Path) -> None:
    write(
        toy,
        "print(project_root(), object(), sep='|'); print('b', flush=True); time.sleep(0.3); print('c')\n"
        "warnings.warn('to the log')\nprogress('half way 1/2')\n"
        "print(sys.executable == " + repr(sys.executable) + ", os.environ['PYTHONHASHSEED'])\n"
        "{str(n) for n in range(20)}, object()",
    )
    published = []
    for _ in range(2):
        assert "half way 1/2" in run(toy)
        published.append((toy / "data/reports/notebooks/10_toy.ipynb").read_text())
    assert published[0] == published[1]
    node = nbformat.reads(published[0], as_version=4)
    nbformat.validate(node)
    stream, result = node.cells[-1].outputs
    assert stream.text == ".|<object object>\nb\nc\nTrue 0\n"
    assert "<object>" in result.data["text/plain"]
    outputs = str([cell.get("outputs") for cell in node.cells])
    for trace in (str(toy), " at 0x", "half way", "to the log", "ipykernel"):
        assert trace not in outputs
    assert {key for cell in node.cells for key in cell.metadata} == {"tags"}
    assert list(node.metadata) == ["kernelspec"]


def test_a_user_s_own_kernelspec_of_the_same_name_is_not_used(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = toy / "jupyter/kernels/python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text('{"argv": ["/bin/false"], "display_name": "other", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(toy / "jupyter"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(toy / "jupyter"))
    write(toy, f"assert sys.executable == {sys.executable!r}")
    run(toy)


def test_a_failing_cell_is_named_with_its_last_lines_and_the_run_s_copy(toy: Path) -> None:
    write(toy, "first = 1\nwrite_text(out_folder(out, 'toy') / 'derived/half.csv', '')\nfirst / 0")
    with pytest.raises(notebook.NotebookFailed) as failure:
        run(toy)
    said = str(failure.value)
    assert "ZeroDivisionError" in said
    assert "    first / 0" in said
    assert "data/.runs/toy.ipynb" in said
    assert "Traceback" in (toy / "data/.runs/toy.ipynb").read_text()
    assert not (toy / "data/derived").exists()
    assert not (toy / "data/reports").exists()


def test_bad_input_found_inside_a_notebook_is_still_one_line(toy: Path) -> None:
    write(toy, "raise InputError('a.csv: line 3: wrong')")
    with pytest.raises(InputError, match=r"^a.csv: line 3: wrong$"):
        run(toy)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ("{level: 2}", "missing: rate"),
        ("{level: 2, rate: 1, lvl: 3}", "unknown: lvl"),
        ("{level: 2.5, rate: 1}", "quick.toy.level = 2.5: must be of type int"),
        ("{level: true, rate: 1}", "quick.toy.level = True: must be of type int"),
        ("[level]", "quick.toy = ['level']"),
    ],
)
def test_parameters_that_do_not_fit_stop_before_a_kernel(toy: Path, params: str, said: str) -> None:
    write(toy, "1 / 0")
    (toy / "params.yaml").write_text(f"size: quick\nquick: {{toy: {params}}}\n")
    with pytest.raises(InputError) as error:
        run(toy)
    assert said in str(error.value)
    assert not (toy / "data").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_kernel_outlives_the_runner(toy: Path, number: signal.Signals) -> None:
    write(toy, "write_text(project_root() / 'pid', str(os.getpid()))\ntime.sleep(600)")
    code = f"from pathlib import Path; from steptime import notebook; notebook.run(Path({str(toy)!r}), 'toy', print)"
    runner = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    pid = toy / "pid"
    while not pid.exists() and runner.poll() is None:
        time.sleep(0.05)
    kernel = psutil.Process(int(pid.read_text()))
    os.kill(runner.pid, number)
    runner.wait(timeout=60)
    psutil.wait_procs([kernel], timeout=60)
    assert not kernel.is_running()


HOLDER = """
import sys
from steptime import notebook
with notebook._short_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_what_killed_runners_leave_is_removed_and_what_is_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are old; the one whose runner lives is locked, which a fresh folder may not be yet."""
    place = Path(tempfile.mkdtemp(prefix="t"))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER], env=os.environ | {"TMPDIR": str(place)}, **pipes)
        for _ in range(2)
    ]
    try:
        killed, living = [Path(holder.stdout.readline().strip()) for holder in holders]
        (killed / "k-1").touch()
        holders[0].kill()
        holders[0].wait()
        fresh, other = place / f"{notebook.SOCKETS}fresh", place / "thesis"
        fresh.mkdir()
        other.mkdir()
        (place / f"{notebook.SOCKETS}link").symlink_to(other)
        for folder in (killed, living, other):
            os.utime(folder, (0, 0))
        with notebook._short_folder() as own:
            assert Path(own).is_dir()
            assert not killed.exists()
            assert living.is_dir()
            assert fresh.is_dir()
            assert other.is_dir()
        assert not Path(own).exists()
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
        shutil.rmtree(place)
