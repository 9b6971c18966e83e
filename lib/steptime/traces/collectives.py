"""Measured collectives as other tools write them, as one table: group, workers, nodes, n_bytes, time_s, time_std_s.

Read are nccl-tests' text and its JSON file (`-J`), the text of the OSU micro-benchmarks, and CSV with those columns.
The table is what `steptime collectives fit --observed` takes. Seconds and bytes; a missing deviation is empty.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pandas as pd

from steptime.core.errors import InputError
from steptime.core.files import read_text

COLUMNS = ("group", "workers", "nodes", "n_bytes", "time_s", "time_std_s")
_RANK_LINE = re.compile(r"#\s+Rank\s+(\d+)\s.*\son\s+(\S+)\s+device\s")
_OSU_TITLE = re.compile(r"#?\s*OSU\s+(?:MPI|NCCL|RCCL|XCCL|OpenSHMEM|UPC\S*)\S*\s+(?P<what>.*?)\s+Test\b")
_OSU_HEAD = re.compile(r"#?\s*Size\s+Avg Latency\s*\(us\)")


@dataclass(frozen=True)
class Placement:
    """What a file may not tell: the name of the platform, how many workers there were, on how many nodes."""

    group: str | None = None
    workers: int | None = None
    nodes: int | None = None


@dataclass(frozen=True)
class _Point:
    line: int
    n_bytes: int
    time_us: float


def read_collectives(paths: Sequence[Path], placement: Placement | None = None) -> pd.DataFrame:
    """The files' points in one table. `placement` says what a file does not; where a file says it, both must agree.

    Raises InputError for a file of another form, a number that is none, a point that is there twice, zero workers.
    """
    given = placement or Placement()
    for name in ("workers", "nodes"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} = {value}: must be at least 1; correct it")
    table = pd.concat([_read(Path(path), given) for path in paths], ignore_index=True)
    twice = table.duplicated(list(COLUMNS[:4]))
    if twice.any():
        row = table[twice].iloc[0]
        raise InputError(
            f"{row['source']}: line {row['line']}: {row['n_bytes']} bytes of group {row['group']}, {row['workers']} "
            f"workers on {row['nodes']} nodes: repeats an earlier point; remove one of them"
        )
    return table[list(COLUMNS)]


def _read(path: Path, given: Placement) -> pd.DataFrame:
    text = read_text(path)
    if not text.strip():
        raise InputError(f"{path}: is empty; give the output of nccl-tests, of an OSU benchmark, or a CSV")
    if text.lstrip().startswith("{"):
        points, found = _nccl_json(path, text)
    elif _RANK_LINE.search(text) or re.search(r"^#\s+size\s+count\s+type", text, re.MULTILINE):
        points, found = _nccl_text(path, text)
    elif _OSU_TITLE.search(text):
        points, found = _osu_text(path, text)
    else:
        return _csv(path, text, given)
    if not points:
        raise InputError(f"{path}: has no measured point; let the benchmark end and give its whole output")
    place = _agreed(path, given, found)
    rows = [(place.group, place.workers, place.nodes, p.n_bytes, p.time_us * 1e-6, math.nan, p.line) for p in points]
    return pd.DataFrame(rows, columns=[*COLUMNS, "line"]).assign(source=str(path))


def _agreed(path: Path, given: Placement, found: Placement) -> Placement:
    place = given
    for name in ("group", "workers", "nodes"):
        told, said = getattr(found, name), getattr(given, name)
        if told is not None and said is not None and told != said:
            raise InputError(f"{path}: has {told} {name}, but --{name} says {said}; leave the option out")
        if told is None and said is None:
            raise InputError(f"{path}: does not tell its {name}; say --{name}")
        if said is None:
            place = replace(place, **{name: told})
    return place


def _positive(path: Path, line: int, what: str, value: Any, *, whole: bool = False, or_zero: bool = False) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    is_there = math.isfinite(number) and (number > 0 or (or_zero and number == 0)) and number <= 1e15
    if not is_there or (whole and number != int(number)):
        raise InputError(f"{path}: line {line}: {what} = {str(value)[:40]!r}: must be above 0; remove the row")
    return number


def _nccl_text(path: Path, text: str) -> tuple[list[_Point], Placement]:
    """Rows of size, count, type, redop, root, then out-of-place and in-place columns that each begin with the time.

    The time taken is the in-place one, which training uses. Not every program prints redop and root.
    """
    ranks: dict[int, str] = {}
    points: list[_Point] = []
    heads: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        rank = _RANK_LINE.match(line)
        if rank:
            ranks[int(rank[1])] = rank[2]
        elif re.match(r"#\s+size\s+count\s+type", line):
            heads = line.lstrip("# ").split()
        elif heads and re.match(r"\s*\d+\s+\d+\s+[a-z]", line):
            words = line.split()
            # Programs without an operation may leave redop blank: one word less.
            blank = int("redop" in heads and len(words) > 3 and not words[3].isalpha())
            if "time" not in heads or len(words) < len(heads) - blank:
                raise InputError(f"{path}: line {number}: has {len(words)} of {len(heads)} columns; give all output")
            place = len(heads) - 1 - heads[::-1].index("time") - blank
            if int(words[0]) > 0:
                time_us = _positive(path, number, "time", words[place])
                points.append(_Point(number, int(_positive(path, number, "size", words[0], whole=True)), time_us))
    nodes = len(set(ranks.values())) or None
    return points, Placement(workers=len(ranks) or None, nodes=nodes)


def _nccl_json(path: Path, text: str) -> tuple[list[_Point], Placement]:
    """`results` with size and in_place / out_of_place times in microseconds, `config.devices` with ranks and hosts."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path}: line {error.lineno}: not valid JSON ({error.msg}); record it again") from None
    results = found.get("results")
    if not isinstance(results, list):
        raise InputError(f"{path}: key 'results' is no list; give the file that nccl-tests writes with -J")
    points = []
    for number, row in enumerate(results, start=1):
        if not isinstance(row, dict):
            raise InputError(f"{path}: result {number} is no object; record it again")
        if row.get("size") == 0:
            continue
        timed = row.get("in_place") or row.get("out_of_place")
        time = timed.get("time") if isinstance(timed, dict) else None
        size = int(_positive(path, number, "result's size", row.get("size"), whole=True))
        points.append(_Point(number, size, _positive(path, number, "result's time", time)))
    config = found.get("config")
    devices = config.get("devices") if isinstance(config, dict) else None
    hosts = [device.get("hostname") for device in devices or [] if isinstance(device, dict)]
    return points, Placement(workers=len(hosts) or None, nodes=len(set(map(str, hosts))) or None)


def _osu_text(path: Path, text: str) -> tuple[list[_Point], Placement]:
    """Rows of size and average latency in microseconds, under the benchmark's title. One collective a file."""
    points: list[_Point] = []
    title, is_table = None, False
    for number, line in enumerate(text.splitlines(), start=1):
        head = _OSU_TITLE.match(line.strip())
        if head:
            if title is not None and title != head["what"]:
                raise InputError(f"{path}: line {number}: is {head['what']!r} after {title!r}; give one a file")
            title, is_table = head["what"], False
        elif _OSU_HEAD.match(line.strip()):
            is_table = True
        elif is_table and re.match(r"\s*\d+\s+\S", line):
            words = line.split()
            size = int(_positive(path, number, "size", words[0], whole=True))
            points.append(_Point(number, size, _positive(path, number, "latency", words[1])))
    if not is_table:
        raise InputError(f"{path}: has no table 'Size  Avg Latency(us)'; give the output of a collective's benchmark")
    return points, Placement()


def _csv(path: Path, text: str, given: Placement) -> pd.DataFrame:
    """CSV with n_bytes and time_s, and group, workers, nodes unless `given`; time_std_s may be missing or empty."""
    try:
        table = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False, skip_blank_lines=False)
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise InputError(f"{path}: is no table ({str(error).splitlines()[0]}); mend or remove the row") from None
    if not isinstance(table.index, pd.RangeIndex):
        raise InputError(f"{path}: line 2: has more fields than the header; mend or remove the row")
    unknown = [name for name in table.columns if name not in COLUMNS]
    if unknown or "n_bytes" not in table or "time_s" not in table:
        which = f"column {unknown[0]!r} is not known" if unknown else "columns n_bytes and time_s are needed"
        raise InputError(f"{path}: {which}; the columns are {', '.join(COLUMNS)}")
    if table.empty:
        raise InputError(f"{path}: has no rows; add at least one point")
    rows = []
    for line, row in enumerate(table.to_dict("records"), start=2):
        size = int(_positive(path, line, "n_bytes", row["n_bytes"], whole=True))
        told = [name for name in ("workers", "nodes") if name in row]
        counts = {name: int(_positive(path, line, name, row[name], whole=True)) for name in told}
        place = _agreed(path, given, Placement(group=row.get("group", "").strip() or None, **counts))
        deviation = row.get("time_std_s", "").strip()
        std = _positive(path, line, "time_std_s", deviation, or_zero=True) if deviation else math.nan
        time = _positive(path, line, "time_s", row["time_s"])
        rows.append((place.group, place.workers, place.nodes, size, time, std, line))
    return pd.DataFrame(rows, columns=[*COLUMNS, "line"]).assign(source=str(path))
