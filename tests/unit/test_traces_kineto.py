"""Reading profilers' traces: whole, in pieces, packed, damaged; what torch itself writes."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import planted_trace as planted
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.traces import chrome
from steptime.traces.critical_path import critical_path
from steptime.traces.kineto import CPU_OP, KERNEL, read_trace, read_traces
from steptime.traces.layers import layers
from steptime.traces.recorded import recorded_step
from steptime.traces.steps import aligned, breakdown, collectives, matched, steps


def events_of(path):
    return [event for _, events in chrome.event_blocks(path) for event in events]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000, 1 << 20])
@pytest.mark.parametrize("ending", ["json", "json.gz"])
def test_the_size_of_the_pieces_changes_nothing(tmp_path, monkeypatch, chunk, ending):
    recording = planted.Recording()
    for number in range(20):
        tricky = {"a": '},{ \\" [', "b": [{"x": 1}, {"y": [{}, {}]}], "c": "traceEvents"}
        recording.op(f'op }}, {{"ph" {number}', number, number + 1, **tricky)
    path = recording.write(tmp_path / f"trace.{ending}")
    monkeypatch.setattr(chrome, "CHUNK_BYTES", chunk)
    assert events_of(path) == recording.content()["traceEvents"]


def test_a_bare_list_and_keys_after_the_events_are_read(tmp_path):
    events = planted.Recording().op("a", 0, 1).op("b", 1, 2).events
    (tmp_path / "list.json").write_text(json.dumps(events))
    assert events_of(tmp_path / "list.json") == events
    info = {"rank": 5, "world_size": 8}
    (tmp_path / "after.json").write_text(json.dumps({"traceEvents": events, "distributedInfo": info}))
    trace = read_trace(tmp_path / "after.json")
    assert (trace.rank, trace.world_size, len(trace)) == (5, 8, 2)


def test_columns_are_what_was_written(tmp_path):
    recording = planted.Recording().op("outer", 1, 5).op("inner", 2, 3).kernel("gemm", 2.5, 3, 4, correlation=9)
    trace = read_trace(recording.write(tmp_path / "trace.json"))
    names = [trace.names[name] for name in trace.name]
    assert names == ["outer", "inner", "cudaLaunchKernel", "gemm"]
    np.testing.assert_allclose(trace.start_s, [0, 1e-3, 1.5e-3, 2e-3])
    np.testing.assert_allclose(trace.end_s, [4e-3, 2e-3, 1.51e-3, 3e-3])
    assert trace.correlation.tolist() == [-1, -1, 9, 9]
    assert trace.origin_ns == planted.BASE_NS + 1_000_000
    assert [lane.is_device for lane in trace.lanes] == [False, True]
    assert (trace.rows(CPU_OP).tolist(), trace.rows(KERNEL).tolist()) == ([0, 1], [3])


NCCL = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "BFloat16"}
GATHER = {"Collective name": "_allgather_base", "In msg nelems": 10, "Out msg nelems": 80, "dtype": "Float"}


def test_collectives_of_a_device_have_their_call_s_bytes(tmp_path):
    """The kernel says only what it is; the call that launched it (the same External id) says how much."""
    recording = planted.Recording()
    recording.op("record_param_comms", 0, 1, **NCCL, **{"External id": 4})
    recording.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 0.5, 2, 3, 1, stream=20, **{"External id": 4})
    recording.add("user_annotation", "nccl:all_reduce", 0, 1)
    recording.kernel("ncclDevKernel_AllGather_RING_LL(x)", 1.5, 3, 4, 2, stream=20, **GATHER)
    recording.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 1.7, 4, 5, 3, stream=20)
    table = collectives(read_trace(recording.write(tmp_path / "trace.json")))
    assert table["operation"].tolist() == ["all_reduce", "all_gather", "all_reduce"]
    assert table["n_bytes"].tolist() == [2000, 320, -1]


BAD = {
    "empty": (b"", "is empty"),
    "blank": (b"  \n ", "is empty"),
    "binary": (bytes(range(256)), "is no trace in JSON"),
    "text": (b"hello", "is no trace in JSON"),
    "no list": (b'{"a": 1}', "has no list 'traceEvents'"),
    "no events": (b'{"traceEvents": []}', "has no operation"),
    "cut": (b'{"traceEvents": [{"ph": "X", "name": "a"', "after event 0: truncated"),
    "not JSON": (b'{"traceEvents": [{"ph": "X", "name": nope}]}', "byte 37, after event 0: not valid JSON"),
    "bad head": (b'{"a": nope, "traceEvents": []}', "byte 6: not valid JSON"),
    "NaN": (
        b'{"traceEvents": [{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":NaN,"dur":1}]}',
        "not valid JSON",
    ),
    "infinite": (b'[{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1e999,"dur":1}]', "infinity"),
    "beyond all time": (b'[{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1e300,"dur":1}]', "ts = 1e+300"),
    "negative": (b'[{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1,"dur":-2}]', "dur = -2"),
    "text time": (b'[{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":"soon","dur":1}]', "event 1:"),
    "no time": (b'[{"ph":"M","name":"x"},{"ph":"X","cat":"cpu_op","name":"a"}]', "event 2: key 'ts' is missing"),
    "an event that is a number": (b"[1, 2]", "event 1:"),
    "zero workers": (
        b'{"distributedInfo": {"rank": 0, "world_size": 0}, "traceEvents": '
        b'[{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1,"dur":2}]}',
        "distributedInfo.world_size = 0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line_with_the_place(tmp_path, name):
    content, said = BAD[name]
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_trace(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_fault_far_into_a_file_names_the_event_before(tmp_path, monkeypatch):
    monkeypatch.setattr(chrome, "CHUNK_BYTES", 256)
    monkeypatch.setattr(chrome, "LONGEST_EVENT_BYTES", 2048)
    recording = planted.Recording()
    for number in range(100):
        recording.op("a", number, number + 1)
    text = json.dumps(recording.content())
    place = text.index('"a"', 3000)
    path = tmp_path / "bad.json"
    path.write_text(text[:place] + "oops" + text[place:])
    with pytest.raises(InputError, match=r"byte (\d+), after event (\d+): not valid JSON") as error:
        read_trace(path)
    assert f"byte {place}" in str(error.value)


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.999])
def test_a_truncated_gzip_is_one_line(tmp_path, kept):
    whole = planted.Recording().op("a", 0, 1).write(tmp_path / "whole.json.gz").read_bytes()
    path = tmp_path / "cut.json.gz"
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(InputError, match="damaged or truncated gzip"):
        read_trace(path)


def test_two_files_of_one_rank_are_refused(tmp_path):
    paths = [planted.Recording(rank=1).op("a", 0, 1).write(tmp_path / f"{name}.json") for name in "ab"]
    with pytest.raises(InputError, match="is of rank 1, as"):
        read_traces(paths)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
EVENT = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.sampled_from(["X", "M", "s", "f", "i"]) | JSON,
        "cat": st.sampled_from(["cpu_op", "kernel", "user_annotation", "fwdbwd", "python_function"]) | JSON,
        "name": st.sampled_from(["thread_name", "ProfilerStep#1", "gloo:all_reduce", "nn.Module: a"]) | JSON,
        "pid": st.integers(0, 2) | JSON,
        "tid": st.integers(0, 2) | JSON,
        "ts": st.floats(0, 1e6) | JSON,
        "dur": st.floats(0, 1e3) | JSON,
        "id": st.integers(0, 3) | JSON,
        "args": st.dictionaries(
            st.sampled_from(["correlation", "External id", "Collective name", "dtype", "Input Dims", "name"]), JSON
        )
        | JSON,
    },
)


def survives(path: Path) -> None:
    """Everything that is asked of a trace ends in an answer or in one line."""
    said = ""
    try:
        trace = read_trace(path)
        found = aligned([trace])
        breakdown(trace)
        layers(trace)
        tasks = critical_path(found.traces)
        assert (tasks["end_s"] >= tasks["start_s"]).all()
        for step in steps(trace)["step"]:
            recorded_step(found.traces, int(step))
    except InputError as error:
        said = str(error)
    assert "\n" not in said


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(EVENT, max_size=12), st.dictionaries(st.sampled_from(["distributedInfo", "baseTimeNanoseconds"]), JSON))
def test_no_trace_crashes_the_reader_or_what_reads_it(tmp_path, events, header):
    path = tmp_path / "fuzz.json"
    path.write_text(json.dumps(header | {"traceEvents": events}))
    survives(path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.integers(0, 10_000), st.booleans())
def test_no_damage_crashes_the_reader(tmp_path, noise, place, packed):
    recording = planted.Recording(0, 2).step(1, 0, 9).op("aten::mm", 1, 3).gloo(3, 5, 100).arrow(1, 1.5, 4)
    whole = json.dumps(recording.content()).encode()
    whole = gzip.compress(whole) if packed else whole
    place %= len(whole)
    path = tmp_path / "damaged.json"
    path.write_bytes(whole[:place] + noise + whole[place + len(noise) :])
    survives(path)


# ------------------------------------------------------------------------------------------------ torch's own traces

RECORD = """
import sys, torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + folder + "/store", rank=rank, world_size=2)
layers = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.02)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
plan = schedule(wait=0, warmup=2, active=3, repeat=1)
with profile(activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True) as profiler:
    for _ in range(5):
        with record_function("input"):
            x = torch.randn(32, 64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        profiler.step()
profiler.export_chrome_trace(folder + "/rank%d.json.gz" % rank)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Two ranks on this machine, all-reducing over loopback, recorded by torch's profiler."""
    folder = tmp_path_factory.mktemp("recorded")
    command = [sys.executable, "-c", RECORD]
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder)], stderr=subprocess.PIPE, env=environment())
        for rank in (0, 1)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=300)
        assert rank.returncode == 0, said.decode()[-2000:]
    return read_traces([folder / "rank1.json.gz", folder / "rank0.json.gz"])


def environment():
    return os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def test_torch_s_own_trace_is_understood(recorded):
    assert [(trace.rank, trace.world_size) for trace in recorded] == [(0, 2), (1, 2)]
    for trace in recorded:
        assert steps(trace)["step"].tolist() == [2, 3, 4]
        table = breakdown(trace)
        parts = ["compute_s", "communication_s", "copy_s", "input_s", "idle_s"]
        np.testing.assert_allclose(table[parts].sum(axis=1), table["step_s"], rtol=1e-9)
        assert (table["compute_s"] > 0).all()
        assert (table["input_s"] > 0).all()


def test_torch_s_gradients_are_found_whole(recorded):
    """Every step all-reduces each of the 64 * 300 + 300 + 300 * 10 + 10 floats once."""
    table = matched(recorded)
    sums = table.groupby(["rank", "step"])["n_bytes"].sum()
    assert sums.tolist() == [4 * (64 * 300 + 300 + 300 * 10 + 10)] * 6
    assert set(table["operation"]) == {"all_reduce"}


def test_torch_s_ranks_on_one_machine_have_one_clock(recorded):
    """The truth is an offset of 0; a rank's thread may be told of an end late, by no more than these steps take."""
    found = aligned(recorded)
    longest = max(float(breakdown(trace)["step_s"].max()) for trace in recorded)
    assert abs(found.offset_s[1]) < longest


def test_torch_s_critical_path_fills_the_step(recorded):
    traces = aligned(recorded).traces
    for step in (2, 3, 4):
        path = critical_path(traces, step)
        covered = (path["end_s"] - path["start_s"]).sum() + path["gap_s"].sum()
        assert covered == pytest.approx(path["end_s"].iloc[-1], rel=1e-9)
        assert (path["start_s"].to_numpy()[1:] >= path["end_s"].to_numpy()[:-1] - 1e-9).all()


def test_torch_s_layers_are_the_network_s(recorded):
    table = layers(recorded[0])
    first = table[table["step"] == 2]["layer"].tolist()
    assert [name for name in first if "linear" in name] == ["aten::linear#1", "aten::linear#2"]
    assert (table[table["layer"].str.contains("linear")][["forward_s", "backward_s"]] > 0).all(axis=None)
