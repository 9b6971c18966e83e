"""Every notebook run by hand: with its defaults, from its own folder, in the tiny study."""

from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, Checkout
from nbclient import NotebookClient

NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_with_its_defaults_and_touches_only_the_scratch_folder(
    built: Checkout, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(built.root / "lib"))
    folder = built.root / "notebooks"
    before = listing(built.root)
    node = nbformat.read(folder / name, as_version=4)
    NotebookClient(node, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    assert listing(built.root) == before
    assert any(cell.get("outputs") for cell in node.cells)


def listing(root: Path) -> dict[Path, int]:
    """Every file outside the scratch folder and the caches, with the time of its last change."""
    ignored = {".scratch", "__pycache__", ".git", ".dvc"}
    return {
        path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file() and not ignored & set(path.parts)
    }
