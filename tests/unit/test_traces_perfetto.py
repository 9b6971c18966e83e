"""Timelines as Trace Event files: what a viewer needs, back again, and damaged ones."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.core.step import Task, Timeline
from steptime.traces.perfetto import read_timeline, timeline_text, write_timeline

TWO = Timeline(
    "simulated",
    (
        Task("forward conv", "compute", 0, 0.0, 1.5e-3, kind="forward", layer="conv", step=1),
        Task("aggregate conv", "link", 0, 1.5e-3, 2e-3),
        Task("forward conv", "compute", 3, 0.0, 1.25e-3),
    ),
    ((0, 1), (2, 1)),
)


def test_the_file_has_what_a_viewer_needs(tmp_path):
    write_timeline(tmp_path / "t.json", TWO)
    found = json.loads((tmp_path / "t.json").read_text())
    assert found["otherData"] == {"format": "steptime timeline", "kind": "simulated"}
    by_phase = {phase: [event for event in found["traceEvents"] if event["ph"] == phase] for phase in "MXsf"}
    processes = {event["pid"]: event["args"]["name"] for event in by_phase["M"] if event["name"] == "process_name"}
    threads = {event["tid"]: event["args"]["name"] for event in by_phase["M"] if event["name"] == "thread_name"}
    assert processes == {1: "worker 0 (simulated)", 4: "worker 3 (simulated)"}
    assert sorted(threads.values()) == ["compute", "compute", "link"]
    first = by_phase["X"][0]
    assert (first["name"], first["ts"], first["dur"], first["pid"]) == ("forward conv", 0, 1500, 1)
    assert threads[first["tid"]] == "compute"
    for event in (*by_phase["X"], *by_phase["s"], *by_phase["f"]):
        assert event["pid"] in processes
        assert event["tid"] in threads
    # An arrow has a start and an end with one number, each at the start of its task.
    ends = [(event["id"], event["ts"]) for event in by_phase["f"]]
    assert ends == [(1, 1500), (2, 1500)]
    assert [event["id"] for event in by_phase["s"]] == [1, 2]


def test_the_same_timeline_is_the_same_bytes():
    assert timeline_text(TWO) == timeline_text(TWO)


def test_an_empty_timeline(tmp_path):
    write_timeline(tmp_path / "t.json", Timeline("modelled", ()))
    assert read_timeline(tmp_path / "t.json") == Timeline("modelled", ())


TASKS = st.builds(
    lambda name, resource, worker, start, length, kind, layer, step: Task(
        name, resource, worker, start, start + length, kind, layer, step
    ),
    *(st.text(max_size=5), st.text(max_size=5), st.integers(0, 5), st.floats(0, 1e4), st.floats(0, 100)),
    *(st.text(max_size=3), st.text(max_size=3), st.integers(0, 9)),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["measured", "emulated", "modelled", "simulated"]), st.lists(TASKS, max_size=6), st.data())
def test_any_timeline_comes_back(tmp_path, kind, tasks, data):
    places = st.integers(0, max(0, len(tasks) - 1))
    links = data.draw(st.lists(st.tuples(places, places), max_size=4, unique=True)) if tasks else []
    write_timeline(tmp_path / "t.json", Timeline(kind, tuple(tasks), tuple(links)))
    found = read_timeline(tmp_path / "t.json")
    assert (found.kind, set(found.dependencies)) == (kind, set(links))
    for task, again in zip(tasks, found.tasks, strict=True):
        assert (again.start_s, again.end_s) == pytest.approx((task.start_s, task.end_s), abs=2e-12, rel=1e-12)
        times = {"start_s": 0.0, "end_s": 0.0}
        assert Task(**vars(again) | times) == Task(**vars(task) | times)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"otherData": {}}, "give a timeline that steptime wrote"),
        ({"otherData": {"format": "steptime timeline", "kind": "guessed"}}, "otherData.kind = 'guessed'"),
        ({"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1, "pid": 1, "tid": 9}]}, "cannot be read"),
        ({"traceEvents": [{"ts": 1}]}, "an event cannot be read"),
        ({"traceEvents": [7]}, "an event cannot be read"),
    ],
)
def test_another_file_is_one_line(tmp_path, change, said):
    whole = json.loads(timeline_text(TWO)) | change
    (tmp_path / "t.json").write_text(json.dumps(whole))
    with pytest.raises(InputError) as error:
        read_timeline(tmp_path / "t.json")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("dur", -1, "dur = -1"), ("pid", 0, "pid = 0"), ("ts", None, "cannot be read"), ("args", {"after": [9]}, "after")],
)
def test_a_task_that_cannot_be(tmp_path, key, value, said):
    whole = json.loads(timeline_text(TWO))
    next(event for event in whole["traceEvents"] if event["ph"] == "X")[key] = value
    (tmp_path / "t.json").write_text(json.dumps(whole))
    with pytest.raises(InputError) as error:
        read_timeline(tmp_path / "t.json")
    assert said in str(error.value)
