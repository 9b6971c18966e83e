"""The critical path of planted traces, and that it fills a step whatever is in it."""

import numpy as np
import planted_trace as planted
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.traces import benchmark
from steptime.traces.critical_path import by_name, critical_path, innermost, tasks
from steptime.traces.kineto import read_trace, read_traces
from steptime.traces.steps import aligned


def path_of(path):
    return [(row.rank, row.name, round(1e3 * row.start_s, 6), round(1e3 * row.end_s, 6)) for row in path.itertuples()]


@pytest.mark.parametrize("skew_ms", [0.0, 250.0])
def test_the_path_goes_through_the_late_rank_and_not_through_the_waiting(tmp_path, skew_ms):
    found = aligned(read_traces(planted.two_ranks(tmp_path, skew_ms)))
    path = critical_path(found.traces, 3)
    steps = path_of(path)
    assert (1, "autograd::engine::evaluate_function: ConvolutionBackward0", 7.0, 15.0) in steps
    assert [(name, start, end) for _, name, start, end in steps[-2:]] == [
        ("gloo:all_reduce", 15.0, 17.0),
        ("aten::add_", 17.0, 19.0),
    ]
    assert not [name for rank, name, start, end in steps if rank == 0 and 7 < end < 15]
    assert path["gap_s"].sum() == pytest.approx(0.4e-3)  # 0.2 ms before the first operation, 0.2 after it


def test_host_and_device_in_turn(tmp_path):
    """The device works from 2 to 8 ms on what the host launched by 2; the host waits for it and launches again."""
    recording = planted.Recording().step(0, 0, 14)
    recording.kernel("one", 1.9, 2, 5, 1).kernel("two", 2.1, 5, 8, 2)
    recording.add("cuda_runtime", "cudaDeviceSynchronize", 3, 8.5)
    recording.op("aten::rand", 8.5, 10).kernel("three", 9.9, 10, 13, 3)
    recording.op("aten::mm", 0, 2.5)
    steps = path_of(critical_path([read_trace(recording.write(tmp_path / "t.json"))], 0))
    assert steps == [
        (0, "aten::mm", 0.0, 1.9),
        (0, "cudaLaunchKernel", 1.9, 1.91),
        (0, "one", 2.0, 5.0),
        (0, "two", 5.0, 8.0),
        (0, "cudaDeviceSynchronize", 8.0, 8.5),
        (0, "aten::rand", 8.5, 9.9),
        (0, "cudaLaunchKernel", 9.9, 9.91),
        (0, "three", 10.0, 13.0),
    ]


def test_a_kernel_that_waited_for_another_stream(tmp_path):
    recording = planted.Recording().step(0, 0, 9)
    recording.kernel("gemm", 0.1, 1, 4, 1).kernel("ncclDevKernel_AllReduce_RING(x)", 0.2, 4.005, 7, 2, stream=9)
    recording.kernel("update", 0.3, 7.001, 8, 3)
    names = critical_path([read_trace(recording.write(tmp_path / "t.json"))], 0)["name"].tolist()
    assert names[-3:] == ["gemm", "ncclDevKernel_AllReduce_RING(x)", "update"]


def test_what_is_on_the_path_by_name(tmp_path):
    found = aligned(read_traces(planted.two_ranks(tmp_path)))
    table = by_name(critical_path(found.traces, 3))
    assert table["name"].iloc[0].endswith("ConvolutionBackward0")
    assert table["time_s"].iloc[0] == pytest.approx(8e-3)
    assert table["share"].sum() == pytest.approx(1)


def test_pieces_are_the_innermost_ranges():
    starts, ends = np.array([0.0, 1.0, 2.0, 6.0]), np.array([10.0, 5.0, 3.0, 12.0])
    rows, begins, finishes = innermost(starts, ends)
    pieces = list(zip(rows.tolist(), begins.tolist(), finishes.tolist(), strict=True))
    assert pieces == [(0, 0, 1), (1, 1, 2), (2, 2, 3), (1, 3, 5), (0, 5, 6), (3, 6, 12)]


RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=10)


@given(RANGES)
def test_pieces_cover_each_moment_once(ranges):
    starts = np.array([start for start, _ in ranges], dtype=float)
    ends = starts + np.array([length for _, length in ranges], dtype=float)
    order = np.lexsort((-ends, starts))
    rows, begins, finishes = innermost(starts[order], ends[order])
    moments = {moment for start, length in ranges for moment in range(start, start + length)}
    assert (finishes - begins).sum() == len(moments)
    assert (begins[1:] >= finishes[:-1]).all()
    assert (begins >= starts[order][rows]).all()
    assert (finishes <= ends[order][rows]).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["op", "gloo", "kernel"]), st.integers(0, 90), st.integers(0, 20)),
        min_size=1,
        max_size=25,
    )
)
def test_any_path_is_a_chain_that_fills_its_time(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("chain")
    ranks = [planted.Recording(rank, 2).step(0, 0, 120).gloo(118, 119, 7) for rank in (0, 1)]
    for number, (rank, kind, start, length) in enumerate(events):
        if kind == "op":
            ranks[rank].op(f"op{number}", start, start + length)
        elif kind == "gloo":
            for recording in ranks:
                recording.gloo(start + recording.rank, start + length + 1, 100, tid=3)
        else:
            ranks[rank].kernel(f"kernel{number}", max(0, start - 1), start, start + length, number)
    traces = aligned(read_traces([ranks[rank].write(folder / f"{rank}.json") for rank in (0, 1)])).traces
    path = critical_path(traces, 0)
    lengths = path["end_s"] - path["start_s"]
    assert (lengths > 0).all()
    assert (path["start_s"].to_numpy()[1:] >= path["end_s"].to_numpy()[:-1] - 1e-9).all()
    assert lengths.sum() + path["gap_s"].sum() == pytest.approx(path["end_s"].iloc[-1])
    assert path["end_s"].iloc[-1] == pytest.approx(max(tasks(traces).end_s))


def test_plain_python_finds_the_same_path():
    """The benchmark's two sides do the same work; it fails where their paths differ."""
    result = benchmark.trace_speed(events=4000, repeats=1, report=lambda line: None)
    assert result["nodes"] > 4000
    assert min(result["peak_bytes"], result["plain_peak_bytes"]) > 0
