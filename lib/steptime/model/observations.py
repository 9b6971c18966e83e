"""Tables of observed times and of points to predict: reading, checking, writing.

Step times: `group, workers, nodes, local_batch, step_time_s, step_time_std_s`; collectives: `group, workers, nodes,
n_bytes, time_s, time_std_s`. Points have the same columns without the times. Seconds, bytes, samples per worker;
a standard deviation may be empty. Faults raise InputError: one line with file, line, column, value, mend.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from steptime.core.errors import InputError
from steptime.core.files import read_text


@dataclass(frozen=True)
class Kind:
    """One kind of table: the columns that identify a point, its time and the time's standard deviation."""

    size: str
    time: str
    std: str

    @property
    def key(self) -> tuple[str, ...]:
        return ("group", "workers", "nodes", self.size)


STEPS = Kind("local_batch", "step_time_s", "step_time_std_s")
COLLECTIVES = Kind("n_bytes", "time_s", "time_std_s")


def read_observed(path: Path, kind: Kind) -> pd.DataFrame:
    """The observations in `path`, checked."""
    return check_observed(read_fields(path), kind, path)


def read_points(path: Path, kind: Kind) -> pd.DataFrame:
    """The points in `path`, checked."""
    return check_points(read_fields(path), kind, path)


def check_observed(table: pd.DataFrame, kind: Kind, source: Path | str = "observed") -> pd.DataFrame:
    """`table` with numeric columns, or InputError; the row of a fault is named by its line in `source`."""
    table = _checked(table, (*kind.key, kind.time, kind.std), kind, source)
    if table.empty:
        raise InputError(f"{source}: has no rows; add at least one observation")
    expected = "a time above 0 s, 1e-12 to 1e9"
    table[kind.time] = _numbers(table, kind.time, source, expected, lambda v: v.between(1e-12, 1e9))
    expected = "0 to 1e9 s, or empty"
    table[kind.std] = _numbers(table, kind.std, source, expected, lambda v: v.between(0, 1e9), may_be_empty=True)
    return table


def check_points(table: pd.DataFrame, kind: Kind, source: Path | str = "points") -> pd.DataFrame:
    """`table` with numeric columns, or InputError."""
    return _checked(table, kind.key, kind, source)


def read_fields(path: Path) -> pd.DataFrame:
    """The table in the CSV file `path`, every field as text. Raises InputError for what is no table."""
    try:
        table = pd.read_csv(io.StringIO(read_text(path)), dtype=str, keep_default_na=False, skip_blank_lines=False)
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{path}: is not a table ({reason}); mend or remove the row") from None
    if not isinstance(table.index, pd.RangeIndex):
        raise InputError(f"{path}: line 2: has more fields than the header; mend or remove the row")
    return table


def _checked(table: pd.DataFrame, columns: tuple[str, ...], kind: Kind, source: Path | str) -> pd.DataFrame:
    wanted = ", ".join(columns)
    for name in columns:
        if name not in table.columns:
            raise InputError(f"{source}: column {name!r} is missing; the columns are {wanted}")
    unknown = [name for name in table.columns if name not in columns]
    if unknown:
        raise InputError(f"{source}: column {unknown[0]!r} is not known; remove it, the columns are {wanted}")
    table = table.reset_index(drop=True).copy()
    groups = table["group"].fillna("").astype(str).str.strip()
    refuse(groups == "", table, "group", source, "a name")
    table["group"] = groups
    for name in ("workers", "nodes", kind.size):
        table[name] = _numbers(table, name, source, "a whole number from 1 to 1e15", _is_count)
    refuse(table["nodes"] > table["workers"], table, "nodes", source, "at most the number of workers")
    twice = table.duplicated(list(kind.key))
    if twice.any():
        row = int(np.flatnonzero(twice)[0])
        point = ", ".join(f"{name} {table[name][row]}" for name in kind.key)
        raise InputError(f"{source}: line {row + 2}: {point}: repeats an earlier point; remove or average the rows")
    return table


def _is_count(values: pd.Series) -> pd.Series:
    return (values >= 1) & (values <= 1e15) & (values == np.floor(values))


def _numbers(
    table: pd.DataFrame,
    name: str,
    source: Path | str,
    expected: str,
    accept: Callable[[pd.Series], pd.Series],
    may_be_empty: bool = False,
) -> pd.Series:
    raw = table[name]
    empty = raw.isna() | (raw.astype(str).str.strip() == "")
    values = pd.to_numeric(raw.where(~empty), errors="coerce").astype(float)
    bad = ~(np.isfinite(values) & accept(values))
    if may_be_empty:
        bad &= ~empty
    refuse(bad, table, name, source, expected)
    return values.astype(np.int64) if name in ("workers", "nodes", "local_batch", "n_bytes") else values


def refuse(bad: pd.Series, table: pd.DataFrame, name: str, source: Path | str, expected: str) -> None:
    """Raise InputError for the first row where `bad`: its line in `source`, its value in column `name`, the mend."""
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        value = table[name].iloc[row]
        shown = "empty" if pd.isna(value) or str(value).strip() == "" else " ".join(str(value).split())
        raise InputError(f"{source}: line {row + 2}: {name} = {shown}: must be {expected}; correct or remove the row")
