"""How fast a trace is read and its critical path found, beside plain Python doing the same work in the same run."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steptime.traces.critical_path import critical_path, innermost, tasks
from steptime.traces.kineto import NOTHING, Trace, read_trace
from steptime.traces.steps import SHORTEST_WAIT_S, steps

EVENTS = 200_000
LOAD_GOAL_S = 2.0
NODES_GOAL_PER_S = 100_000
_EVENTS_A_CALL = 4
_CALLS_A_STEP = 500


def trace_speed(events: int = EVENTS, repeats: int = 3, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Time reading and the critical path on a made-up trace of `events`, in alternation with plain Python.

    Both must find the same path. Returns seconds (medians), nodes a second, the ratios, and the peak memory of a
    process that only reads; reports them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        _write(path, events)
        times: dict[str, list[float]] = {"load": [], "plain_load": [], "path": [], "plain_path": []}
        for _ in range(repeats):
            trace = _timed(times["load"], read_trace, path)
            ours = _timed(times["path"], _path_of, trace)
            columns = _timed(times["plain_load"], plain_load, path)
            plain = _timed(times["plain_path"], plain_path, *_step_of(trace), columns)
            del columns  # so that Python's garbage collector does not go through them while ours is timed
        size_bytes, peaks = path.stat().st_size, [_peak_bytes(path, code) for code in _PROBES]
    result: dict[str, Any] = {name: statistics.median(values) for name, values in times.items()}
    nodes = len(tasks([trace]))
    if not np.allclose(ours, plain, atol=1e-9):
        raise AssertionError(f"the two paths differ: {ours} and {plain}")
    result |= {"nodes": nodes, "nodes_per_s": nodes / result["path"], "plain_nodes_per_s": nodes / result["plain_path"]}
    result |= {"peak_bytes": peaks[0], "plain_peak_bytes": peaks[1], "file_bytes": size_bytes}
    met = result["load"] <= LOAD_GOAL_S and result["nodes_per_s"] >= NODES_GOAL_PER_S
    report(
        f"read {len(trace)} events, {size_bytes / 2**20:.0f} MiB: {result['load']:.2f} s "
        f"(plain Python {result['plain_load']:.2f} s, {result['plain_load'] / result['load']:.1f} times as long; "
        f"goal: at most {LOAD_GOAL_S:g} s)"
    )
    report(
        f"memory that reading adds at its peak: {peaks[0] / 2**20:.0f} MiB (plain Python {peaks[1] / 2**20:.0f} MiB)"
    )
    report(
        f"critical path of {nodes} nodes: {result['path']:.2f} s, {result['nodes_per_s']:,.0f} nodes/s (plain Python "
        f"{result['plain_nodes_per_s']:,.0f} nodes/s; goal: at least {NODES_GOAL_PER_S:,} nodes/s)"
    )
    report(f"goals: {'met' if met else 'MISSED'}; both found the same path of {plain[0]} tasks")
    return result | {"met": met}


def _timed(into: list[float], work: Callable[..., Any], *arguments: Any) -> Any:
    start = time.perf_counter()
    found = work(*arguments)
    into.append(time.perf_counter() - start)
    return found


def _step_of(trace: Trace) -> tuple[float, float]:
    known = steps(trace)
    return float(known["start_s"].min()), float(known["end_s"].max())


def _path_of(trace: Trace) -> tuple[int, float, float]:
    """Tasks, seconds in them, and seconds between them, on the path of the whole file."""
    path = critical_path([trace])
    return len(path), float((path["end_s"] - path["start_s"]).sum()), float(path["gap_s"].sum())


_PROBES = (
    "from steptime.traces.kineto import read_trace; work = read_trace",
    "from steptime.traces.benchmark import plain_load; work = plain_load",
)


def _peak_bytes(path: Path, code: str) -> int:
    """What reading adds to a fresh process's largest resident set."""
    probe = (
        f"import sys; from pathlib import Path; {code}\n"
        "def peak(): return int(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])\n"
        "before = peak(); kept = work(Path(sys.argv[1])); print((peak() - before) * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", probe, str(path)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def _write(path: Path, events: int) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": [\n')
        for number, event in enumerate(_made_up(events)):
            file.write((",\n" if number else "") + json.dumps(event, indent=2))
        file.write("\n]}\n")


def _made_up(events: int) -> Iterator[dict[str, Any]]:
    """Layers called in turn: two nested operations, the launch, and its kernel; the device lags or waits."""
    generator = np.random.default_rng(1)
    calls = events // _EVENTS_A_CALL
    host_us, kernel_us = generator.uniform(20, 40, calls), generator.gamma(2.0, 14.0, calls)
    now = device = 0.0
    for call in range(calls):
        if call % _CALLS_A_STEP == 0:
            length = float(host_us[call : call + _CALLS_A_STEP].sum())
            name = f"ProfilerStep#{call // _CALLS_A_STEP}"
            yield _event("user_annotation", name, 1, now, length, {"External id": call})
        inner = {"External id": call, "Record function id": 0, "Concrete Inputs": ["", "", ""], "Ev Idx": call}
        shapes = {"Input Dims": [[512], [64, 1024], [1024, 512]], "Input type": ["float", "float", "float"]}
        length, launch = float(host_us[call]) * 0.9, now + float(host_us[call]) * 0.5
        yield _event("cpu_op", "aten::linear", 1, now, length, inner | shapes)
        yield _event("cpu_op", "aten::addmm", 1, now + 0.1 * length, 0.85 * length, inner | shapes)
        correlation = {"correlation": call, "External id": call}
        yield _event("cuda_runtime", "cudaLaunchKernel", 1, launch, 4.0, correlation | {"cbid": 211})
        start = max(device + 1.0, launch + 6.0)
        about = correlation | {"stream": 7, "device": 0, "grid": [128, 1, 1], "block": [256, 1, 1], "warps per SM": 9.5}
        yield _event("kernel", "ampere_sgemm_128x64_tn", 7, start, float(kernel_us[call]), about)
        device = start + float(kernel_us[call])
        now += float(host_us[call])


def _event(category: str, name: str, thread: int, start: float, length: float, args: dict[str, Any]) -> dict[str, Any]:
    place = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread}
    return place | {"ts": round(start, 3), "dur": round(length, 3), "args": args}


# --------------------------------------------------------------------------------------------- the same in plain Python


@dataclass(frozen=True)
class Columns:
    """Events by start, as lists."""

    category: list[str]
    correlation: list[int]
    lane: list[tuple[int, int]]
    start_s: list[float]
    end_s: list[float]
    name: list[str]


def plain_load(path: Path) -> Columns:
    """The events: `json.load` and a loop."""
    with open(path, encoding="utf-8") as file:
        found = json.load(file)["traceEvents"]
    first = min(event["ts"] for event in found)
    rows = []
    for event in found:
        if event["ph"] == "X":
            start = (event["ts"] - first) * 1e-6
            correlation = event.get("args", {}).get("correlation", NOTHING)
            lane = (event["pid"], event["tid"])
            rows.append((start, start + event["dur"] * 1e-6, event["cat"], correlation, lane, event["name"]))
    rows.sort(key=lambda row: (row[0], -row[1]))
    start_s, end_s, category, correlations, lanes, names = (list(column) for column in zip(*rows, strict=True))
    return Columns(category, correlations, lanes, start_s, end_s, names)


def plain_path(low: float, high: float, events: Columns) -> tuple[int, float, float]:
    """The critical path of one rank by the rule of `critical_path`, one task at a time."""
    category, correlation, lane = events.category, events.correlation, events.lane
    start_s, end_s = events.start_s, events.end_s
    pieces: list[tuple[float, float, Any, float | None, Any]] = []
    launch = {
        correlation[row]: (start_s[row], lane[row]) for row in range(len(lane)) if category[row] == "cuda_runtime"
    }
    for place in dict.fromkeys(lane):
        rows = [row for row in range(len(lane)) if lane[row] == place and category[row] != "user_annotation"]
        own = innermost(np.array([start_s[row] for row in rows]), np.array([end_s[row] for row in rows]))
        for piece, start, end in zip(*(column.tolist() for column in own), strict=True):
            row = rows[piece]
            at, by = launch.get(correlation[row], (None, None)) if category[row] == "kernel" else (None, None)
            pieces.append((start, end, place, at, by))
    pieces.sort(key=lambda piece: piece[1])
    ends: dict[Any, list[float]] = {}
    begins: dict[Any, list[float]] = {}
    numbers: dict[Any, list[int]] = {}
    for number, (start, end, place, _, _) in enumerate(pieces):
        ends.setdefault(place, []).append(end)
        begins.setdefault(place, []).append(start)
        numbers.setdefault(place, []).append(number)
    every_end = [piece[1] for piece in pieces]
    device = [number for number, piece in enumerate(pieces) if piece[3] is not None]
    device_end = [every_end[number] for number in device]
    before = []
    for start, _, place, at, by in pieces:
        found = bisect_right(ends[place], start + 1e-10) - 1
        chosen, since = (numbers[place][found], ends[place][found]) if found >= 0 else (-1, float("-inf"))
        if at is not None:
            launcher = bisect_right(begins[by], at + 1e-10) - 1
            if launcher >= 0 and at > since:
                chosen, since = numbers[by][launcher], at
        if start - since > SHORTEST_WAIT_S:
            known, which = (device_end, device) if at is not None else (every_end, range(len(pieces)))
            last = bisect_right(known, start + 1e-10) - 1
            if last >= 0 and known[last] > since:
                chosen = which[last]
        before.append(chosen)
    now = bisect_right(every_end, high + 1e-10) - 1
    count, inside, between, until = 0, 0.0, 0.0, float("inf")
    while now >= 0 and pieces[now][1] > low:
        end, start = min(pieces[now][1], until), max(pieces[now][0], low)
        if end > start:
            between += max(0.0, until - end) if until < float("inf") else 0.0
            count, inside = count + 1, inside + end - start
        until = min(until, start)
        now = before[now]
    return count, inside, between + max(0.0, until - low)
