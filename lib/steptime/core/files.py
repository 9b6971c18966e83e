"""Reading and writing the project's files: whole or not at all, byte-stable, one line when something is wrong."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import yaml
from pydantic import BaseModel, ValidationError

from steptime.core.errors import InputError

ModelT = TypeVar("ModelT", bound=BaseModel)

SIGNIFICANT_DIGITS = 6
"""Derived numbers are rounded to this when written, so that the same inputs give the same bytes on any CPU."""


def project_root(start: Path | None = None) -> Path:
    """The folder that holds `dvc.yaml`, looked for from `start` (default: here) upwards.

    Raises InputError outside a checkout.
    """
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "dvc.yaml").is_file() and (folder / "lib" / "steptime").is_dir():
            return folder
    raise InputError(f"{start}: not inside a steptime checkout (no dvc.yaml above); run it from the project's folder")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` through a temporary file in the same folder and a rename. See write_texts."""
    write_texts({Path(path): text})


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` as write_text does."""
    write_texts({Path(path): data})


def write_table(path: Path, table: pd.DataFrame, digits: int = SIGNIFICANT_DIGITS) -> None:
    """Write `table` as CSV without its index, numbers rounded to so many significant digits. See write_texts."""
    write_text(path, table.to_csv(index=False, float_format=f"%.{digits}g", lineterminator="\n"))


def write_texts(texts: Mapping[Path, str | bytes]) -> None:
    """Write files that belong together: all are prepared beside their places before the first is renamed.

    The last one is what says that the set is whole. An older one under its name is removed before the others are
    replaced, so that an end at any moment leaves the old set, the new one or one without its last file, never a mixture
    that passes for whole. Raises InputError for a place that cannot be written or that is no regular file.
    """
    prepared: dict[str, Path] = {}
    try:
        for given, text in texts.items():
            # A link stays a link: what it points to is replaced.
            path = Path(os.path.realpath(given))
            try:
                if path.exists() and not path.is_file():
                    raise InputError(f"{given}: is no regular file and cannot be written; choose another place")
                path.parent.mkdir(parents=True, exist_ok=True)
                handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
                prepared[name] = path
                with os.fdopen(handle, "wb") as file:
                    file.write(text if isinstance(text, bytes) else text.encode("utf-8"))
                os.chmod(name, 0o644)
            except OSError as error:
                raise InputError(f"{given}: cannot be written ({error.strerror}); choose another place") from None
        if len(prepared) > 1:
            list(prepared.values())[-1].unlink(missing_ok=True)
        for name, path in prepared.items():
            os.replace(name, path)
    finally:
        for name in prepared:
            Path(name).unlink(missing_ok=True)


def rounded(value: Any, digits: int = SIGNIFICANT_DIGITS) -> Any:
    """`value` with every float in it at `digits` significant digits; not-a-number becomes None."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(f"{value:.{digits}g}") if np.isfinite(value) else None
    if isinstance(value, np.ndarray):
        return rounded(value.tolist(), digits)
    if isinstance(value, Mapping):
        return {str(key): rounded(item, digits) for key, item in value.items()}
    return [rounded(item, digits) for item in value]


def json_text(value: Any) -> str:
    """`value` as sorted, indented JSON with rounded floats."""
    return json.dumps(rounded(value), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write `json_text(value)`."""
    write_text(path, json_text(value))


def read_json(path: Path) -> Any:
    """The JSON in `path`. Raises InputError naming the file and the line."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: line {error.lineno}: not valid JSON ({error.msg}); mend or delete it") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({_first_line(error)}); mend or delete it") from None


class _EachKeyOnce(yaml.SafeLoader):
    """Refuses a mapping that gives a key twice, of which PyYAML would silently take the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in first:
                    said = f"key {key.value!r} is there on line {first[key.tag, key.value]} already"
                    raise yaml.MarkedYAMLError(problem=said, problem_mark=key.start_mark)
                first[key.tag, key.value] = key.start_mark.line + 1
        return node


def read_yaml(path: Path) -> Any:
    """The YAML in `path`. Raises InputError naming the file and the line, also for a key that comes twice."""
    try:
        return yaml.load(read_text(path), _EachKeyOnce)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or "unreadable"
        raise InputError(f"{path}: {line}not valid YAML ({problem}); mend the line") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as YAML ({_first_line(error)}); mend it") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def read_text(path: Path) -> str:
    """The UTF-8 text in `path`. Raises InputError when it is missing or not text."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not UTF-8 text; check that it is the right file") from None


def validated(model: type[ModelT], data: Any, source: str | Path) -> ModelT:
    """`data` as a `model`; raises InputError with the first fault as one line: source, key, value, mend."""
    if not isinstance(data, Mapping):
        raise InputError(f"{source}: expected a mapping of keys to values, found {type(data).__name__}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"]) or "(top)"
        if fault["type"] == "extra_forbidden":
            known = ", ".join(sorted(model.model_fields))
            raise InputError(f"{source}: unknown key {key!r}; known here: {known}") from None
        if fault["type"] == "missing":
            raise InputError(f"{source}: key {key!r} is missing; add it") from None
        message = fault["msg"].removeprefix("Value error, ")
        raise InputError(f"{source}: {key} = {fault['input']!r}: {message}") from None
