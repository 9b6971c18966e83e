"""Keeping a notebook's text (notebooks/text/NAME.py) and the .ipynb that people open the same.

The text holds the cells and their tags; everything else in the .ipynb follows from it.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steptime.core.errors import InputError
from steptime.core.files import read_json, read_text, write_json, write_text
from steptime.notebook import notebook_text, read_notebook

# What both sides were at the last sync, to tell which of them was edited since.
STATE = Path("data/.runs/pairs.json")


@dataclass(frozen=True)
class Pair:
    """The two files of one notebook; either may be missing until the first sync."""

    text: Path
    ipynb: Path

    @property
    def name(self) -> str:
        return self.text.stem


def pairs(root: Path) -> list[Pair]:
    """Every notebook that exists as a text or as an .ipynb."""
    folder = Path(root) / "notebooks"
    names = {path.stem for path in (*folder.glob("text/*.py"), *folder.glob("*.ipynb"))}
    return [Pair(folder / "text" / f"{name}.py", folder / f"{name}.ipynb") for name in sorted(names)]


def as_text(path: Path) -> str:
    """The percent text of an .ipynb: cells and tags, no header. Raises InputError when it is not a notebook."""
    import jupytext
    import nbformat

    try:
        node = nbformat.reads(read_text(path), as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.validator.ValidationError, AttributeError, KeyError) as error:
        raise InputError(f"{path}: is not a notebook ({str(error).splitlines()[0]}); delete it or mend it") from None
    node.metadata = type(node.metadata)(
        jupytext={"notebook_metadata_filter": "-all", "cell_metadata_filter": "tags,-all"}
    )
    return jupytext.writes(node, fmt="py:percent")


def sync(root: Path, prefer: str | None = None) -> list[str]:
    """Make both files of every pair equal; returns a line for each that changed.

    The side edited since the last sync wins (without a record of one: the newer file). Both edited: InputError, unless
    `prefer` ("text" or "ipynb") says which one to keep.
    """
    root = Path(root)
    state = read_json(root / STATE) if (root / STATE).is_file() else {}
    lines = []
    for pair in pairs(root):
        text = read_text(pair.text) if pair.text.is_file() else None
        other = as_text(pair.ipynb) if pair.ipynb.is_file() else None
        if text != other:
            winner = (
                prefer if prefer and None not in (text, other) else _edited(pair, text, other, state.get(pair.name))
            )
            if winner == "ipynb":
                text = other
                write_text(pair.text, str(other))
            else:
                write_text(pair.ipynb, notebook_text(read_notebook(str(text))))
            lines.append(f"{pair.name}: taken from the {winner}")
        state[pair.name] = _digest(str(text))
    write_json(root / STATE, state)
    return lines


def _edited(pair: Pair, text: str | None, other: str | None, base: str | None) -> str:
    if text is None or other is None:
        return "ipynb" if text is None else "text"
    if base is None:
        return "text" if pair.text.stat().st_mtime >= pair.ipynb.stat().st_mtime else "ipynb"
    changed = [side for side, content in (("text", text), ("ipynb", other)) if _digest(content) != base]
    if len(changed) == 2:
        raise InputError(
            f"notebooks/{pair.name}.ipynb: edited, and so is text/{pair.name}.py; "
            "keep one: steptime notebooks sync --prefer text|ipynb"
        )
    return changed[0]


def strip(root: Path) -> list[str]:
    """Write every .ipynb as it follows from its cells: no outputs, ids by position; returns the names changed."""
    changed = []
    for pair in pairs(root):
        if pair.ipynb.is_file():
            clean = notebook_text(read_notebook(as_text(pair.ipynb)))
            if clean != read_text(pair.ipynb):
                write_text(pair.ipynb, clean)
                changed.append(pair.name)
    return changed


def faults(root: Path) -> list[str]:
    """What is wrong with the pairs, one line each: a missing side, unequal cells, outputs or other metadata."""
    found = []
    for pair in pairs(root):
        if not pair.text.is_file() or not pair.ipynb.is_file():
            found.append(f"{pair.name}: one of text/{pair.name}.py and {pair.name}.ipynb is missing")
        elif as_text(pair.ipynb) != read_text(pair.text):
            found.append(f"{pair.name}: text and .ipynb differ; run steptime notebooks sync")
        elif notebook_text(read_notebook(read_text(pair.text))) != read_text(pair.ipynb):
            found.append(f"{pair.name}: the .ipynb holds outputs or metadata; run make clean-notebooks")
    return found


def _digest(text: Any) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
