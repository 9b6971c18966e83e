"""Traces of PyTorch's profiler (Kineto): one file a rank, read into columns.

Kept are the operations, runtime calls, kernels, copies, annotations and modules, and the arrows from forward to
backward. A kernel knows the call that launched it by its correlation. Times are seconds from the file's first event.
"""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from steptime.core.errors import InputError
from steptime.traces.chrome import event_blocks

CATEGORIES = (
    "cpu_op",
    "annotation",
    "module",
    "runtime",
    "kernel",
    "copy",
)
"""What an event is. `annotation`: a named range of the host; `module`: one nn.Module's range; `copy`: of the device."""
CPU_OP, ANNOTATION, MODULE, RUNTIME, KERNEL, COPY = range(len(CATEGORIES))
CATEGORY_OF = {
    "cpu_op": CPU_OP,
    "operator": CPU_OP,
    "user_annotation": ANNOTATION,
    "python_function": MODULE,
    "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    "runtime": RUNTIME,
    "kernel": KERNEL,
    "gpu_memcpy": COPY,
    "gpu_memset": COPY,
    "memcpy": COPY,
    "memset": COPY,
}
NOTHING = -1
"""No correlation, no external id, unknown bytes."""
_BYTES_OF = {
    **dict.fromkeys(("double", "long", "longint", "int64", "float64", "complexfloat"), 8),
    **dict.fromkeys(("float", "int", "int32", "float32"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "float16", "int16"), 2),
    **dict.fromkeys(("char", "byte", "bool", "unsignedchar", "signedchar", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 1),
}
OPERATIONS = (
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("sendrecv", "send_recv"),
    ("send", "send"),
    ("recv", "recv"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
)
"""What a name without underscores contains -> the collective's name here; the first that fits."""
_HOST_COLLECTIVE = re.compile(r"(gloo|nccl|mpi|ucc|xccl|hccl):(?P<op>.+)")
_DEVICE_COLLECTIVE = re.compile(r"(nccl|rccl|xccl|oneccl)\w*Kernel\w*?_(?P<op>[A-Za-z]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Lane:
    """Where events run one after the other: a thread of the host, or a stream of a device."""

    process: str
    thread: str
    is_device: bool


@dataclass(frozen=True)
class Message:
    """What the trace says of one collective: `n_bytes` is the larger of what goes in and what comes out on one rank.

    NOTHING for unknown bytes, `group` for the process group's name ("" unknown).
    """

    operation: str
    n_bytes: int = NOTHING
    group: str = ""


@dataclass(frozen=True)
class Trace:
    """One rank's file: a row an event, sorted by start. `messages` are those of the rows that are collectives."""

    source: str
    rank: int
    world_size: int
    origin_ns: int
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    name: np.ndarray
    lane: np.ndarray
    category: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    correlation: np.ndarray
    external: np.ndarray
    messages: dict[int, Message]
    arrows: np.ndarray
    """Rows (lane, s of forward, lane, s of backward): autograd's arrows."""

    def __len__(self) -> int:
        return len(self.name)

    def __repr__(self) -> str:
        return f"Trace({self.source}: rank {self.rank} of {self.world_size}, {len(self)} events)"

    @property
    def has_device(self) -> bool:
        return bool((self.category == KERNEL).any())

    def rows(self, *categories: int) -> np.ndarray:
        """The rows of these categories."""
        return np.flatnonzero(np.isin(self.category, categories))

    def named(self, pattern: str) -> np.ndarray:
        """Which names match a regular expression from their beginning; index it with `name`."""
        compiled = re.compile(pattern)
        return np.array([compiled.match(name) is not None for name in self.names], dtype=bool)


def read_traces(paths: Sequence[Path]) -> list[Trace]:
    """The traces of the ranks of one job, by rank. Raises InputError where two files are of the same rank."""
    traces: list[Trace] = []
    for place, path in enumerate(paths):
        trace = read_trace(path, rank=place)
        twin = next((other for other in traces if other.rank == trace.rank), None)
        if twin is not None:
            raise InputError(f"{path}: is of rank {trace.rank}, as {twin.source} is; give one file a rank")
        traces.append(trace)
    return sorted(traces, key=lambda trace: trace.rank)


def read_trace(path: Path, rank: int = 0) -> Trace:
    """One rank's trace, plain or gzip; `rank` counts where the file names none. Raises InputError with the place."""
    columns, header, done = _Columns(), {}, 0
    for known, events in event_blocks(path):
        header = known
        try:
            columns.add(events)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
            raise InputError(f"{path}: event {_faulty(events, done)}; record it again") from None
        done += len(events)
    if not len(columns.start):
        raise InputError(f"{path}: has no operation, kernel or annotation among {done} events; profile some steps")
    return _trace(path, rank, columns, header)


@dataclass
class _Columns:
    """The columns while they grow; the smallest forms, since a trace has millions of rows."""

    names: dict[str, int] = field(default_factory=dict)
    lanes: dict[tuple[Any, Any], int] = field(default_factory=dict)
    labels: dict[tuple[Any, Any], str] = field(default_factory=dict)
    name: array = field(default_factory=lambda: array("i"))
    lane: array = field(default_factory=lambda: array("i"))
    category: array = field(default_factory=lambda: array("b"))
    start: array = field(default_factory=lambda: array("d"))
    duration: array = field(default_factory=lambda: array("d"))
    correlation: array = field(default_factory=lambda: array("q"))
    external: array = field(default_factory=lambda: array("q"))
    messages: dict[int, Message] = field(default_factory=dict)
    arrows: dict[Any, list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, events: list[Any]) -> None:
        names, lanes = self.names, self.lanes
        for event in events:
            phase = event["ph"]
            if phase == "X":
                category = CATEGORY_OF.get(event.get("cat", "").lower())
                name = event["name"]
                if category is None or (category == MODULE and not name.startswith("nn.Module: ")):
                    continue
                args = event.get("args") or {}
                self.start.append(event["ts"])
                self.duration.append(event.get("dur", 0))
                self.name.append(names.setdefault(name, len(names)))
                self.lane.append(lanes.setdefault((event["pid"], event["tid"]), len(lanes)))
                self.category.append(category)
                self.correlation.append(args.get("correlation", NOTHING))
                self.external.append(args.get("External id", NOTHING))
                if "Collective name" in args or ":" in name or category == KERNEL:
                    message = _message(name, category, args)
                    if message is not None:
                        self.messages[len(self.start) - 1] = message
            elif phase == "M":
                if event["name"] in ("process_name", "thread_name"):
                    self.labels[event["pid"], event["tid"] if event["name"] == "thread_name" else None] = str(
                        event["args"]["name"]
                    )
            elif phase in ("s", "f") and event.get("cat") == "fwdbwd":
                lane = lanes.setdefault((event["pid"], event["tid"]), len(lanes))
                self.arrows.setdefault(event["id"], []).append((lane, float(event["ts"])))


def _message(name: str, category: int, args: dict[str, Any]) -> Message | None:
    """What an event says of a collective, or None for one that is none."""
    found = None
    if category == KERNEL:
        found = _DEVICE_COLLECTIVE.search(name)
    elif category == ANNOTATION:
        found = _HOST_COLLECTIVE.match(name)
    given = str(args["Collective name"]) if "Collective name" in args else found["op"] if found else ""
    if not given or (found is None and name != "record_param_comms"):
        return None
    return Message(_operation(given), _message_bytes(args), str(args.get("Process Group Name", "")))


def _operation(given: str) -> str:
    plain = given.replace("_", "").lower()
    return next((name for part, name in OPERATIONS if part in plain), given)


def _message_bytes(args: dict[str, Any]) -> int:
    if "dtype" in args:
        size = _element_bytes(args["dtype"])
        elements = max(int(args.get("In msg nelems", 0)), int(args.get("Out msg nelems", 0)))
        return size * elements if size else NOTHING
    kinds, shapes = args.get("Input type") or [], args.get("Input Dims") or []
    total = 0
    for kind, shape in zip(kinds, shapes, strict=False):
        size = _element_bytes(kind)
        if size and isinstance(shape, list) and shape:
            total += size * int(np.prod([int(length) for length in shape], dtype=float))
    return total or NOTHING


def _element_bytes(kind: Any) -> int:
    return _BYTES_OF.get(str(kind).lower().removeprefix("c10::").replace(" ", ""), 0)


def _faulty(events: list[Any], done: int) -> str:
    """The first event that cannot be read, and why, in words."""
    for number, event in enumerate(events, start=done + 1):
        try:
            _Columns().add([event])
        except KeyError as error:
            return f"{number}: key {error} is missing"
        except (TypeError, AttributeError, ValueError, OverflowError) as error:
            return f"{number}: {str(event)[:80]!r} cannot be read ({str(error)[:80]})"
    return f"{done + 1}: cannot be read"


def _trace(path: Path, rank: int, columns: _Columns, header: dict[str, Any]) -> Trace:
    start, duration = (np.frombuffer(column, dtype=float) for column in (columns.start, columns.duration))
    bad = ~(np.isfinite(start) & np.isfinite(duration) & (duration >= 0) & (np.abs(start) < 1e18) & (duration < 1e15))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        name = list(columns.names)[columns.name[row]]
        raise InputError(
            f"{path}: event {name[:60]!r}: ts = {start[row]:g}, dur = {duration[row]:g}: must be finite, microseconds, "
            "and dur not below 0; record it again"
        )
    first_us = float(start.min())
    order = np.lexsort((-duration, start))
    place = np.empty(len(order), dtype=int)
    place[order] = np.arange(len(order))
    begin = (start[order] - first_us) * 1e-6
    names = tuple(columns.names)
    if not all(isinstance(name, str) for name in names):
        raise InputError(f"{path}: an event's name is no text; record it again")
    own_rank, world_size = _distributed(path, header, rank)
    arrows = [
        (ends[0][0], (ends[0][1] - first_us) * 1e-6, ends[1][0], (ends[1][1] - first_us) * 1e-6)
        for ends in (sorted(pair, key=lambda end: end[1]) for pair in columns.arrows.values() if len(pair) == 2)
    ]
    category = np.frombuffer(columns.category, dtype=np.int8)[order]
    lane = np.frombuffer(columns.lane, dtype=np.int32)[order]
    on_device = set(lane[np.isin(category, (KERNEL, COPY))].tolist())
    return Trace(
        source=str(path),
        rank=own_rank,
        world_size=world_size,
        origin_ns=_base_ns(path, header) + round(first_us * 1e3),
        names=names,
        lanes=tuple(
            Lane(
                columns.labels.get((process, None), str(process)),
                columns.labels.get((process, thread), str(thread)),
                number in on_device,
            )
            for (process, thread), number in columns.lanes.items()
        ),
        name=np.frombuffer(columns.name, dtype=np.int32)[order],
        lane=lane,
        category=category,
        start_s=begin,
        end_s=begin + duration[order] * 1e-6,
        correlation=np.frombuffer(columns.correlation, dtype=np.int64)[order],
        external=np.frombuffer(columns.external, dtype=np.int64)[order],
        messages={int(place[row]): message for row, message in columns.messages.items()},
        arrows=np.array(arrows, dtype=float).reshape(-1, 4),
    )


def _distributed(path: Path, header: dict[str, Any], rank: int) -> tuple[int, int]:
    given = header.get("distributedInfo")
    if not isinstance(given, dict) or "rank" not in given:
        return rank, NOTHING
    found, size = given["rank"], given.get("world_size", NOTHING)
    for key, value, low in (("rank", found, 0), ("world_size", size, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or (value < low and value != NOTHING):
            raise InputError(f"{path}: distributedInfo.{key} = {value!r}: must be {low} or more; record it again")
    return found, size


def _base_ns(path: Path, header: dict[str, Any]) -> int:
    base = header.get("baseTimeNanoseconds", 0)
    if isinstance(base, bool) or not isinstance(base, int):
        raise InputError(f"{path}: baseTimeNanoseconds = {base!r}: must be a whole number; record it again")
    return base


def shifted(trace: Trace, seconds: float) -> Trace:
    """The same trace with its clock put forward."""
    arrows = trace.arrows.copy()
    arrows[:, [1, 3]] += seconds
    return replace(trace, start_s=trace.start_s + seconds, end_s=trace.end_s + seconds, arrows=arrows)


def launches(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """For each row of the device: when and on which lane the call that launched it began; NaN for others."""
    is_device = np.isin(trace.category, (KERNEL, COPY))
    when, lane = np.full(len(trace), np.nan), np.zeros(len(trace), dtype=int)
    host = np.flatnonzero(~is_device & (trace.correlation != NOTHING))
    device = np.flatnonzero(is_device & (trace.correlation != NOTHING))
    if len(host) and len(device):
        host = host[np.argsort(trace.correlation[host], kind="stable")]
        found = np.searchsorted(trace.correlation[host], trace.correlation[device])
        found = np.minimum(found, len(host) - 1)
        same = trace.correlation[host[found]] == trace.correlation[device]
        when[device[same]] = trace.start_s[host[found[same]]]
        lane[device[same]] = trace.lane[host[found[same]]]
    return when, lane
