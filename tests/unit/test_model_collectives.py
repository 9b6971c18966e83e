"""The ring's closed form and limits, its inverse, and lines fitted to planted all-reduces."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.core.machine import Link
from steptime.model.collectives import AllReduce, Piecewise, ring, ring_link, ring_time_s
from steptime.model.fitting import fit_all_reduce

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
