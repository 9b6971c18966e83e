"""Collectives by their closed forms and limits, the ring's inverse, and lines fitted to planted all-reduces."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.core.machine import Link
from steptime.model.collectives import (
    ALGORITHMS,
    AllReduce,
    Curve,
    Floored,
    Piecewise,
    Rounds,
    all_reduce,
    eager_rendezvous,
    hierarchical,
    line,
    ring,
    ring_link,
    ring_time_s,
    two_dimensional,
)
from steptime.model.fitting import fit_all_reduce
from steptime.model.parameter_server import ParameterServer

LINK = Link(name="planted", alpha_s=1e-5, beta_s_per_byte=1e-9, source="planted")


def test_four_workers_take_six_rounds_of_a_quarter_of_the_bytes():
    assert ring_time_s(4e6, 4, LINK) == pytest.approx(6 * (1e-5 + 1e6 * 1e-9))


def test_one_worker_sends_nothing():
    assert ring_time_s(1e9, 1, LINK) == 0


def test_many_workers_approach_twice_the_bytes():
    free = Link(name="free", alpha_s=0, beta_s_per_byte=1e-9, source="planted")
    assert ring_time_s(1e6, 10**6, free) == pytest.approx(2 * 1e6 * 1e-9, rel=1e-5)


def test_no_worker_is_an_input_error():
    with pytest.raises(InputError, match="workers = 0"):
        ring(0, LINK)
    with pytest.raises(InputError, match="at least 2"):
        ring_link("x", AllReduce(1, 1), 1, "planted")


@given(workers=st.integers(2, 512), n_bytes=st.floats(0, 1e10), factor=st.floats(1, 100))
def test_a_slower_link_is_never_faster(workers, n_bytes, factor):
    slower = LINK.model_copy(update={"beta_s_per_byte": LINK.beta_s_per_byte * factor})
    assert ring_time_s(n_bytes, workers, slower) >= ring_time_s(n_bytes, workers, LINK)


@given(workers=st.integers(2, 512))
def test_ring_link_undoes_ring(workers):
    measured = ring(workers, LINK)
    back = ring_link("planted", measured, workers, "planted")
    assert back.alpha_s == pytest.approx(LINK.alpha_s)
    assert back.beta_s_per_byte == pytest.approx(LINK.beta_s_per_byte)


def test_two_pieces_take_the_line_of_their_size():
    cost = Piecewise(AllReduce(1.0, 0.0), AllReduce(2.0, 0.5), 100)
    assert cost.time_s(99) == 1.0
    assert cost.time_s(100) == 52.0
    np.testing.assert_allclose(cost.time_s(np.array([0.0, 200.0])), [1.0, 102.0])


@given(
    a=st.floats(1e-6, 1e-2),
    b=st.floats(1e-11, 1e-8),
    noise=st.lists(st.floats(-0.02, 0.02), min_size=24, max_size=24),
)
def test_a_planted_line_is_found_again(a, b, noise):
    sizes = np.logspace(1, 8, 24)
    exact = AllReduce(a, b).time_s(sizes)
    found = fit_all_reduce(sizes, exact)
    np.testing.assert_allclose(found.time_s(sizes), exact, rtol=1e-6)
    disturbed = fit_all_reduce(sizes, exact * (1 + np.array(noise)))
    np.testing.assert_allclose(disturbed.time_s(sizes), exact, rtol=0.06)


def test_a_fit_needs_two_sizes_and_positive_times():
    for sizes, times in (([8, 8], [1.0, 1.0]), ([8, 16], [1.0, 0.0])):
        with pytest.raises(InputError, match="two sizes"):
            fit_all_reduce(sizes, times)


MESSAGE = line(LINK)
FREE = AllReduce(0.0, 1e-9)
"""A link without latency: what is left is bytes."""


@pytest.mark.parametrize("workers", [2, 3, 4, 6, 8, 13, 16, 128])
def test_each_algorithm_is_its_closed_form(workers):
    """With one line for all messages every algorithm is a + b n; the coefficients are those of the literature."""
    alpha, beta, n = LINK.alpha_s, LINK.beta_s_per_byte, 4e6
    levels, power = math.ceil(math.log2(workers)), 2 ** math.floor(math.log2(workers))
    fold = 0 if power == workers else 2 * (alpha + n * beta)
    exact = {
        "ring": 2 * (workers - 1) * alpha + 2 * (workers - 1) / workers * n * beta,
        "all_to_all": 2 * (workers - 1) * alpha + 2 * (workers - 1) / workers * n * beta,
        "tree": 2 * levels * (alpha + n * beta),
        "double_tree": 2 * levels * alpha + (2 if workers > 2 else 1) * n * beta,
        "recursive_doubling": math.log2(power) * (alpha + n * beta) + fold,
        "halving_doubling": 2 * math.log2(power) * alpha + 2 * (power - 1) / power * n * beta + fold,
    }
    assert set(exact) == set(ALGORITHMS)
    for algorithm, seconds in exact.items():
        cost = all_reduce(algorithm, workers, MESSAGE)
        assert cost.time_s(n) == pytest.approx(seconds, rel=1e-12), algorithm
        assert cost.time_s(0.0) == pytest.approx(cost.a_s, rel=1e-12), algorithm
        np.testing.assert_allclose(cost.time_s(np.array([n, 0.0])), [seconds, cost.a_s], rtol=1e-12)
    assert all_reduce("ring", workers, MESSAGE).time_s(n) == pytest.approx(ring(workers, LINK).time_s(n))


def test_two_workers_leave_no_choice():
    """Each sends the other half of the bytes and gets the sum of the other half: 2 alpha + n beta."""
    algorithms = [all_reduce(name, 2, MESSAGE) for name in ("ring", "all_to_all", "double_tree", "halving_doubling")]
    levels = [two_dimensional(1, 2, FREE, MESSAGE), hierarchical(1, 2, FREE, MESSAGE)]
    for cost in [*algorithms, *levels, ParameterServer(2, 2, MESSAGE)]:
        assert cost.time_s(1e6) == pytest.approx(2 * LINK.alpha_s + 1e6 * LINK.beta_s_per_byte)


@given(workers=st.integers(3, 512), n_bytes=st.floats(1, 1e10), algorithm=st.sampled_from(ALGORITHMS))
def test_no_algorithm_sends_less_than_the_bound(workers, n_bytes, algorithm):
    """2(N-1)/N n bytes must leave some worker (Patarasuk & Yuan 2009)."""
    bound = 2 * (workers - 1) / workers * n_bytes * FREE.b_s_per_byte
    assert all_reduce(algorithm, workers, FREE).time_s(n_bytes) >= bound * (1 - 1e-12)


@given(exponent=st.integers(1, 10))
def test_ring_and_halving_doubling_reach_the_bound_at_powers_of_two(exponent):
    workers = 2**exponent
    times = [all_reduce(name, workers, FREE).time_s(1e8) for name in ("ring", "halving_doubling")]
    assert times == pytest.approx([2 * (workers - 1) / workers * 0.1] * 2)
    assert all_reduce("ring", workers, MESSAGE).a_s == pytest.approx(2 * (workers - 1) * LINK.alpha_s)
    assert all_reduce("halving_doubling", workers, MESSAGE).a_s == pytest.approx(2 * exponent * LINK.alpha_s)


def test_one_worker_needs_no_collective():
    for algorithm in ALGORITHMS:
        assert all_reduce(algorithm, 1, MESSAGE).time_s(1e9) == 0
    assert hierarchical(1, 1, MESSAGE, MESSAGE).time_s(1e9) == 0
    assert two_dimensional(1, 1, MESSAGE, MESSAGE).time_s(1e9) == 0
    assert ParameterServer(1, 1, MESSAGE).time_s(1e9) == 0


def test_the_jump_of_the_protocol_is_at_the_chunk_s_size():
    """8 workers, handshake from 64 KiB messages on: a ring's jump is at 512 KiB, by 14 handshakes."""
    message = eager_rendezvous(LINK, 65_536, 7e-5)
    cost = all_reduce("ring", 8, message)
    below, above = cost.time_s(8 * 65_535.0), cost.time_s(8 * 65_536.0)
    assert above - below == pytest.approx(14 * (7e-5 + 1 * LINK.beta_s_per_byte), rel=1e-6)
    assert cost.a_s == pytest.approx(14 * LINK.alpha_s)


def test_small_messages_cost_the_floor():
    cost = Floored(AllReduce(1e-5, 1e-9), 3e-5)
    assert cost.a_s == 3e-5
    assert cost.time_s(20_000) == pytest.approx(3e-5)
    np.testing.assert_allclose(cost.time_s(np.array([0.0, 30_000.0])), [3e-5, 4e-5])
    assert all_reduce("ring", 4, cost).time_s(4e3) == pytest.approx(6 * 3e-5)


def test_a_curve_passes_its_points_and_goes_on_as_told():
    cost = Curve((10.0, 20.0), (1.0, 3.0), AllReduce(0.0, 1.0))
    assert [cost.time_s(n) for n in (0, 10, 15, 20, 30)] == [1.0, 1.0, 2.0, 3.0, 30.0]
    assert cost.a_s == 1.0


def test_two_levels_are_the_sum_of_their_stages():
    """4 devices a node, 8 nodes. Hierarchical: n in and out of the leader, 2 x 7/8 n between nodes; two-dimensional:
    2 x 3/4 n inside, and four flows of n/4 share the interface, so the same bytes pass it."""
    intra, inter, n = AllReduce(1e-6, 1e-10), AllReduce(2e-5, 1e-9), 1e8
    leader = hierarchical(4, 8, intra, inter, algorithm="all_to_all")
    assert leader.time_s(n) == pytest.approx(2 * (3e-6 + 1e-2) + 14 * 2e-5 + 2 * 7 / 8 * 0.1)
    spread = two_dimensional(4, 8, intra, inter)
    assert spread.time_s(n) == pytest.approx(6e-6 + 2 * 3 / 4 * 1e-2 + 14 * 2e-5 + 2 * 7 / 8 * 0.1)
    own = two_dimensional(4, 8, intra, inter, interfaces=4)
    assert spread.time_s(n) - own.time_s(n) == pytest.approx(2 * 7 / 8 * 0.1 * 3 / 4)
    assert spread.a_s == pytest.approx(6e-6 + 14 * 2e-5)


@given(flows=st.integers(1, 16))
def test_flows_that_share_an_interface_last_as_all_their_bytes(flows):
    one, shared = Rounds(MESSAGE, ((3, 0.5),)), Rounds(MESSAGE, ((3, 0.5),), flows)
    assert shared.time_s(1e6) == pytest.approx(one.time_s(flows * 1e6))
    assert shared.a_s == one.a_s


def test_a_central_server_grows_with_the_workers_and_a_sharded_one_does_not():
    n, beta = 1e8, FREE.b_s_per_byte
    for workers in (2, 8, 128):
        assert ParameterServer(workers, 1, FREE).time_s(n) == pytest.approx(2 * (workers - 1) * n * beta)
        assert ParameterServer(workers, 1, FREE, shared_nodes=False).time_s(n) == pytest.approx(2 * workers * n * beta)
        sharded = ParameterServer(workers, workers, FREE).time_s(n)
        assert sharded == pytest.approx(all_reduce("ring", workers, FREE).time_s(n))
    own = ParameterServer(8, 16, MESSAGE, shared_nodes=False)
    assert own.time_s(n) == pytest.approx(2 * 16 * (LINK.alpha_s + n / 16 * LINK.beta_s_per_byte))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: all_reduce("butterfly", 4, MESSAGE), "algorithm = 'butterfly'"),
        (lambda: all_reduce("ring", 0, MESSAGE), "workers = 0"),
        (lambda: hierarchical(0, 2, MESSAGE, MESSAGE), "local = 0"),
        (lambda: two_dimensional(2, 0, MESSAGE, MESSAGE), "nodes = 0"),
        (lambda: two_dimensional(2, 2, MESSAGE, MESSAGE, interfaces=0), "interfaces = 0"),
        (lambda: ParameterServer(0, 1, MESSAGE), "workers = 0"),
        (lambda: ParameterServer(4, 5, MESSAGE), "servers = 5"),
    ],
)
def test_a_count_that_cannot_be_is_an_input_error(make, words):
    with pytest.raises(InputError, match=words):
        make()
