"""Steps of many workers on one machine: by hand where one thing limits, and the constants found again that were put
in."""

from dataclasses import replace

import numpy as np
import planted_workers as planted
import pytest

from steptime.core.errors import InputError
from steptime.core.step import LayerProfile
from steptime.model.worker_steps import (
    FITTED,
    Cell,
    Host,
    Observed,
    Replayed,
    ShapedLink,
    fit_host,
    predict,
    relative_errors,
    with_rest,
)

MB = 1e6
PROFILE = LayerProfile(
    "planted",
    "planted",
    8,
    ("first", "view", "last"),
    np.array([0.010, 0.005, 0.015]),
    np.array([0.020, 0.004, 0.016]),
    np.array([4 * MB, 0.0, 2 * MB]),
    np.zeros(3),
    t_u_s=0.002,
)
FREE = Host(2, 0.0, 0.0, 0.0, 0.0)
NO_BURST = ShapedLink(0.0, 1e-8, 0.0)
FORWARD, BACKWARD = 0.030, 0.040


def step(schedule: str, workers: int, host: Host = FREE, link: ShapedLink = NO_BURST, **more: object) -> float:
    ends = (2,) if schedule in ("end_of_backward", "merged") else (1, 2)
    return predict(Replayed(PROFILE), Cell(schedule, workers, ends, link, **more), host).step_s


def test_a_lone_worker_sends_nothing() -> None:
    assert step("end_of_backward", 1, planted.HOST) == pytest.approx(FORWARD + BACKWARD + 0.002)
    assert step("end_of_backward", 1) == predict(Replayed(PROFILE), Cell("wait_free", 1, (), None), FREE).step_s


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_where_only_the_link_limits_a_ring_is_the_closed_form(workers: int) -> None:
    whole_s = 2 * (workers - 1) / workers * 6 * MB * 1e-8
    assert step("end_of_backward", workers) == pytest.approx(FORWARD + BACKWARD + whole_s + 0.002)
    last_s, first_s = whole_s / 3, 2 * whole_s / 3
    # the last layer's gradient is there after 16 ms, the first one's after 40
    expected = max(0.016 + last_s, BACKWARD) + first_s
    assert step("wait_free", workers) == pytest.approx(FORWARD + expected + 0.002)
    assert step("layers_after_backward", workers) == pytest.approx(step("end_of_backward", workers))
    assert step("merged", workers) == pytest.approx(step("end_of_backward", workers))


def test_only_rounds() -> None:
    host = replace(FREE, round_s=0.001)
    link = ShapedLink(0.0005, 0.0, 0.0)
    link = replace(link, beta_s_per_byte=1e-15)
    assert step("end_of_backward", 4, host, link) == pytest.approx(FORWARD + BACKWARD + 6 * 0.0015 + 0.002, rel=1e-6)


def test_a_round_and_the_link_are_waited_for_at_once() -> None:
    """Bytes of a bucket that filled during a round leave without waiting: the longer of the two decides."""
    link = ShapedLink(0.0, 1e-8, 1e5)
    for round_s in (0.001, 0.02):
        wire_s = (1.5 * 6 * MB - 1e5) * 1e-8
        expected = max(6 * round_s, wire_s)
        found = step("end_of_backward", 4, replace(FREE, round_s=round_s), link)
        assert found == pytest.approx(FORWARD + BACKWARD + expected + 0.002)


def test_a_burst_leaves_at_once_and_comes_back_in_a_pause() -> None:
    """2 MB after 16 ms, 4 MB after 40: both messages of two workers as many bytes; 1 MB of burst each time."""
    link = ShapedLink(0.0, 1e-8, 1 * MB)
    # the first is done 10 ms after 16 ms; until 40 ms the bucket fills again, for it holds no more than the burst
    assert step("wait_free", 2, FREE, link) == pytest.approx(FORWARD + BACKWARD + (4 * MB - 1 * MB) * 1e-8 + 0.002)


@pytest.mark.parametrize(("workers", "times"), [(2, 1), (4, 2), (8, 4)])
def test_ranks_beyond_the_cores_queue_for_them(workers: int, times: int) -> None:
    link = ShapedLink(0.0, 1e-15, 0.0)
    # a round is a message sent and one received; waking up may take longer than both
    host = replace(FREE, message_cpu_s=0.0005, round_s=0.0015)
    expected = 2 * (workers - 1) * max(0.0015, 0.001 * times)
    assert step("end_of_backward", workers, host, link) == pytest.approx(
        FORWARD + BACKWARD + expected + 0.002, rel=1e-6
    )
    host = replace(FREE, copy_s_per_byte=1e-9, sum_s_per_byte=2e-9)
    expected = 6 * MB * 3e-9 * times
    assert step("end_of_backward", workers, host, link) == pytest.approx(
        FORWARD + BACKWARD + expected + 0.002, rel=1e-6
    )
    # a message of one tensor is not packed
    assert step("layers_after_backward", workers, host, link) == pytest.approx(
        FORWARD + BACKWARD + 6 * MB * 2e-9 * times + 0.002, rel=1e-6
    )


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_central_server_s_interface_limits(workers: int) -> None:
    """In: the last layer's pushes, then the first one's; out: behind them, at the same rate."""
    last_s, first_s = workers * 2 * MB * 1e-8, workers * 4 * MB * 1e-8
    come = [0.016 + last_s]
    come.append(max(come[0], BACKWARD) + first_s)
    left = max(come[0] + last_s, come[1]) + first_s
    assert step("ps_central", workers) == pytest.approx(FORWARD + left + 0.002)
    late_s = 0.2 * workers * 6 * MB * 1e-8
    staggered = step("ps_central", workers, replace(FREE, stagger=0.2))
    assert staggered == pytest.approx(FORWARD + left + late_s + 0.002)


def test_sharded_servers_send_as_many_bytes_as_a_ring() -> None:
    """One interface in a row without a pause, once the first pushes are away: the end is that of as many bytes."""
    profile = replace(PROFILE, backward_s=np.array([0.0, 0.0, 0.040]))
    cell = Cell("ps_sharded", 4, (1, 2), NO_BURST)
    found = predict(Replayed(profile), cell, FREE).step_s
    assert found == pytest.approx(FORWARD + BACKWARD + 1.5 * 6 * MB * 1e-8 + 0.002)


def test_factors_are_sent_where_they_are_fewer() -> None:
    """The last layer's are 0.1 MB of each worker, the first one's more than its gradient."""
    found = step("sufficient_factors", 4, FREE, NO_BURST, factor_bytes=(0.1 * MB, 50 * MB))
    assert found == pytest.approx(FORWARD + max(0.016 + 0.003, BACKWARD) + 1.5 * 4 * MB * 1e-8 + 0.002)
    none = step("sufficient_factors", 4, FREE, NO_BURST, factor_bytes=(np.inf, np.inf))
    assert none == step("wait_free", 4)


def test_the_timeline_ends_with_the_step() -> None:
    found = predict(Replayed(PROFILE), Cell("wait_free", 4, (1, 2), NO_BURST), FREE)
    assert found.timeline.end_s == pytest.approx(found.step_s)
    assert [task.layer for task in found.timeline.tasks if task.resource == "link"] == ["last", "first"]
    assert found.step_s - FORWARD - BACKWARD - 0.002 == pytest.approx(found.exposed_s)


def test_what_a_lone_step_has_beyond_the_profile_is_added() -> None:
    replayed = with_rest(Replayed(PROFILE), 0.080)
    assert predict(replayed, Cell("end_of_backward", 1, (), None), FREE).step_s == pytest.approx(0.080)


def test_a_schedule_without_a_model_and_workers_without_a_link_are_refused() -> None:
    with pytest.raises(InputError, match="schedule = 'sparse': has no model; known are end_of_backward"):
        step("sparse", 4)
    with pytest.raises(InputError, match="wait_free on 4 workers: has no link"):
        predict(Replayed(PROFILE), Cell("wait_free", 4, (1, 2), None), FREE)
    with pytest.raises(InputError, match="no step of more than one worker"):
        fit_host([Observed(Replayed(PROFILE), Cell("wait_free", 1, (), None), 0.07)], 2, 0.0)


def observed(workers: tuple[int, ...], noise: float = 0.0) -> list[Observed]:
    """Planted cells over two links, a fast one of which shows what rounds take."""
    draw = np.random.default_rng(3)
    found = []
    for schedule, ends in planted.ENDS.items():
        for rate in (500e6, 4e9):
            for count in workers:
                cell = Cell(schedule.partition("=")[0], count, ends, planted.link(rate))
                step_s = planted.step(schedule, count, rate).step_s * float(draw.lognormal(0, noise) if noise else 1)
                found.append(Observed(Replayed(planted.profile(), 0.001), cell, step_s))
    return found


def test_fitted_on_two_workers_it_predicts_four_and_eight() -> None:
    given = (planted.CORES, planted.HOST.message_cpu_s)
    host = fit_host(observed((2,)), *given)
    assert np.abs(relative_errors(observed((2,)), host)).max() < 0.005
    assert np.abs(relative_errors(observed((4, 8)), host)).max() < 0.02
    noisy = fit_host(observed((2,), 0.003), *given)
    assert np.median(np.abs(relative_errors(observed((4, 8)), noisy))) < 0.02
    assert all(getattr(noisy, name) > 0 for name in FITTED)
