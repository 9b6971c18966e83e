"""Growing a recorded step: closed forms, what each collective costs, and that nothing changes where nothing does."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.core.machine import Link
from steptime.core.recorded import RecordedStep
from steptime.core.step import Task
from steptime.model.collectives import ring_time_s
from steptime.model.growing import collective_time_s, grow, grow_table, grown_timeline, replay

LINK = Link(name="planted", alpha_s=1e-3, beta_s_per_byte=1e-9, source="planted")


def recorded(compute_s, launch_s, needed_s, time_s, n_bytes=None, operations=None):
    count = len(launch_s)
    return RecordedStep(
        step=1,
        rank=0,
        step_s=compute_s,
        compute_s=compute_s,
        operations=operations or ("all_reduce",) * count,
        n_bytes=np.array(n_bytes if n_bytes is not None else [1_000_000] * count),
        launch_s=np.array(launch_s, dtype=float),
        needed_s=np.array(needed_s, dtype=float),
        time_s=np.array(time_s, dtype=float),
        tasks=(Task("compute", "compute", 0, 0.0, float(compute_s)),),
    )


def test_by_hand():
    """Launched at 2 and 5 of 10, both needed at 8: 3 + 4 run from 2 to 5 and from 5 to 9, so 1 is waited."""
    found = replay(recorded(10, [2, 5], [8, 8], [3, 4]), 2, np.array([3.0, 4.0]))
    assert (found.start_s.tolist(), found.end_s.tolist()) == ([2, 5], [5, 9])
    assert (found.step_s, found.exposed_s) == (11, 1)
    slower = replay(recorded(10, [2, 5], [8, 8], [3, 4]), 2, np.array([5.0, 4.0]))
    assert (slower.end_s.tolist(), slower.step_s) == ([7, 11], 13)


def test_a_wait_moves_what_is_launched_after_it():
    """The first is needed at 3 but ends at 6; the second, launched at 4 of computing, then starts at 7."""
    found = replay(recorded(10, [1, 4], [3, 9], [5, 2]), 2, np.array([5.0, 2.0]))
    assert (found.start_s.tolist(), found.end_s.tolist(), found.step_s) == ([1, 7], [6, 9], 13)


def test_hidden_communication_costs_nothing_and_one_worker_sends_nothing():
    step = recorded(10, [2, 5], [8, 8], [1, 1], [1000, 1000])
    assert replay(step, 2, np.array([1.0, 1.0])).step_s == 10
    assert grow(step, 1, LINK).step_s == 10


def test_what_each_collective_costs():
    times = {name: collective_time_s(name, 4e6, 5, LINK) for name in ("all_reduce", "all_gather", "reduce_scatter")}
    assert times["all_reduce"] == pytest.approx(2 * 4 * (1e-3 + 4e6 / 5 * 1e-9))
    assert times["all_reduce"] == pytest.approx(ring_time_s(4e6, 5, LINK))
    assert times["all_gather"] + times["reduce_scatter"] == pytest.approx(times["all_reduce"])
    assert collective_time_s("broadcast", 4e6, 5, LINK) == pytest.approx(4e-3 + 4e-3)
    assert collective_time_s("barrier", -1, 5, LINK) == pytest.approx(8e-3)
    for name in ("all_reduce", "all_gather", "broadcast", "reduce", "all_to_all", "barrier"):
        assert collective_time_s(name, 4e6, 1, LINK) == 0


@pytest.mark.parametrize(
    ("operation", "n_bytes", "workers", "said"),
    [
        ("all_reduce", -1, 2, "its bytes are not recorded"),
        ("send", 4, 2, "no cost is known"),
        ("all_reduce", 4, 0, "workers = 0"),
        ("barrier", 4, 0, "workers = 0"),
    ],
)
def test_what_cannot_be_costed(operation, n_bytes, workers, said):
    with pytest.raises(InputError, match=said):
        collective_time_s(operation, n_bytes, workers, LINK)


def test_times_that_are_none_are_refused():
    with pytest.raises(InputError):
        replay(recorded(1, [0], [1], [1]), 2, np.array([np.nan]))


@st.composite
def any_step(draw):
    compute = draw(st.floats(0.1, 10))
    count = draw(st.integers(1, 6))
    shares = st.lists(st.floats(0, 1), min_size=count, max_size=count)
    launch = np.sort(draw(shares)) * compute
    needed = launch + (compute - launch) * np.array(draw(shares))
    times = draw(st.lists(st.floats(0, 5), min_size=count, max_size=count))
    return recorded(compute, launch, needed, times)


@given(any_step(), st.floats(0, 3))
def test_a_step_is_between_computing_and_everything_in_turn(step, factor):
    found = replay(step, 4, step.time_s * factor)
    total = float((step.time_s * factor).sum())
    assert step.compute_s - 1e-9 <= found.step_s <= step.compute_s + total + 1e-9
    assert (found.end_s[:-1] <= found.start_s[1:] + 1e-9).all()


@given(any_step(), st.floats(1, 3))
def test_slower_collectives_never_make_a_step_shorter(step, factor):
    assert replay(step, 4, step.time_s * factor).step_s >= replay(step, 4, step.time_s).step_s - 1e-9


@given(any_step())
def test_the_timeline_is_the_step(step):
    found = replay(step, 4, step.time_s)
    line = grown_timeline(step, found)
    computed = [task for task in line.tasks if task.resource == "compute"]
    assert line.kind == "modelled"
    assert sum(task.end_s - task.start_s for task in computed) == pytest.approx(step.compute_s)
    assert line.end_s == pytest.approx(found.step_s)  # every collective is needed before the end
    for before, after in pairwise(computed):
        assert after.start_s >= before.end_s - 1e-9


def test_more_workers_on_a_ring_take_longer_and_the_table_says_so():
    table = grow_table([recorded(0.01, [0.004], [0.008], [0.001])], [1, 2, 8, 64], LINK)
    assert table["workers"].tolist() == [1, 2, 8, 64]
    assert (np.diff(table["step_time_s"])[1:] > 0).all()
    assert set(table["kind"]) == {"modelled"}
    expected = [0.01 + max(0.0, 0.004 + ring_time_s(1e6, count, LINK) - 0.008) for count in (1, 2, 8, 64)]
    np.testing.assert_allclose(table["step_time_s"], expected)
