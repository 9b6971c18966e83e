"""Trace Event files (Chrome's JSON, of PyTorch's profiler and Perfetto): the events, a part of the file at a time.

Format: "Trace Event Format" of the Chromium project; an object with the list `traceEvents`, or that list alone.
"""

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import orjson

from steptime.core.errors import InputError

CHUNK_BYTES = 1 << 20
LONGEST_EVENT_BYTES = 16 << 20
"""What stands before, after or within one event may be this long; it bounds the memory that a file can ask for."""
_OPENING = re.compile(rb'"traceEvents"\s*:\s*\[')
_NEXT_EVENT = re.compile(rb"\s*,\s*\{")
_BACKWARD_TRIES = 8
_MEND = "record it again"


def event_blocks(path: Path) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """The file's events in lists of about a mebibyte of text, each with the keys beside `traceEvents` known so far.

    Plain or gzip (told by its first bytes). Only the last list's keys are complete. Raises InputError with the byte
    (of the unpacked text) and the number of the event before for what is truncated, not JSON, or no trace.
    """
    try:
        with _opened(path) as file:
            yield from _blocks(path, file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: is a damaged or truncated gzip file ({error}); {_MEND}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check the path") from None


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    with open(path, "rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if is_packed else open(path, "rb")


def _blocks(path: Path, file: IO[bytes] | gzip.GzipFile) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    header, buffer, is_object = _head(path, file)
    done_bytes, done_events = file.tell() - len(buffer), 0
    while chunk := file.read(CHUNK_BYTES):
        buffer += chunk
        end, events = _whole_events(buffer)
        if events:
            done_events += len(events)
            yield header, events
            # What is kept begins after the comma, so that it is a list's inside again.
            end = buffer.index(b"{", end)
            done_bytes += end
            del buffer[:end]
        elif len(buffer) > LONGEST_EVENT_BYTES:
            raise _not_json(path, b"[" + bytes(buffer), 1, done_bytes, done_events)
    tail = bytes(buffer)
    opening = b'{"traceEvents":[' if is_object else b"["
    try:
        last = orjson.loads(opening + tail)
    except orjson.JSONDecodeError:
        raise _not_json(path, opening + tail, len(opening), done_bytes, done_events) from None
    if is_object:
        header = header | {key: value for key, value in last.items() if key != "traceEvents"}
        last = last["traceEvents"]
    if not isinstance(last, list):
        raise InputError(f"{path}: traceEvents is given twice and is no list the second time; {_MEND}")
    yield header, last


def _head(path: Path, file: IO[bytes] | gzip.GzipFile) -> tuple[dict[str, Any], bytearray, bool]:
    """What stands before the events, the bytes read beyond it, and whether the file is an object."""
    buffer = bytearray()
    while len(buffer) <= LONGEST_EVENT_BYTES:
        chunk = file.read(CHUNK_BYTES)
        buffer += chunk
        start = bytes(buffer[:64]).lstrip()[:1]
        if start == b"[":
            return {}, buffer[buffer.index(b"[") + 1 :], False
        if start not in (b"{", b""):
            raise InputError(f"{path}: is no trace in JSON (begins with {bytes(buffer[:8])!r}); give another file")
        found = _OPENING.search(buffer)
        if found:
            try:
                header = orjson.loads(bytes(buffer[: found.end()]) + b"]}")
            except orjson.JSONDecodeError as error:
                raise InputError(f"{path}: byte {error.pos}: not valid JSON ({error.msg}); {_MEND}") from None
            del buffer[: found.end()]
            return {key: value for key, value in header.items() if key != "traceEvents"}, buffer, True
        if not chunk:
            break
    why = "is empty" if not buffer.strip() else "has no list 'traceEvents'"
    raise InputError(f"{path}: {why}; give a trace that a profiler exported")


def _whole_events(buffer: bytearray) -> tuple[int, list[Any]]:
    """The longest run of whole events at the buffer's start, and where it ends; an empty list if none is found.

    Only a prefix that ends between two events is a valid list, so the parser decides; a `}` inside an event or a
    string costs one failed try.
    """
    tries, place = 0, len(buffer)
    while tries < _BACKWARD_TRIES and (place := buffer.rfind(b"}", 0, place)) >= 0:
        if _NEXT_EVENT.match(buffer, place + 1):
            tries += 1
            try:
                return place + 1, orjson.loads(b"[" + buffer[: place + 1] + b"]")
            except orjson.JSONDecodeError:
                continue
    return 0, []


def _not_json(path: Path, text: bytes, opening: int, done_bytes: int, done_events: int) -> InputError:
    try:
        orjson.loads(text)
        message, place = "an event or what follows the events is too long", len(text)
    except orjson.JSONDecodeError as error:
        message, place = error.msg, error.pos
    what = "truncated" if place >= len(text) - 1 else "not valid JSON"
    byte = done_bytes + max(0, place - opening)
    return InputError(f"{path}: byte {byte}, after event {done_events}: {what} ({message}); {_MEND}")
