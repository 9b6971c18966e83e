"""A trace without what identifies a machine or its user, small enough to be kept with the study.

Kept are the events that `kineto` reads, what it reads of them, and autograd's arrows. Process and thread numbers become
small ones, names of processes and threads are dropped, times begin at 0 of the earliest rank. Host name, paths, the
time of day and everything else are left out.
"""

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from steptime.core.errors import InputError
from steptime.core.files import write_bytes
from steptime.traces.chrome import event_blocks
from steptime.traces.kineto import CATEGORY_OF, NOTHING, read_traces

_KEPT_ARGS = (
    *("correlation", "External id", "stream", "device"),
    *("Collective name", "dtype", "In msg nelems", "Out msg nelems", "Group size", "Process Group Name"),
    *("Input Dims", "Input type"),
)
_OF_COLLECTIVES = ("Input Dims", "Input type")
"""Kept only where they say how large a collective is."""


def add_traces(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Write the traces of one job, without what identifies, as `folder`/rankN.json.gz. Byte-stable.

    Raises InputError for files that cannot be read, and where the folder is there already.
    """
    if folder.exists():
        raise InputError(f"{folder}: is there already; remove it or choose another name")
    traces = read_traces(paths)
    origin_ns = min(trace.origin_ns for trace in traces)
    texts = {}
    for trace in traces:
        base_ns, events = _kept(Path(trace.source))
        shift_us = (base_ns - origin_ns) / 1e3
        for event in events:
            event["ts"] = round(event["ts"] + shift_us, 3)
        info: dict[str, Any] = {"rank": trace.rank}
        if trace.world_size != NOTHING:
            info["world_size"] = trace.world_size
        head = orjson.dumps({"schemaVersion": 1, "distributedInfo": info})[:-1]
        lines = b",\n".join(orjson.dumps(event) for event in sorted(events, key=lambda event: event["ts"]))
        texts[folder / f"rank{trace.rank}.json.gz"] = head + b',"traceEvents":[\n' + lines + b"\n]}\n"
    for path, text in texts.items():
        write_bytes(path, gzip.compress(text, 9, mtime=0))
    return list(texts)


def _kept(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """The base of the file's clock, and its events with what is kept of them, on small process and thread numbers."""
    places: dict[tuple[Any, Any], int] = {}
    processes: dict[Any, int] = {}
    kept: list[dict[str, Any]] = []
    header: dict[str, Any] = {}
    for known, events in event_blocks(path):
        header = known
        for event in events:
            found = _slice(event) if event.get("ph") == "X" else _arrow(event)
            if found is not None:
                place = (event["pid"], event["tid"])
                found["pid"] = processes.setdefault(event["pid"], len(processes) + 1)
                found["tid"] = places.setdefault(place, len(places) + 1)
                kept.append(found)
    return header.get("baseTimeNanoseconds", 0), kept


def _slice(event: dict[str, Any]) -> dict[str, Any] | None:
    category, name = event.get("cat", ""), event["name"]
    if category.lower() not in CATEGORY_OF or (category == "python_function" and not name.startswith("nn.Module: ")):
        return None
    given = event.get("args") or {}
    is_collective = "Collective name" in given or ("Input Dims" in given and category == "user_annotation")
    names = [key for key in _KEPT_ARGS if key in given and (is_collective or key not in _OF_COLLECTIVES)]
    found = {"ph": "X", "cat": category, "name": name, "ts": event["ts"], "dur": event.get("dur", 0)}
    return found | ({"args": {key: given[key] for key in names}} if names else {})


def _arrow(event: dict[str, Any]) -> dict[str, Any] | None:
    if event.get("ph") not in ("s", "f") or event.get("cat") != "fwdbwd":
        return None
    return {key: event[key] for key in ("ph", "id", "cat", "name", "ts")}
