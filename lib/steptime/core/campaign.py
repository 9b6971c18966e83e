"""A campaign: `runs.csv`, one row per measuring process, and `samples.csv`, one row per timed repetition.

Seconds and bytes; missing values are empty; rows are sorted by key. Nothing here names a host, a user or a path.
"""

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pandera.errors
import pandera.pandas as pa

from steptime.core.errors import InputError
from steptime.core.files import read_text, write_text

SCHEMA_VERSION = 1
PHASES = ("step", "io", "h2d", "forward", "backward", "update")
STATUSES = ("finished", "failed", "not_run")

_TEXT = pa.Column(str)
_MAYBE_TEXT = pa.Column(str, nullable=True)
_COUNT = pa.Column(int, pa.Check.ge(0))
_POSITIVE = pa.Column(int, pa.Check.ge(1))
_MAYBE_COUNT = pa.Column("Int64", pa.Check.ge(0), nullable=True)
_MAYBE = pa.Column(float, pa.Check.ge(0), nullable=True)

RUNS = pa.DataFrameSchema(
    {
        # identity: a run is one fresh child process that measured one case in one round
        "run_id": pa.Column(str, unique=True),
        "case_id": _TEXT,
        "schema_version": pa.Column(int, pa.Check.isin([SCHEMA_VERSION])),
        # the case
        "framework": _TEXT,
        "network": _TEXT,
        "size": pa.Column(str, pa.Check.isin(["quick", "full"])),
        "batch": _POSITIVE,
        "dtype": _TEXT,
        "device": _TEXT,
        "threads": _POSITIVE,
        "workers": _POSITIVE,
        "input": pa.Column(str, pa.Check.isin(["sequential", "prefetch"])),
        # what happened
        "round": _COUNT,
        "position": _COUNT,
        "seed": _COUNT,
        "status": pa.Column(str, pa.Check.isin(STATUSES)),
        "reason": _MAYBE_TEXT,
        "started_utc": _MAYBE_TEXT,
        "duration_s": _MAYBE,
        "warmups": _COUNT,
        "stop_reason": _MAYBE_TEXT,
        "parameters": _MAYBE_COUNT,
        "peak_memory_bytes": _MAYBE_COUNT,
        "loss_first": pa.Column(float, nullable=True),
        "loss_last": pa.Column(float, nullable=True),
        # provenance
        "git_revision": _MAYBE_TEXT,
        "git_dirty": pa.Column("boolean", nullable=True),
        "code_hash": _TEXT,
        "fingerprint": _TEXT,
        "command": _TEXT,
        "steptime_version": _TEXT,
        "python_version": _MAYBE_TEXT,
        "framework_version": _MAYBE_TEXT,
        "blas": _MAYBE_TEXT,
        "platform": _TEXT,
        "cpu_model": _TEXT,
        "cores_present": _POSITIVE,
        "cores_allowed": _POSITIVE,
        "memory_bytes": _POSITIVE,
        "is_virtual": pa.Column(bool),
        "load_1min": _MAYBE,
        "timer": _TEXT,
        "timer_resolution_s": _MAYBE,
        "gpu_model": _MAYBE_TEXT,
        "gpu_driver": _MAYBE_TEXT,
        "gpu_clock_mhz": _MAYBE,
        "gpu_power_w": _MAYBE,
        "gpu_temperature_c": _MAYBE,
        "gpu_throttle": _MAYBE_TEXT,
    },
    strict=True,
    ordered=True,
)

SAMPLES = pa.DataFrameSchema(
    {
        "run_id": _TEXT,
        "phase": pa.Column(str, pa.Check.isin(PHASES)),
        "layer": _MAYBE_TEXT,
        "repeat": _COUNT,
        "is_warmup": pa.Column(bool),
        "is_disturbed": pa.Column(bool),
        "time_s": pa.Column(float, pa.Check.ge(0)),
        # covariates of the repetition; empty for layers and phases timed inside one repetition
        "cpu_s": _MAYBE,
        "run_delay_s": _MAYBE,
        "involuntary_switches": _MAYBE_COUNT,
        "steal_s": _MAYBE,
        "load_1min": _MAYBE,
    },
    strict=True,
    ordered=True,
)

RUN_COLUMNS = tuple(RUNS.columns)
SAMPLE_COLUMNS = tuple(SAMPLES.columns)
SAMPLE_KEY = ["run_id", "phase", "layer", "repeat"]
_CONTENTS = {
    "str": "a text",
    "int64": "a whole number",
    "Int64": "a whole number or nothing",
    "float64": "a number",
    "bool": "True or False",
    "boolean": "True, False or nothing",
}
_CHECKS = {"greater_than_or_equal_to": "must be at least {min_value}", "isin": "must be one of {allowed_values}"}


@dataclass(frozen=True)
class Campaign:
    """One recorded set of measurements; `name` is the folder's."""

    name: str
    runs: pd.DataFrame
    samples: pd.DataFrame

    def joined(self) -> pd.DataFrame:
        """The samples, each with the columns of its run."""
        return self.samples.merge(self.runs, on="run_id", suffixes=("", "_run"), validate="many_to_one")


def read_campaign(folder: Path) -> Campaign:
    """The campaign in `folder`, validated. Raises InputError naming file, line, column, value."""
    folder = Path(folder)
    runs = read_table(folder / "runs.csv", RUNS)
    samples = read_table(folder / "samples.csv", SAMPLES)
    campaign = Campaign(folder.name, runs, samples)
    check_campaign(campaign, folder)
    return campaign


def check_campaign(campaign: Campaign, folder: Path) -> None:
    """What the columns alone cannot say: every sample has its run, every finished run its samples, no key twice."""
    known = set(campaign.runs["run_id"])
    orphans = campaign.samples.index[~campaign.samples["run_id"].isin(known)]
    if len(orphans):
        row = orphans[0]
        raise InputError(
            f"{folder / 'samples.csv'}: line {row + 2}: run_id = {campaign.samples['run_id'][row]!r}: "
            "is not in runs.csv; add its run or remove the row"
        )
    finished = campaign.runs[campaign.runs["status"] == "finished"]
    empty = finished.index[~finished["run_id"].isin(set(campaign.samples["run_id"]))]
    if len(empty):
        row = empty[0]
        raise InputError(
            f"{folder / 'runs.csv'}: line {row + 2}: run_id = {campaign.runs['run_id'][row]!r}: "
            "is finished but has no samples; add them or correct the status"
        )
    twice = campaign.samples.index[campaign.samples.duplicated(SAMPLE_KEY)]
    if len(twice):
        raise InputError(f"{folder / 'samples.csv'}: line {twice[0] + 2}: repeats an earlier sample; remove the row")


def read_table(path: Path, schema: pa.DataFrameSchema) -> pd.DataFrame:
    """A CSV file checked against `schema`, every cell read as text first.

    Raises InputError with the first fault as one line: file, line, column, value, mend.
    """
    names = list(schema.columns)
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        header = next(reader, None)
        _check_header(path, header, names)
        for row in reader:
            if len(row) != len(names):
                raise InputError(
                    f"{path}: line {reader.line_num}: {len(row)} fields where the header has {len(names)}; "
                    "mend or remove the row"
                )
            rows.append(row)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: is not CSV ({error}); mend or remove the row") from None
    cells = pd.DataFrame(rows, columns=names, dtype=object)
    columns = {name: _converted(path, cells[name], column, lines) for name, column in schema.columns.items()}
    try:
        return schema.validate(pd.DataFrame(columns))
    except pandera.errors.SchemaError as error:
        raise InputError(f"{path}: {_fault(error, cells, lines)}") from None


def as_table(rows: Iterable[Mapping[str, Any]], schema: pa.DataFrameSchema) -> pd.DataFrame:
    """`rows` (column -> value; None or an absent column is missing) as a table of `schema`'s columns and types."""
    table = pd.DataFrame(list(rows), columns=list(schema.columns), dtype=object)
    table = table.where(table.notna(), None)
    return schema.validate(table.astype({name: _kind(column) for name, column in schema.columns.items()}))


def write_campaign(campaign: Campaign, folder: Path) -> None:
    """Write both tables, each whole or not at all, sorted by key."""
    runs = campaign.runs.sort_values("run_id", kind="stable")[list(RUN_COLUMNS)]
    samples = campaign.samples.sort_values(SAMPLE_KEY, kind="stable")[list(SAMPLE_COLUMNS)]
    write_text(Path(folder) / "runs.csv", runs.to_csv(index=False, float_format="%.9g", lineterminator="\n"))
    write_text(Path(folder) / "samples.csv", samples.to_csv(index=False, float_format="%.9g", lineterminator="\n"))


def _check_header(path: Path, header: list[str] | None, names: list[str]) -> None:
    if not header:
        raise InputError(f"{path}: line 1: is empty; its columns must be {', '.join(names)}")
    for name in names:
        if name not in header:
            raise InputError(f"{path}: line 1: column {name!r} is missing; the columns are {', '.join(names)}")
    for place, name in enumerate(header):
        if name not in names:
            raise InputError(f"{path}: line 1: column {name!r} is not known; remove it")
        if header.index(name) != place:
            raise InputError(f"{path}: line 1: column {name!r} comes twice; remove one")
        if name != names[place]:
            raise InputError(f"{path}: line 1: column {name!r} stands where {names[place]!r} belongs; reorder them")


def _kind(column: pa.Column) -> str:
    """The pandas type of a column: a key of _CONTENTS."""
    name = str(column.dtype)
    return "str" if name.startswith("str") else name


def _converted(path: Path, cells: pd.Series, column: pa.Column, lines: list[int]) -> pd.Series:
    """A column of text as the type of `column`; an empty cell is a missing value."""
    kind = _kind(column)
    missing = cells == ""
    if kind == "str":
        values, wrong = cells.mask(missing, None).astype("str"), missing & (not column.nullable)
    elif kind in ("bool", "boolean"):
        values = cells.map({"True": True, "False": False}).astype("boolean")
        wrong = values.isna() & ~(missing & column.nullable)
    else:
        values = pd.to_numeric(cells.mask(missing, None), errors="coerce").astype("float64")
        wrong = ~np.isfinite(values) & ~(missing & column.nullable)
        if kind in ("int64", "Int64"):
            # whole numbers are converted from the text: beyond 2 ** 53 a float is not exact
            wrong |= ~cells.str.fullmatch(r"-?\d{1,18}") & ~(missing & column.nullable)
            if not wrong.any():
                values = cells.mask(missing, None).map(int, na_action="ignore").astype("Int64")
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        value = "empty" if missing.iloc[row] else repr(cells.iloc[row])
        raise InputError(
            f"{path}: line {lines[row]}: {column.name} = {value}: must be {_CONTENTS[kind]}; "
            "correct it or remove the row"
        )
    return values.astype(kind)


def _fault(error: pandera.errors.SchemaError, cells: pd.DataFrame, lines: list[int]) -> str:
    """A failed check of a value as one line: line, column, value, mend."""
    twice = error.reason_code == pandera.errors.SchemaErrorReason.SERIES_CONTAINS_DUPLICATES
    row = int(error.failure_cases["index"].iloc[-1 if twice else 0])
    where = f"line {lines[row]}: {error.schema.name} = {cells[error.schema.name][row]!r}"
    if twice:
        return f"{where}: comes twice; remove one of the rows"
    rule = _CHECKS[error.check.name].format(**error.check.statistics)
    return f"{where}: {rule}; correct it or remove the row"
