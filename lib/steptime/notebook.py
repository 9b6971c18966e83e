"""One stage = one notebook = one question: check its parameters, run it, put what it made where dvc.yaml says.

A notebook's text (`notebooks/text/NN_NAME.py`, jupytext percent) is what runs. It writes below the folder `out`, which
only the runner passes: `out/raw`, `out/derived`, `out/figures`. What it prints on stderr (progress, warnings) goes to
the stage's log and not into the published notebook.
"""

import ast
import fcntl
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from steptime.core.campaign import campaign_folders
from steptime.core.errors import InputError
from steptime.core.files import project_root, read_text, read_yaml, write_text

# Importing nbformat builds a parser for international addresses, which takes two seconds and which no notebook needs;
# jsonschema does without when it cannot be imported.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

SIZES = ("quick", "full")
ABOVE_ZERO = {"workers", "memory_gib"}
"""Parameters of the derived notebooks that are a number above 0, or a list of some."""
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
RUNS = Path("data/.runs")
SOCKETS = "steptime-run-"
"""How the temporary folders of the kernels' sockets are called."""
LEFT_AFTER_S = 60.0

# ipykernel names the file of a cell after its process id unless told otherwise; the other two make figures and
# sets come out alike in every run.
KERNEL_ENVIRONMENT = {"IPYKERNEL_CELL_NAME": "<cell>", "SOURCE_DATE_EPOCH": "0", "PYTHONHASHSEED": "0"}

# A kernel has a session of its own, so a signal to the runner's group misses it: let it die with the runner
# (prctl PR_SET_PDEATHSIG, SIGKILL), at once, so that the next measurement is not refused because of it.
_LAUNCH = (
    "import ctypes, runpy, sys; "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9); "
    "runpy.run_module('ipykernel_launcher', run_name='__main__')"
)

_TYPES = {"bool": bool, "int": int, "float": float, "str": str, "list": list, "dict": dict}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{6,}")


class NotebookFailed(RuntimeError):
    """A notebook raised; the message names the cell, the run's copy with the traceback, and the cell's last lines."""


# ------------------------------------------------------------------------------------------ for use inside notebooks


def out_folder(out: str, name: str) -> Path:
    """The folder that notebook `name` writes to: what the runner passed, or data/.scratch/NAME when run by hand."""
    folder = project_root() / (out or f"data/.scratch/{name}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def progress(line: str) -> None:
    """Show a line of a long stage: in the runner's log, or below the cell when the notebook is run by hand."""
    print(line, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ reading a notebook


def text_notebooks(root: Path) -> dict[str, Path]:
    """The text of every notebook by name: measure -> notebooks/text/20_measure.py."""
    return {path.stem.partition("_")[2]: path for path in sorted(Path(root).glob("notebooks/text/[0-9]*_*.py"))}


def read_notebook(text: str) -> Any:
    """The notebook (nbformat node) in a jupytext percent text; cell ids follow from the position alone."""
    import jupytext

    node = jupytext.reads(text, fmt="py:percent")
    node.nbformat, node.nbformat_minor = 4, 5
    node.metadata = type(node.metadata)(kernelspec=dict(KERNELSPEC))
    for number, cell in enumerate(node.cells, start=1):
        cell.id = f"cell-{number:02d}"
        tags = cell.metadata.get("tags")
        cell.metadata = type(cell.metadata)(tags=tags) if tags else type(cell.metadata)()
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return node


def declared_parameters(node: Any, source: str) -> dict[str, str]:
    """The parameters cell's names with their annotations. Raises InputError unless there is exactly one such cell."""
    cells = [cell for cell in node.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise InputError(f"{source}: {len(cells)} cells are tagged 'parameters'; tag exactly one")
    found = {}
    for statement in ast.parse(cells[0].source).body:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value):
            raise InputError(f"{source}: parameters cell: {ast.unparse(statement)!r}: write it as name: type = default")
        found[statement.target.id] = ast.unparse(statement.annotation)
    if next(iter(found), None) != "out":
        raise InputError(f'{source}: parameters cell: the first parameter must be out: str = ""')
    return found


# -------------------------------------------------------------------------------------------- checks before any kernel


def stage_parameters(root: Path, name: str, size: str | None = None) -> dict[str, Any]:
    """The values that params.yaml gives notebook `name` at `size` (None: the chosen one), names and types checked.

    Raises InputError naming both lists when a name is unknown or missing.
    """
    notebooks = text_notebooks(root)
    if name not in notebooks:
        raise InputError(f"run: unknown notebook {name!r}; known: {', '.join(notebooks)}")
    source = notebooks[name].relative_to(root).as_posix()
    declared = declared_parameters(read_notebook(read_text(notebooks[name])), source)
    section, key = _section(root, name, tuple(notebooks), size)
    expected = [parameter for parameter in declared if parameter != "out"]
    unknown, missing = sorted(set(section) - set(expected)), sorted(set(expected) - set(section))
    if unknown or missing:
        raise InputError(
            f"params.yaml: {key}: unknown: {', '.join(map(str, unknown)) or 'none'}; "
            f"missing: {', '.join(missing) or 'none'} (the parameters of {source}: {', '.join(expected)})"
        )
    for parameter, value in section.items():
        _check_type(f"params.yaml: {key}.{parameter}", value, declared[parameter])
    return section


def _section(root: Path, name: str, known: tuple[str, ...], size: str | None) -> tuple[dict[str, Any], str]:
    """The mapping params.yaml[size][name] and its dotted key."""
    params = read_yaml(root / "params.yaml")
    if not isinstance(params, dict):
        raise InputError("params.yaml: expected a mapping of keys to values; compare it with the committed one")
    stray = sorted(str(key) for key in params if key not in ("size", *SIZES))
    if stray:
        raise InputError(f"params.yaml: unknown key {stray[0]!r}; known here: size, {', '.join(SIZES)}")
    size = params.get("size") if size is None else size
    if size not in SIZES:
        raise InputError(f"params.yaml: size = {size!r}: must be one of {', '.join(SIZES)}")
    sections = params.get(size) or {}
    if not isinstance(sections, dict):
        raise InputError(f"params.yaml: {size} = {sections!r}: must be a mapping of notebooks to their parameters")
    stray = sorted(str(key) for key in sections if key not in known)
    if stray:
        raise InputError(f"params.yaml: {size}: unknown section {stray[0]!r}; the notebooks are {', '.join(known)}")
    section = sections.get(name)
    if section is None:
        raise InputError(f"params.yaml: {size}: section {name!r} is missing; add it")
    if not isinstance(section, dict):
        raise InputError(f"params.yaml: {size}.{name} = {section!r}: must be a mapping of parameters to values")
    return section, f"{size}.{name}"


def _check_type(where: str, value: Any, annotation: str) -> None:
    """Raise InputError unless `value` is of the plain type that the annotation names (its items are checked too)."""
    outer, _, inner = annotation.partition("[")
    kind = _TYPES.get(outer)
    if kind is None:
        raise InputError(f"{where}: the notebook annotates it {annotation!r}; use {', '.join(_TYPES)}")
    fits = isinstance(value, int | float) and math.isfinite(value) if kind is float else isinstance(value, kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise InputError(f"{where} = {value!r}: must be of type {annotation}")
    if isinstance(value, list) and inner:
        for item in value:
            _check_type(where, item, inner.removesuffix("]"))
    if isinstance(value, dict) and inner:
        for item in value.values():
            _check_type(where, item, inner.removesuffix("]").split(",", 1)[1].strip())


def check_parameters(root: Path) -> None:
    """Check every notebook's parameters; DVC deletes a stage's outs before the stage could do it."""
    for name in text_notebooks(root):
        check_values(name, stage_parameters(root, name))


def check_values(name: str, values: dict[str, Any]) -> None:
    """Raise InputError for values that have the right type and no sense."""
    if name == "machine":
        from steptime.measure import check_peaks

        check_peaks(values["threads"], values["seconds"], f"params.yaml: {name}")
    elif name == "measure":
        from steptime.measure import read_plan

        read_plan(values, f"params.yaml: {name}")
        return
    for key in ABOVE_ZERO & set(values):
        items = values[key] if isinstance(values[key], list) else [values[key]]
        if not items or min(items) <= 0:
            raise InputError(f"params.yaml: {name}: {key} = {values[key]!r}: must be above 0, and at least one number")


def check_inputs(root: Path, name: str, values: dict[str, Any]) -> None:
    """Read what notebook `name` is going to read, so that bad input is one line before any kernel starts."""
    check_values(name, values)
    if name in ("machine", "measure"):
        return
    from steptime.core.campaign import read_campaign
    from steptime.core.claims import read_paper
    from steptime.core.machine import read_link, read_machine
    from steptime.core.workers import read_workers, workers_folders
    from steptime.measure import check_names

    for folder in campaign_folders(root).values():
        check_names(read_campaign(folder), folder)
    for folder in workers_folders(root).values():
        check_names(read_workers(folder).campaign, folder)
    for path in sorted((root / "data/published").glob("*.yaml")):
        read_paper(path)
    for path in sorted((root / "data/machines").glob("*.yaml")):
        read_machine(path)
    for path in sorted((root / "data/machines/links").glob("*.yaml")):
        read_link(path.parent, path.stem)


# ------------------------------------------------------------------------------------------------------------ running


def run(root: Path, name: str, log: Callable[[str], None]) -> None:
    """Run notebook `name` with the parameters of params.yaml and write its declared outs.

    `log` receives, line by line, what the notebook prints on stderr. Raises InputError before a kernel starts when the
    input is bad, and NotebookFailed when a cell raises.
    """
    values = stage_parameters(root, name)
    check_inputs(root, name, values)
    source = text_notebooks(root)[name]
    # Relative to the root, which is the kernel's folder: no absolute path reaches the executed notebook.
    staged = RUNS / name
    shutil.rmtree(root / staged, ignore_errors=True)
    executed = _execute(root, name, read_notebook(read_text(source)), {"out": staged.as_posix(), **values}, log)
    _publish(root, name, root / staged)
    report = root / "data/reports/notebooks" / f"{source.stem}.ipynb"
    write_text(report, notebook_text(normalised(executed, root)))


def _execute(root: Path, name: str, node: Any, values: dict[str, Any], log: Callable[[str], None]) -> Any:
    import logging

    import papermill

    logging.getLogger("papermill").setLevel(logging.ERROR)
    copy = root / RUNS / f"{name}.ipynb"
    copy.parent.mkdir(parents=True, exist_ok=True)
    relay = _Lines(log)
    with _kernel_manager() as manager:
        try:
            executed = papermill.execute_notebook(
                node,
                str(copy),
                parameters=values,
                kernel_name="python3",
                km=manager,
                cwd=str(root),
                progress_bar=False,
                coalesce_streams=True,
                autosave_cell_every=0,
                stderr_file=relay,
            )
        except papermill.PapermillExecutionError as error:
            raise _failure(name, error, copy.relative_to(root)) from None
        finally:
            relay.close()
    return executed


def _failure(name: str, error: Any, copy: Path) -> Exception:
    if error.ename == "InputError":
        return InputError(error.evalue)
    last = "\n".join(f"    {line}" for line in error.source.strip().splitlines()[-5:])
    return NotebookFailed(
        f"notebook {name}: cell {error.cell_index} failed: {error.ename}: {error.evalue}\n{last}\n"
        f"  the run's copy, with the traceback: {copy}"
    )


@contextmanager
def _kernel_manager() -> Iterator[Any]:
    """A manager of one ipykernel of *this* interpreter, reached through sockets in a short temporary folder.

    A kernelspec named python3 in the user's home, or python3 on PATH, could be another environment's.
    """
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_client.utils import run_sync

    class ThisInterpreter(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            argv = [sys.executable, "-c", _LAUNCH, "-f", "{connection_file}"]
            return KernelSpec(
                argv=argv, env=dict(KERNEL_ENVIRONMENT), **{k: KERNELSPEC[k] for k in ("display_name", "language")}
            )

    with _short_folder() as folder:
        manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisInterpreter())
        manager.transport, manager.ip = "ipc", f"{folder}/k"
        manager.connection_file = f"{folder}/kernel.json"
        try:
            yield manager
        finally:
            # papermill leaves alone what it did not start.
            if manager.has_kernel:
                run_sync(manager.shutdown_kernel)(now=True)


@contextmanager
def _short_folder() -> Iterator[str]:
    """A temporary folder, locked while it is in use. Those that killed runners left, whose locks went with them, are
    removed first.
    """
    # Socket paths are cut at about 100 characters, and TMPDIR may be long.
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < 60 else "/tmp"
    for path in Path(parent).glob(f"{SOCKETS}*"):
        _remove_if_left(path)
    with tempfile.TemporaryDirectory(prefix=SOCKETS, dir=parent) as folder:
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield folder
        finally:
            os.close(handle)


def _remove_if_left(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # gone since, or another user's
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A younger one may be about to be locked.
        if time.time() - os.fstat(handle).st_mtime > LEFT_AFTER_S:
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass  # in use
    finally:
        os.close(handle)


class _Lines:
    """A text file that hands whole lines to `log`."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log, self._rest = log, ""

    def write(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(str.strip, lines):
            self._log(line)

    def flush(self) -> None:
        """Lines are handed on as they end."""

    def close(self) -> None:
        self.write("\n")


def _publish(root: Path, name: str, staged: Path) -> None:
    """Move what the notebook wrote to the places that dvc.yaml declares, replacing what was there."""
    raw = root / "data/raw" / {"machine": "machine", "measure": "local"}.get(name, name)
    claims = staged / "derived/claims"
    for file in sorted(claims.glob("*.json")):
        target = root / "data/derived/claims" / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)
    shutil.rmtree(claims, ignore_errors=True)
    for kind, target in (
        ("raw", raw),
        ("derived", root / "data/derived" / name),
        ("figures", root / "data/figures" / name),
    ):
        if not (staged / kind).is_dir() or not any((staged / kind).iterdir()):
            continue
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        (staged / kind).replace(target)
    shutil.rmtree(staged, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ what is published


def normalised(node: Any, root: Path) -> Any:
    """An executed notebook without what differs from run to run: metadata, ids, counts, addresses, paths, stderr."""
    from nbformat import from_dict

    cells = []
    for number, cell in enumerate(node.cells, start=1):
        tags = cell.metadata.get("tags")
        new: dict[str, Any] = {
            "cell_type": cell.cell_type,
            "id": f"cell-{number:02d}",
            "metadata": {"tags": tags} if tags else {},
            "source": cell.source,
        }
        if cell.cell_type == "code":
            outputs = [_normalised_output(output, root) for output in cell.outputs if output.get("name") != "stderr"]
            new |= {"execution_count": None, "outputs": outputs}
        cells.append(new)
    return from_dict({"cells": cells, "metadata": {"kernelspec": dict(KERNELSPEC)}, "nbformat": 4, "nbformat_minor": 5})


def _normalised_output(output: Any, root: Path) -> dict[str, Any]:
    if output.output_type == "stream":
        return {"output_type": "stream", "name": output.name, "text": _stable(output.text, root)}
    data = {
        kind: _stable(value, root) if isinstance(value, str) and not kind.startswith("image/png") else value
        for kind, value in sorted(output.data.items())
        if not kind.startswith("application/vnd.jupyter.widget")
    }
    new = {"output_type": output.output_type, "data": data, "metadata": {}}
    return new | ({"execution_count": None} if output.output_type == "execute_result" else {})


def _stable(text: str, root: Path) -> str:
    return _ADDRESS.sub("", text.replace(f"{root}/", "").replace(str(root), "."))


def notebook_text(node: Any) -> str:
    """The notebook as the bytes of an .ipynb file."""
    import nbformat

    return nbformat.writes(node, version=nbformat.NO_CONVERT, indent=1, sort_keys=True).rstrip("\n") + "\n"
