"""A campaign: `runs.csv`, one row per measuring process, and `samples.csv`, one row per timed repetition.

Seconds and bytes; missing values are empty; rows are sorted by key. Nothing here names a host, a user or a path.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pandera.errors
import pandera.pandas as pa

from steptime.core.errors import InputError
from steptime.core.files import write_text

SCHEMA_VERSION = 1
PHASES = ("step", "io", "h2d", "forward", "backward", "update")
STATUSES = ("finished", "failed", "not_run")

_TEXT = pa.Column(str)
_MAYBE_TEXT = pa.Column(str, nullable=True, coerce=True)
_COUNT = pa.Column(int, pa.Check.ge(0))
_POSITIVE = pa.Column(int, pa.Check.ge(1))
_MAYBE = pa.Column(float, pa.Check.ge(0), nullable=True, coerce=True)

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
        "parameters": _MAYBE,
        "peak_memory_bytes": _MAYBE,
        "loss_first": pa.Column(float, nullable=True, coerce=True),
        "loss_last": pa.Column(float, nullable=True, coerce=True),
        # provenance
        "git_revision": _MAYBE_TEXT,
        "git_dirty": pa.Column(bool),
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
        "time_s": pa.Column(float, pa.Check.ge(0), coerce=True),
        # covariates of the repetition; empty for layers and phases timed inside one repetition
        "cpu_s": _MAYBE,
        "run_delay_s": _MAYBE,
        "involuntary_switches": _MAYBE,
        "steal_s": _MAYBE,
        "load_1min": _MAYBE,
    },
    strict=True,
    ordered=True,
)

RUN_COLUMNS = tuple(RUNS.columns)
SAMPLE_COLUMNS = tuple(SAMPLES.columns)
SAMPLE_KEY = ["run_id", "phase", "layer", "repeat"]


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
    """A CSV file checked against `schema`. Raises InputError with the first fault: file, line, column, value, mend."""
    try:
        table = pd.read_csv(path, encoding="utf-8", float_precision="round_trip", dtype=_text_columns(schema))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"{path}: is not a table ({str(error).splitlines()[0]}); mend or remove the row") from None
    missing = [name for name in schema.columns if name not in table.columns]
    if missing:
        raise InputError(f"{path}: column {missing[0]!r} is missing; the columns are {', '.join(schema.columns)}")
    try:
        return schema.validate(table)
    except pandera.errors.SchemaError as error:
        raise InputError(f"{path}: {_fault(error)}") from None


def write_campaign(campaign: Campaign, folder: Path) -> None:
    """Write both tables, each whole or not at all, sorted by key."""
    runs = campaign.runs.sort_values("run_id", kind="stable")[list(RUN_COLUMNS)]
    samples = campaign.samples.sort_values(SAMPLE_KEY, kind="stable")[list(SAMPLE_COLUMNS)]
    write_text(Path(folder) / "runs.csv", runs.to_csv(index=False, float_format="%.9g", lineterminator="\n"))
    write_text(Path(folder) / "samples.csv", samples.to_csv(index=False, float_format="%.9g", lineterminator="\n"))


def _text_columns(schema: pa.DataFrameSchema) -> dict[str, type]:
    """Text columns are read as text, so that a version 3.10 stays one."""
    return {name: str for name, column in schema.columns.items() if "str" in str(column.dtype)}


def _fault(error: pandera.errors.SchemaError) -> str:
    cases = error.failure_cases
    column = getattr(error.schema, "name", None)
    if isinstance(cases, pd.DataFrame) and len(cases):
        row, value = cases["index"].iloc[0], cases["failure_case"].iloc[0]
        check = error.check if isinstance(error.check, str) else getattr(error.check, "error", None) or error.check
        if column is None:
            return f"unexpected column {value!r}; remove it"
        line = f"line {int(row) + 2}: " if row is not None and not pd.isna(row) else ""
        return f"{line}{column} = {value}: fails {check}; correct the value or remove the row"
    return f"column {column!r}: {str(error).splitlines()[0]}; correct the column"
