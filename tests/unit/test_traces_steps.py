"""Breakdown, clocks, layers and recorded steps of planted traces whose answers are known."""

import numpy as np
import planted_trace as planted
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.model.growing import replay
from steptime.traces.intervals import clipped, covered_s, total_s, union, without
from steptime.traces.kineto import read_trace, read_traces
from steptime.traces.layers import layers
from steptime.traces.recorded import recorded_step, recorded_steps, timeline
from steptime.traces.steps import (
    WHOLE_FILE,
    aligned,
    breakdown,
    step_span,
    steps,
    waits,
)

PARTS = ["compute_s", "communication_s", "copy_s", "input_s", "idle_s", "hidden_s"]


def ms(table, columns):
    return (1e3 * table[columns]).round(6).to_numpy().tolist()


def test_the_planted_step_s_parts(tmp_path):
    tables = [breakdown(trace) for trace in read_traces(planted.two_ranks(tmp_path))]
    assert ms(tables[0], ["step_s", *PARTS]) == [[20, 12, 6, 0, 1, 1, 2]]
    assert ms(tables[1], ["step_s", *PARTS]) == [[20, 16, 2, 0, 1, 1, 2]]


def test_on_a_device_the_kernels_compute_and_the_host_is_idle(tmp_path):
    recording = planted.Recording().step(0, 0, 10).add("user_annotation", "enumerate(DataLoader)#x.__next__", 0, 2)
    recording.op("aten::mm", 2, 9)
    recording.kernel("gemm", 2.1, 3, 5, 1).kernel("ncclDevKernel_AllReduce_Sum_f32_RING(x)", 2.3, 4, 7, 2, stream=9)
    recording.add("gpu_memcpy", "Memcpy HtoD", 6, 8, tid=3, pid=0)
    table = breakdown(read_trace(recording.write(tmp_path / "t.json")))
    assert ms(table, ["step_s", *PARTS]) == [[10, 2, 2, 1, 2, 3, 1]]


def test_a_file_without_marks_is_one_step(tmp_path):
    trace = read_trace(planted.Recording().op("a", 1, 2).op("b", 3, 4).write(tmp_path / "t.json"))
    assert steps(trace).to_numpy().tolist() == [[WHOLE_FILE, 0, pytest.approx(3e-3)]]
    with pytest.raises(InputError, match="step 7 is not in it; its steps are 0"):
        step_span(trace, 7)


@pytest.mark.parametrize("skew_ms", [-5000.0, -0.3, 0.0, 2.0, 12345.678])
def test_clocks_are_put_right(tmp_path, skew_ms):
    found = aligned(read_traces(planted.two_ranks(tmp_path, skew_ms)))
    assert found.messages == 2
    assert found.offset_s[1] == pytest.approx(-skew_ms / 1e3, abs=1e-8)
    assert found.spread_s[1] == pytest.approx(0, abs=1e-8)
    assert found.traces[1].start_s.min() == pytest.approx(found.traces[0].start_s.min(), abs=1e-8)


def test_an_offset_stays_within_what_causes_allow(tmp_path):
    """Rank 1 hears of two of three ends 2 ms late; but its message cannot begin after rank 0 has it."""
    first, second = planted.Recording(0, 2), planted.Recording(1, 2)
    for start, late in ((0, 2), (10, 2), (20, 0)):
        first.gloo(start, start + 1, 100)
        second.gloo(start + 0.9, start + 1 + late, 100)
    found = aligned([read_trace(r.write(tmp_path / f"{r.rank}.json")) for r in (first, second)])
    # The median of the differences is -2 ms; rank 0's start at 20 ms would then come after rank 1's end at 19.
    assert found.offset_s[1] == pytest.approx(-1e-3, abs=1e-9)


def test_ranks_of_different_jobs_are_refused(tmp_path):
    first = planted.Recording(0, 2).gloo(0, 1, 10).write(tmp_path / "a.json")
    second = planted.Recording(1, 2).gloo(0, 1, 11).write(tmp_path / "b.json")
    with pytest.raises(InputError, match="share no collective"):
        aligned(read_traces([first, second]))


def test_who_waits_for_whom(tmp_path):
    table = waits(aligned(read_traces(planted.two_ranks(tmp_path, 3.0))).traces)
    assert table["n_bytes"].tolist() == [1_000_000, 4_000_000]
    assert ms(table, ["time_s", "wait_s"]) == [[2, 0], [2, 2]]
    assert table["last_rank"].tolist()[1] == 1


def test_layers_by_module_by_annotation_and_by_operation(tmp_path):
    recording = planted.Recording().step(1, 0, 20)
    recording.add("python_function", "nn.Module: Linear_0", 0, 3).add("python_function", "forward.py(3): f", 0, 19)
    recording.op("aten::linear", 1, 2).add("user_annotation", "head", 3, 6).op("aten::mm", 4, 5)
    recording.op("aten::relu", 6, 7).op("aten::relu", 7, 9)
    for number, (forward, backward) in enumerate(((1, 16), (4, 14), (6, 12), (7, 10))):
        length = (4, 2, 2, 1)[number]
        recording.op("autograd::engine::evaluate_function: X", backward, backward + length)
        recording.op("X", backward + 0.1, backward + length - 0.1)
        recording.arrow(number, forward + 0.1, backward + 0.2)
    table = layers(read_trace(recording.write(tmp_path / "t.json")))
    assert table["layer"].tolist() == ["Linear_0", "head", "aten::relu#1", "aten::relu#2"]
    assert ms(table, ["forward_s", "backward_s"]) == [[1, 4], [1, 2], [1, 2], [2, 1]]


def test_layers_on_a_device_have_their_kernels_time(tmp_path):
    recording = planted.Recording().step(1, 0, 20).op("aten::linear", 1, 2).kernel("gemm", 1.5, 5, 8, 1)
    recording.op("Back", 3, 4).kernel("gemm2", 3.5, 8, 13, 2).kernel("gemm3", 3.7, 13, 14, 3).arrow(1, 1.2, 3.2)
    table = layers(read_trace(recording.write(tmp_path / "t.json")))
    assert ms(table, ["forward_s", "backward_s"]) == [[3, 6]]


def test_the_recorded_step_is_that_of_the_slowest_rank(tmp_path):
    """Rank 1 computes 18 of its 20 ms, and stands still for the second message only, after 15."""
    found = recorded_step(aligned(read_traces(planted.two_ranks(tmp_path, 3.0))).traces, 3)
    assert (found.rank, found.operations, found.n_bytes.tolist()) == (1, ("all_reduce",) * 2, [1_000_000, 4_000_000])
    assert 1e3 * found.compute_s == pytest.approx(18)
    np.testing.assert_allclose(1e3 * found.launch_s, [7, 15])
    np.testing.assert_allclose(1e3 * found.needed_s, [15, 15])
    np.testing.assert_allclose(1e3 * found.time_s, [2, 2])
    again = replay(found, 2, found.time_s)
    assert again.step_s == pytest.approx(found.step_s)


def test_a_message_that_nothing_waited_for_is_needed_by_the_optimizer(tmp_path):
    recording = planted.Recording(0, 1).step(1, 0, 10).op("backward", 0, 6).gloo(2, 4, 100)
    recording.add("user_annotation", "Optimizer.step#SGD.step", 6, 9).op("aten::add_", 6, 9)
    found = recorded_step([read_trace(recording.write(tmp_path / "t.json"))], 1)
    np.testing.assert_allclose(1e3 * found.needed_s, [6])
    assert 1e3 * found.compute_s == pytest.approx(10)


def test_a_step_without_collectives_cannot_be_recorded(tmp_path):
    trace = read_trace(planted.Recording().step(1, 0, 3).op("a", 1, 2).write(tmp_path / "t.json"))
    with pytest.raises(InputError, match="two workers or more"):
        recorded_steps([trace])


def test_the_timeline_is_measured_and_has_every_rank(tmp_path):
    found = timeline(aligned(read_traces(planted.two_ranks(tmp_path, 3.0))).traces, 3)
    assert found.kind == "measured"
    assert found.end_s == pytest.approx(19e-3)
    seen = {(task.worker, task.resource) for task in found.tasks}
    assert seen == {(rank, name) for rank in (0, 1) for name in ("compute", "input", "link")}
    late = next(task for task in found.tasks if task.worker == 1 and "Convolution" in task.name)
    assert (late.start_s, late.end_s) == pytest.approx((7e-3, 15e-3))


# -------------------------------------------------------------------------------------------------------- intervals

TIMES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=8)


def members(pairs):
    return {moment for start, length in pairs for moment in range(start, start + length)}


def as_set(pairs):
    starts = np.array([start for start, _ in pairs], dtype=float)
    return union(starts, starts + np.array([length for _, length in pairs], dtype=float))


@given(TIMES, TIMES, st.integers(0, 40), st.integers(0, 20))
def test_sets_of_intervals_are_sets(first, second, low, length):
    one, two = as_set(first), as_set(second)
    assert total_s(one) == len(members(first))
    assert total_s(without(one, two)) == len(members(first) - members(second))
    assert total_s(clipped(one, low, low + length)) == len(members(first) & set(range(low, low + length)))
    assert covered_s(one, np.array([float(low)]))[0] == len(members(first) & set(range(low)))
    assert (one[0][1:] > one[1][:-1]).all()


def test_small_gaps_are_bridged():
    assert total_s(union(np.array([0.0, 2.0, 5.0]), np.array([1.0, 3.0, 6.0]), bridge_s=1.0)) == 4
