"""A campaign: `runs.csv`, one row per measuring process, and `samples.csv`, one row per timed repetition.

Seconds and bytes; missing values are empty; rows are sorted by key. Nothing here names a host, a user or a path.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pandera.pandas as pa

from steptime.core.errors import InputError
from steptime.core.files import read_text, write_texts
from steptime.core.network import BYTES_PER_VALUE

SCHEMA_VERSION = 2
PHASES = ("step", "io", "h2d", "forward", "backward", "update", "profiled")
"""`profiled`: a part of a step under the framework's instruments, whose layers' times it belongs to; `layer` names the
part: h2d, loss, update, dispatch, other, and plain, the whole step without instruments that came before it."""
INPUTS = ("sequential", "prefetch", "jpeg-0", "jpeg-1", "jpeg-2")
STATUSES = ("finished", "failed", "out_of_memory", "not_run")
"""Not run: this machine or this framework cannot. All but finished have a reason."""
CASE = ("framework", "network", "size", "batch", "dtype", "device", "threads", "workers", "input")
"""The columns of runs.csv that make a case."""
LONGEST_S = 86_400.0
"""Of one repetition: what is longer is in another unit."""
DURATION_SLACK = 1.01
"""Of a run's repetitions over its duration: times are written with nine digits, and each has a clock of its own."""
_CASE_ID = re.compile(
    r"(?P<framework>.+)-(?P<network>[^-]+)-(?P<size>quick|full)-b(?P<batch>\d+)-(?P<dtype>[^-]+)-(?P<device>[^-]+)"
    rf"-t(?P<threads>\d+)-(?P<input>{'|'.join(INPUTS)})"
)

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
        "dtype": pa.Column(str, pa.Check.isin(list(BYTES_PER_VALUE))),
        "device": pa.Column(str, pa.Check.isin(["cpu", "cuda"])),
        "threads": _POSITIVE,
        "workers": _POSITIVE,
        "input": pa.Column(str, pa.Check.isin(INPUTS)),
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
        # of the build alone, often while another child builds; what compiles at the first step is the first warm-up
        "build_s": _MAYBE,
        # of all timed steps, reading included: the processor packages' on the CPU, the board's on a GPU
        "energy_j": _MAYBE,
        # mean over the timed steps of the driver's share of its last sampling period in which a kernel ran
        "gpu_active_share": _MAYBE,
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
        "variables": _MAYBE_TEXT,
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
        "time_s": pa.Column(float, [pa.Check.ge(0), pa.Check.le(LONGEST_S)]),
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


@dataclass(frozen=True)
class Campaign:
    """One recorded set of measurements; `name` is the folder's."""

    name: str
    runs: pd.DataFrame
    samples: pd.DataFrame

    def joined(self) -> pd.DataFrame:
        """The samples, each with the columns of its run."""
        return self.samples.merge(self.runs, on="run_id", suffixes=("", "_run"), validate="many_to_one")


def campaign_folders(root: Path) -> dict[str, Path]:
    """The recorded campaigns of single devices by name; those of many workers are `core.workers.workers_folders`.

    In both, the runs of one worker are alike in runs.csv, but there each waits in place of computing, or goes through
    an engine: no study of single devices may see them.
    """
    found = recorded_folders(root)
    return {name: folder for name, folder in found.items() if not (folder / "workers.csv").is_file()}


def repetitions(folders: Mapping[str, Path]) -> dict[str, str]:
    """{campaign: the first one by name that has the same plan}, for those that repeat another's plan."""
    plans = {name: folder / "plan.json" for name, folder in sorted(folders.items())}
    texts = {name: path.read_text() for name, path in plans.items() if path.is_file() and name != "local"}
    firsts: dict[str, str] = {}
    for name, text in texts.items():
        firsts.setdefault(text, name)
    return {name: firsts[text] for name, text in texts.items() if firsts[text] != name}


def recorded_folders(root: Path) -> dict[str, Path]:
    """All recorded campaigns by name: "local" (this machine, if measured) and each one in data/campaigns."""
    local = Path(root) / "data/raw/local"
    found = {"local": local} if (local / "runs.csv").is_file() else {}
    committed = sorted(Path(root).glob("data/campaigns/*/runs.csv"))
    return found | {file.parent.name: file.parent for file in committed}


def case_id_of(case: Mapping[str, Any]) -> str:
    """The name that `steptime measure` gives the case with these CASE columns."""
    names = ("framework", "network", "size", "batch", "dtype", "device", "threads", "input")
    return "{}-{}-{}-b{}-{}-{}-t{}-{}".format(*(case[name] for name in names))


def read_campaign(folder: Path) -> Campaign:
    """The campaign in `folder`, validated. Raises InputError naming file, line, column, value."""
    folder = Path(folder)
    runs = read_table(folder / "runs.csv", RUNS)
    samples = read_table(folder / "samples.csv", SAMPLES)
    campaign = Campaign(folder.name, runs, samples)
    check_campaign(campaign, folder)
    return campaign


def check_campaign(campaign: Campaign, folder: Path) -> None:
    """What the columns alone cannot say: every sample has its run, every finished run its samples, any other one a
    reason, no key twice; a case_id stands for one case, and the one that its text says; no step takes no time, and the
    repetitions of a run no longer than the run.

    Frameworks and networks may have any name here: `measure.add.check_names` knows those of this version.
    """
    if campaign.runs.empty:
        raise InputError(f"{folder / 'runs.csv'}: has no rows; a campaign has at least one run")
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
    silent = campaign.runs.index[(campaign.runs["status"] != "finished") & campaign.runs["reason"].isna()]
    if len(silent):
        row = silent[0]
        raise InputError(
            f"{folder / 'runs.csv'}: line {row + 2}: reason = empty: a run that is {campaign.runs['status'][row]} has "
            "one; add it"
        )
    twice = campaign.samples.index[campaign.samples.duplicated(SAMPLE_KEY)]
    if len(twice):
        raise InputError(f"{folder / 'samples.csv'}: line {twice[0] + 2}: repeats an earlier sample; remove the row")
    _check_cases(campaign.runs, folder / "runs.csv")
    _check_times(campaign, folder / "samples.csv")


def _check_cases(runs: pd.DataFrame, path: Path) -> None:
    """Raise InputError unless each case_id is one case, and that which its text says where `case_id_of` made it."""
    first: dict[str, tuple[int, dict[str, Any]]] = {}
    for line, run in enumerate(runs[["case_id", *CASE]].to_dict("records"), start=2):
        said = _CASE_ID.fullmatch(run["case_id"])
        line_of_other, other = first.setdefault(run["case_id"], (line, run))
        for name in CASE:
            where = f"{path}: line {line}: {name} = {run[name]!r}"
            if said and name in said.groupdict() and said[name] != str(run[name]):
                raise InputError(f"{where}: case_id {run['case_id']!r} says {said[name]}; correct one of them")
            if other[name] != run[name]:
                raise InputError(
                    f"{where}: is {other[name]!r} on line {line_of_other}, which has the same case_id; "
                    "correct one of them"
                )


def _check_times(campaign: Campaign, path: Path) -> None:
    """Raise InputError for a step without a duration, and for repetitions longer than their run.

    The reading of a step is within it, and warm-ups may have been made while another child was at work, in time that
    both share.
    """
    samples = campaign.samples
    nothing = samples.index[(samples["phase"] == "step") & samples["layer"].isna() & (samples["time_s"] == 0)]
    if len(nothing):
        raise InputError(f"{path}: line {nothing[0] + 2}: time_s = 0: a step takes time; correct it or remove the row")
    timed = samples[~samples["is_warmup"] & (samples["phase"] != "io")]
    total = timed.groupby("run_id")["time_s"].sum()
    most = campaign.runs.set_index("run_id")["duration_s"].reindex(total.index) * DURATION_SLACK
    over = total.index[total > most]
    if len(over):
        own = timed[timed["run_id"] == over[0]]
        row = own["time_s"].idxmax()
        raise InputError(
            f"{path}: line {row + 2}: time_s = {own['time_s'][row]:.9g}: the repetitions of run {over[0]!r} would take "
            f"{total[over[0]]:.4g} s, its duration_s is {most[over[0]] / DURATION_SLACK:.4g}; correct one of them"
        )


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
    cells = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    columns = zip(schema.columns.items(), cells, strict=True)
    return pd.DataFrame({name: _column(path, column, texts, lines) for (name, column), texts in columns})


def as_table(rows: Iterable[Mapping[str, Any]], schema: pa.DataFrameSchema) -> pd.DataFrame:
    """`rows` as a table of `schema`'s columns and types, unchecked; None or an absent key is a missing value."""
    table = pd.DataFrame(list(rows), columns=list(schema.columns), dtype=object)
    return table.astype({name: _kind(column) for name, column in schema.columns.items()})


def write_campaign(campaign: Campaign, folder: Path, beside: Mapping[str, str] | None = None) -> None:
    """Write both tables sorted by key, and the files `beside` them (name -> text), all whole or none.

    A folder with a runs.csv is a campaign: it is written last, and an older one removed before the first of the others.
    """
    runs = campaign.runs.sort_values("run_id", kind="stable")[list(RUN_COLUMNS)]
    samples = campaign.samples.sort_values(SAMPLE_KEY, kind="stable")[list(SAMPLE_COLUMNS)]
    form = {"index": False, "float_format": "%.9g", "lineterminator": "\n"}
    tables = {"samples.csv": samples.to_csv(**form), "runs.csv": runs.to_csv(**form)}
    write_texts({Path(folder) / name: text for name, text in {**(beside or {}), **tables}.items()})


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


def _column(path: Path, column: pa.Column, texts: Sequence[str], lines: Sequence[int]) -> pd.Series:
    """A column of text as the type of `column`, its checks applied; an empty cell is a missing value."""
    kind, seen = _kind(column), set()
    parse = _PARSERS[kind]
    rules = [_RULES[check.name](**check.statistics) for check in column.checks]
    values: list[Any] = []
    for text, line in zip(texts, lines, strict=True):
        if text == "" and column.nullable:
            values.append(None)
            continue
        value = parse(text)
        wrong = (
            [f"must be {_CONTENTS[kind]}"] if value is None else [words for holds, words in rules if not holds(value)]
        )
        if column.unique and value in seen:
            wrong.append("must not come twice")
        if wrong:
            shown = repr(text) if text else "empty"
            raise InputError(f"{path}: line {line}: {column.name} = {shown}: {wrong[0]}; correct it or remove the row")
        values.append(value)
        seen.add(value)
    return pd.Series(values, dtype=kind)


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"-?\d+(\.\d+)?([eE][-+]?\d{1,2})?", text) else None


_PARSERS: dict[str, Callable[[str], Any]] = {
    "str": lambda text: text or None,
    "int64": _whole,
    "Int64": _whole,
    "float64": _number,
    "bool": {"True": True, "False": False}.get,
    "boolean": {"True": True, "False": False}.get,
}
_RULES: dict[str, Callable[..., tuple[Callable[[Any], bool], str]]] = {
    "greater_than_or_equal_to": lambda min_value: (lambda value: value >= min_value, f"must be at least {min_value}"),
    "less_than_or_equal_to": lambda max_value: (lambda value: value <= max_value, f"must be at most {max_value:g}"),
    "isin": lambda allowed_values: (
        lambda value: value in allowed_values,
        f"must be one of {', '.join(map(str, allowed_values))}",
    ),
}
