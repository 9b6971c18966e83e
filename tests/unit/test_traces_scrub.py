"""A scrubbed trace says the same of the step, and nothing of the machine."""

import getpass
import gzip
import json
import socket
from pathlib import Path

import numpy as np
import pandas as pd
import planted_trace as planted
import pytest

from steptime.core.errors import InputError
from steptime.traces.critical_path import critical_path
from steptime.traces.kineto import read_traces
from steptime.traces.layers import layers
from steptime.traces.scrub import add_traces
from steptime.traces.steps import aligned, breakdown, matched


@pytest.fixture
def private(tmp_path):
    """Two ranks whose files hold a host's name, a user's, paths and odd process numbers."""
    paths = []
    for rank, path in enumerate(planted.two_ranks(tmp_path, skew_ms=2.0)):
        content = json.loads(gzip.decompress(path.read_bytes()))
        content |= {"host_name": "secret-host", "traceName": "/home/secret-user/t.json"}
        for event in content["traceEvents"]:
            event["pid"] = event["pid"] + 31337
            event.setdefault("args", {})["Concrete Inputs"] = ["/home/secret-user/data"]
        frame = {"ph": "X", "cat": "python_function", "name": "/home/secret-user/train.py(3): step"}
        note = {
            "ph": "M",
            "name": "thread_name",
            "pid": 31437,
            "tid": 1,
            "args": {"name": "thread 31337 (secret-user)"},
        }
        content["traceEvents"] += [frame | {"pid": 31437, "tid": 1, "ts": 0, "dur": 1}, note]
        paths.append(tmp_path / f"private{rank}.json")
        paths[-1].write_text(json.dumps(content))
    return paths


def test_nothing_that_identifies_is_left(private, tmp_path):
    for path in add_traces(private, tmp_path / "added"):
        text = gzip.decompress(path.read_bytes()).decode()
        for word in ("secret", "home", "31337", "31437", str(planted.BASE_NS)[:6]):
            assert word not in text


def test_it_says_the_same_of_the_step(private, tmp_path):
    before = aligned(read_traces(private)).traces
    after = aligned(read_traces(add_traces(private, tmp_path / "added"))).traces
    for one, two in zip(before, after, strict=True):
        pd.testing.assert_frame_equal(breakdown(one), breakdown(two), rtol=1e-6)
        pd.testing.assert_frame_equal(layers(one), layers(two), rtol=1e-6)
    keys = ["step", "operation", "n_bytes", "occurrence", "rank"]
    pd.testing.assert_frame_equal(matched(before)[keys], matched(after)[keys])
    paths = [critical_path(traces, 3) for traces in (before, after)]
    pd.testing.assert_frame_equal(*(path[["rank", "name", "start_s", "end_s"]] for path in paths), atol=1e-8)


def test_clocks_differ_as_before(private, tmp_path):
    before, after = (aligned(read_traces(paths)) for paths in (private, add_traces(private, tmp_path / "added")))
    np.testing.assert_allclose(before.offset_s, after.offset_s, atol=2e-9)


def test_the_same_traces_are_the_same_bytes(private, tmp_path):
    one, two = (add_traces(private, tmp_path / name) for name in ("one", "two"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_what_is_there_stays(private, tmp_path):
    add_traces(private, tmp_path / "added")
    with pytest.raises(InputError, match="is there already"):
        add_traces(private, tmp_path / "added")


def test_a_bad_file_leaves_nothing(private, tmp_path):
    private[1].write_text("{")
    with pytest.raises(InputError):
        add_traces(private, tmp_path / "added")
    assert not (tmp_path / "added").exists()


def test_the_shipped_traces_are_small_named_and_anonymous(root):
    """Git's other files are searched for private names as they are; these are packed."""
    folders = [folder for folder in (root / "data/traces").iterdir() if folder.is_dir() and any(folder.glob("*.gz"))]
    assert folders
    private = {word for word in (socket.gethostname(), getpass.getuser(), str(Path.home()), str(root)) if len(word) > 4}
    for folder in folders:
        paths = sorted(folder.glob("*.json.gz"))
        assert f"`{folder.name}`" in (root / "data/traces/README.md").read_text()
        assert sum(path.stat().st_size for path in paths) <= 300_000
        assert [trace.rank for trace in read_traces(paths)] == list(range(len(paths)))
        for path in paths:
            text = gzip.decompress(path.read_bytes()).decode()
            assert not [word for word in (*private, "host_name", "baseTimeNanoseconds", "/home/") if word in text]
