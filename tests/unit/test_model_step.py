"""The step model: closed forms, limits, what each schedule may not beat, merging against brute force."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.core.machine import Link
from steptime.core.step import SCHEDULES, LayerProfile, Schedule
from steptime.model import merging
from steptime.model.collectives import AllReduce, Piecewise, ring_time_s
from steptime.model.step import aggregation, predict_step, predict_table, sending_order

LINK = Link(name="planted", alpha_s=1e-3, beta_s_per_byte=1e-9, source="planted")
TIMES = st.floats(0, 1.0)
BYTES = st.integers(0, 10**9)


def profile(forward, backward, sizes, **phases):
    return LayerProfile(
        network="planted",
        source="planted",
        batch=8,
        layers=tuple(f"layer{number}" for number in range(len(forward))),
        forward_s=np.array(forward, dtype=float),
        backward_s=np.array(backward, dtype=float),
        parameter_bytes=np.array(sizes, dtype=float),
        activation_bytes=np.zeros(len(forward)),
        **phases,
    )


@st.composite
def profiles(draw, most=8):
    count = draw(st.integers(1, most))
    lists = [draw(st.lists(kind, min_size=count, max_size=count)) for kind in (TIMES, TIMES, BYTES)]
    return profile(*lists, t_io_s=draw(TIMES), t_h2d_s=draw(TIMES), t_u_s=draw(TIMES))


@st.composite
def gradients(draw, most=7):
    """Ready times, bytes and a cost, in sending order."""
    count = draw(st.integers(1, most))
    ready = np.cumsum(draw(st.lists(st.floats(0, 0.1), min_size=count, max_size=count)))
    n_bytes = np.array(draw(st.lists(st.integers(1, 10**8), min_size=count, max_size=count)), dtype=float)
    return ready, n_bytes, AllReduce(draw(st.floats(0, 0.1)), draw(st.floats(1e-11, 1e-8)))


links = st.builds(
    Link,
    name=st.just("x"),
    alpha_s=st.floats(0, 0.1),
    beta_s_per_byte=st.floats(1e-11, 1e-8),
    source=st.just("planted"),
)
schedules = st.builds(Schedule, st.sampled_from(SCHEDULES), st.booleans())
THREE = profile([1, 2, 3], [4, 5, 6], [1e9, 2e9, 0], t_io_s=7, t_h2d_s=0.5, t_u_s=0.25)


def test_one_worker_in_sequence_is_the_sum():
    step = predict_step(THREE, Schedule("wait_free"), 1, LINK)
    assert step.step_s == pytest.approx(7 + 0.5 + 6 + 15 + 0.25)
    assert (step.t_c_s, step.t_c_no_s, step.messages) == (0, 0, 0)


def test_prefetch_is_the_larger_of_reading_and_computing():
    assert predict_step(THREE, Schedule(prefetch=True), 1, LINK).step_s == pytest.approx(21.25)
    slow_disk = profile([1], [1], [4], t_io_s=9, t_h2d_s=1, t_u_s=1)
    assert predict_step(slow_disk, Schedule(prefetch=True), 1, LINK).step_s == pytest.approx(10)


def test_prefetch_hides_nothing_where_reading_and_computing_share_cores():
    shared = predict_step(THREE, Schedule(prefetch=True), 1, LINK, shared_cores=True).step_s
    assert shared == predict_step(THREE, Schedule(prefetch=False), 1, LINK).step_s


def test_two_workers_by_hand():
    # sent: layer1 (2 GB, ready 6 + 5 = 11), layer0 (1 GB, ready 15); over a ring of two, a = 2 ms, b = 1 ns a byte
    step = predict_step(THREE, Schedule("wait_free"), 2, LINK)
    assert step.messages == 2
    assert step.t_c_s == pytest.approx(2.002 + 1.002)
    assert step.t_c_no_s == pytest.approx(1.002)
    end = predict_step(THREE, Schedule("end_of_backward"), 2, LINK)
    assert end.messages == 1
    assert end.t_c_no_s == pytest.approx(3.002)


def test_layers_without_parameters_send_nothing():
    ready, n_bytes, names = sending_order(THREE)
    assert names == ("layer1", "layer0")
    np.testing.assert_allclose(ready, [11, 15])
    np.testing.assert_allclose(n_bytes, [2e9, 1e9])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_network_without_parameters_scales_perfectly(name):
    none = profile([1, 1], [1, 1], [0, 0])
    step = predict_step(none, Schedule(name), 64, LINK)
    assert step.step_s == pytest.approx(4)
    assert step.messages == 0
    assert predict_table(none, [Schedule(name)], [64], LINK)["speed_up"].iloc[0] == pytest.approx(64)


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_infinitely_fast_link_scales_perfectly(name):
    free = Link(name="free", alpha_s=0, beta_s_per_byte=1e-30, source="planted")
    assert predict_table(THREE, [Schedule(name)], [64], free)["efficiency"].iloc[0] == pytest.approx(1)


def test_an_unknown_schedule_is_an_input_error():
    with pytest.raises(InputError, match="schedule = 'ring'"):
        predict_step(THREE, Schedule("ring"), 2, LINK)


@given(profiles(), st.integers(2, 64), links)
def test_wait_free_is_never_slower_than_the_same_messages_after_backward(layers, workers, link):
    step = predict_step(layers, Schedule("wait_free"), workers, link)
    assert step.t_c_no_s <= step.t_c_s + 1e-9
    hidden = step.t_c_s - step.t_c_no_s
    assert hidden <= layers.t_b_s + 1e-9


@given(profiles(), st.integers(2, 64), st.floats(1e-11, 1e-8))
def test_without_latency_wait_free_is_never_slower_than_one_message(layers, workers, beta):
    link = Link(name="x", alpha_s=0, beta_s_per_byte=beta, source="planted")
    free, end = (
        predict_step(layers, Schedule(name), workers, link).step_s for name in ("wait_free", "end_of_backward")
    )
    assert free <= end * (1 + 1e-9)


def test_with_latency_wait_free_can_be_slower_than_one_message():
    slow_start = Link(name="x", alpha_s=1.0, beta_s_per_byte=1e-12, source="planted")
    free, end = (predict_step(THREE, Schedule(name), 8, slow_start).step_s for name in ("wait_free", "end_of_backward"))
    assert free > end


@given(profiles(), st.integers(2, 64), links)
def test_the_optimum_is_never_slower_than_the_other_schedules(layers, workers, link):
    best = predict_step(layers, Schedule("merged"), workers, link).step_s
    for name in ("wait_free", "end_of_backward"):
        assert best <= predict_step(layers, Schedule(name), workers, link).step_s * (1 + 1e-9)


@given(profiles(), schedules, st.integers(2, 64), links, st.floats(1, 100))
def test_a_slower_link_never_makes_the_step_faster(layers, schedule, workers, link, factor):
    slower = link.model_copy(update={"beta_s_per_byte": link.beta_s_per_byte * factor})
    fast, slow = (predict_step(layers, schedule, workers, each).step_s for each in (link, slower))
    assert slow >= fast * (1 - 1e-9)


@settings(max_examples=60)
@given(gradients())
def test_the_optimum_is_that_of_all_groupings(found):
    ready, n_bytes, cost = found
    count = len(ready)
    inner = range(1, count)
    everything = [
        merging.end_s(ready, n_bytes, (*cut, count), cost) for size in range(count) for cut in combinations(inner, size)
    ]
    best = merging.end_s(ready, n_bytes, merging.optimal_groups(ready, n_bytes, cost), cost)
    assert best == pytest.approx(min(everything), rel=1e-12)


@settings(max_examples=40)
@given(gradients(5), st.floats(0, 0.1), st.integers(1, 10**8))
def test_the_optimum_holds_for_a_cost_in_two_pieces(found, jump, switch):
    ready, n_bytes, cost = found
    count = len(ready)
    pieces = Piecewise(cost, AllReduce(cost.a_s + jump, cost.b_s_per_byte), switch)
    everything = [
        merging.end_s(ready, n_bytes, (*cut, count), pieces)
        for size in range(count)
        for cut in combinations(range(1, count), size)
    ]
    best = merging.end_s(ready, n_bytes, merging.optimal_groups(ready, n_bytes, pieces), pieces)
    assert best == pytest.approx(min(everything), rel=1e-12)


@given(gradients(12))
def test_every_grouping_sends_every_byte_once(found):
    ready, n_bytes, cost = found
    count = len(ready)
    for ends in (
        merging.layer_wise(count),
        merging.one_message(count),
        merging.published_groups(ready, n_bytes, cost),
        merging.optimal_groups(ready, n_bytes, cost),
    ):
        assert ends[-1] == count
        assert list(ends) == sorted(set(ends))
        assert merging.messages(ready, n_bytes, ends)[1].sum() == pytest.approx(n_bytes.sum())


@given(gradients(12))
def test_the_published_rule_is_never_better_than_the_optimum(found):
    ready, n_bytes, cost = found
    best = merging.end_s(ready, n_bytes, merging.optimal_groups(ready, n_bytes, cost), cost)
    assert best <= merging.end_s(ready, n_bytes, merging.published_groups(ready, n_bytes, cost), cost) * (1 + 1e-9)


def test_gradients_that_are_far_apart_are_not_merged():
    ready, n_bytes, cost = np.array([0.0, 10.0, 20.0]), np.full(3, 1e3), AllReduce(1e-3, 1e-9)
    assert merging.published_groups(ready, n_bytes, cost) == (1, 2, 3)
    assert merging.end_s(ready, n_bytes, merging.optimal_groups(ready, n_bytes, cost), cost) == pytest.approx(20.001001)


def test_gradients_that_are_ready_together_are_merged():
    ready, n_bytes, cost = np.full(3, 1.0), np.full(3, 1e3), AllReduce(1.0, 1e-9)
    assert merging.published_groups(ready, n_bytes, cost) == (3,)
    assert merging.optimal_groups(ready, n_bytes, cost) == (3,)


def test_no_gradients_no_messages():
    nothing = np.zeros(0)
    cost = AllReduce(1.0, 1.0)
    assert merging.optimal_groups(nothing, nothing, cost) == merging.published_groups(nothing, nothing, cost) == ()
    assert merging.one_message(0) == merging.layer_wise(0) == ()
    assert merging.end_s(nothing, nothing, (), cost) == 0


def test_messages_are_named_by_what_is_in_them():
    sent = aggregation(THREE, Schedule("end_of_backward"), AllReduce(0.0, 1e-9))
    assert sent.names == ("layer1 … layer0",)
    assert sent.start_s[0] == 15


def test_the_table_has_weak_scaling():
    table = predict_table(THREE, [Schedule("wait_free"), Schedule("merged", True)], [1, 4], LINK)
    assert list(table["workers"]) == [1, 4, 1, 4]
    row = table.iloc[1]
    assert row["speed_up"] == pytest.approx(4 * table.iloc[0]["step_s"] / row["step_s"])
    assert row["samples_per_s"] == pytest.approx(4 * 8 / row["step_s"])
    assert row["t_c_s"] == pytest.approx(ring_time_s(2e9, 4, LINK) + ring_time_s(1e9, 4, LINK))
