"""A timeline as a file that ui.perfetto.dev and chrome://tracing open, and back.

Workers are processes, resources are threads, tasks are slices; how the timeline was got (measured, emulated, modelled,
simulated) is in the file's `otherData` and in each process's name. Format: Trace Event Format, microseconds.
"""

import math
from pathlib import Path
from typing import Any, get_args

import orjson

from steptime.core.claims import Kind
from steptime.core.errors import InputError
from steptime.core.files import write_text
from steptime.core.step import Task, Timeline
from steptime.traces.chrome import event_blocks

FORMAT = "steptime timeline"
_ARROW = "waits for"
_DIGITS_US = 6
"""Digits after a microsecond: a picosecond."""


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Write `timeline` as Trace Event JSON, whole or not at all."""
    write_text(path, timeline_text(timeline))


def timeline_text(timeline: Timeline) -> str:
    """`timeline` as Trace Event JSON, one event a line; the same timeline gives the same bytes."""
    lanes = sorted({(task.worker, task.resource) for task in timeline.tasks})
    # Numbers of threads are unique in the file and, as those of processes, not 0, which viewers take for idling.
    threads = {lane: number for number, lane in enumerate(lanes, start=1)}
    events: list[dict[str, Any]] = []
    for worker in sorted({worker for worker, _ in lanes}):
        process = worker + 1
        events.append(_name("process_name", process, 0, f"worker {worker} ({timeline.kind})"))
        events.append(_label("process_sort_index", process, 0, sort_index=worker))
    for (worker, resource), thread in threads.items():
        events.append(_name("thread_name", worker + 1, thread, resource))
        events.append(_label("thread_sort_index", worker + 1, thread, sort_index=thread))
    places = [(task.worker + 1, threads[task.worker, task.resource]) for task in timeline.tasks]
    after: dict[int, list[int]] = {}
    for source, target in timeline.dependencies:
        after.setdefault(target, []).append(source)
    for number, (task, place) in enumerate(zip(timeline.tasks, places, strict=True)):
        start, end = _microseconds(task.start_s), _microseconds(task.end_s)
        about = {"kind": task.kind, "layer": task.layer, "step": task.step, "after": after.get(number, [])}
        args = {key: value for key, value in about.items() if value}
        length = {"dur": round(end - start, _DIGITS_US), "args": args}
        events.append(_event("X", task.name, timeline.kind, place, start) | length)
    for number, (source, target) in enumerate(timeline.dependencies, start=1):
        # Arrows: a viewer ties each end to the slice that is open at that time.
        for phase, at in (("s", source), ("f", target)):
            arrow = _event(phase, _ARROW, _ARROW, places[at], _microseconds(timeline.tasks[at].start_s))
            events.append(arrow | {"id": number} | ({"bp": "e"} if phase == "f" else {}))
    head = orjson.dumps({"format": FORMAT, "kind": timeline.kind}).decode()
    body = ",\n".join(orjson.dumps(event).decode() for event in events)
    return f'{{"displayTimeUnit": "ms", "otherData": {head},\n"traceEvents": [\n{body}\n]}}\n'


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, _DIGITS_US)


def _event(phase: str, name: str, category: str, place: tuple[int, int], start_us: float) -> dict[str, Any]:
    return {"ph": phase, "cat": category, "name": name, "pid": place[0], "tid": place[1], "ts": start_us}


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return _label(what, process, thread, name=name)


def _label(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def read_timeline(path: Path) -> Timeline:
    """The timeline that `write_timeline` wrote. Raises InputError for another file, naming what it lacks."""
    threads: dict[Any, str] = {}
    slices: list[dict[str, Any]] = []
    kind = None
    for header, events in event_blocks(path):
        about = header.get("otherData")
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise InputError(f"{path}: otherData.format is not {FORMAT!r}; give a timeline that steptime wrote")
        kind = about.get("kind")
        try:
            slices += [event for event in events if event["ph"] == "X"]
            names = [event for event in events if event["ph"] == "M" and event["name"] == "thread_name"]
            threads |= {event["tid"]: str(event["args"]["name"]) for event in names}
        except (KeyError, TypeError) as error:
            raise InputError(f"{path}: an event cannot be read ({error}); write it again") from None
    if not isinstance(kind, str) or kind not in get_args(Kind):
        raise InputError(f"{path}: otherData.kind = {kind!r}: must be one of {', '.join(get_args(Kind))}")
    tasks = tuple(_task(path, event, threads) for event in slices)
    return Timeline(kind, tasks, _dependencies(path, slices))


def _task(path: Path, event: dict[str, Any], threads: dict[Any, str]) -> Task:
    try:
        start, length, worker = float(event["ts"]), float(event["dur"]), int(event["pid"]) - 1
        args = event.get("args", {})
        name, resource, step = str(event["name"]), threads[event["tid"]], int(args.get("step", 0))
        kind, layer = str(args.get("kind", "")), str(args.get("layer", ""))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{path}: task {str(event)[:80]} cannot be read ({error!r}); write it again") from None
    if not (math.isfinite(start) and math.isfinite(length) and length >= 0 and worker >= 0):
        given = f"ts = {start:g}, dur = {length:g}, pid = {worker + 1}"
        raise InputError(f"{path}: task {name[:60]!r}: {given}: must be finite, dur from 0 and pid from 1 on")
    return Task(name, resource, worker, start / 1e6, (start + length) / 1e6, kind, layer, step)


def _dependencies(path: Path, slices: list[dict[str, Any]]) -> tuple[tuple[int, int], ...]:
    pairs = []
    for number, event in enumerate(slices):
        sources = event.get("args", {}).get("after", [])
        if not isinstance(sources, list) or not all(type(item) is int and 0 <= item < len(slices) for item in sources):
            raise InputError(
                f"{path}: task {number}: after = {str(sources)[:60]}: must be numbers of tasks; write it again"
            )
        pairs += [(source, number) for source in sources]
    return tuple(pairs)
