"""The public functions and classes of the packages that people import, read from their source: nothing is run."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGES = ("core", "networks", "model", "traces", "measure", "cluster")
"""In the order of the page; the stage `site` depends on each."""


@dataclass(frozen=True)
class Entry:
    """A public function or class. `signature`: as it is written, without `self`; `doc`: its docstring's paragraphs."""

    name: str
    signature: str
    doc: tuple[str, ...]
    methods: tuple["Entry", ...] = ()


@dataclass(frozen=True)
class Module:
    """A module with public parts that are documented."""

    name: str
    doc: tuple[str, ...]
    entries: tuple[Entry, ...]


@cache
def modules(source: Path) -> dict[str, list[Module]]:
    """Package -> its modules, read below `source`, the folder of the package `steptime`."""
    found = {}
    for package in PACKAGES:
        read = [_module(path, source) for path in sorted((source / package).glob("*.py"))]
        found[package] = [module for module in read if module.entries]
    return {package: read for package, read in found.items() if read}


def _module(path: Path, source: Path) -> Module:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = path.relative_to(source.parent).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, _paragraphs(tree), tuple(_entry(node) for node in _public(tree)))


def _public(parent: ast.Module | ast.ClassDef) -> list[ast.FunctionDef | ast.ClassDef]:
    """The documented functions and classes whose names do not begin with an underscore."""
    return [
        node
        for node in parent.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_" and ast.get_docstring(node)
    ]


def _entry(node: ast.FunctionDef | ast.ClassDef) -> Entry:
    if isinstance(node, ast.FunctionDef):
        arguments = ast.unparse(node.args)
        own = arguments.removeprefix("self, ").removeprefix("cls, ")
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return Entry(node.name, f"{node.name}({'' if own in ('self', 'cls') else own}){returns}", _paragraphs(node))
    fields = [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign)]
    methods = tuple(_entry(item) for item in _public(node) if isinstance(item, ast.FunctionDef))
    signature = f"{node.name}({', '.join(field for field in fields if field[0] != '_')})"
    return Entry(node.name, signature, _paragraphs(node), methods)


def _paragraphs(node: ast.Module | ast.FunctionDef | ast.ClassDef) -> tuple[str, ...]:
    text = ast.get_docstring(node) or ""
    return tuple(part for part in text.split("\n\n") if part.strip())
