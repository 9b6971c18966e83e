"""The critical path adds up to the step, and the idle device knows what it waited for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.core.machine import Link
from steptime.core.step import LayerProfile, Schedule
from steptime.model.collectives import line
from steptime.model.critical_path import (
    WAITING,
    critical_path,
    device_waits,
    exposed_communication_s,
    path_by_kind_s,
)
from steptime.model.exchanges import CentralServer, ShardedServer, ring_exchange
from steptime.model.schedules import Late, ring_graph, step_graph
from steptime.model.simulator import simulate

LINK = Link(name="planted", alpha_s=4e-5, beta_s_per_byte=8e-10, source="planted")
SLOW = LINK.model_copy(update={"alpha_s": 1e-3})
THREE = LayerProfile(
    "planted",
    "planted",
    8,
    ("a", "b", "c"),
    np.array([1e-3, 2e-3, 3e-3]),
    np.array([2e-3, 4e-3, 6e-3]),
    np.array([8e6, 0.0, 3e6]),
    np.zeros(3),
    t_io_s=5e-3,
    t_h2d_s=1e-3,
    t_u_s=1e-3,
)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["wait_free", "end_of_backward", "merged"]),
    st.integers(2, 12),
    st.dictionaries(st.integers(0, 1), st.builds(Late, st.floats(0, 0.02), st.floats(0.5, 2)), max_size=2),
    st.booleans(),
    st.booleans(),
)
def test_the_path_adds_up_to_the_step(aggregated, workers, late, slow, folded):
    links = {1: SLOW} if slow else {}
    graph = ring_graph(THREE, Schedule(aggregated), workers, LINK, late=late, slow_links=links, folded=folded)
    found = simulate(graph)
    path = critical_path(found)
    assert path_by_kind_s(path).sum() == pytest.approx(found.step_s)
    assert path["end_s"].iloc[-1] == pytest.approx(found.step_s)
    starts, ends, lags = (path[name].to_numpy() for name in ("start_s", "end_s", "lag_s"))
    np.testing.assert_allclose(starts[1:], ends[:-1] + lags[1:], atol=1e-12)
    assert path["start_s"].iloc[0] == 0


def test_the_path_by_hand():
    path = critical_path(simulate(step_graph(THREE, Schedule(), ring_exchange(8, LINK))))
    assert path["name"].tolist() == [
        "input",
        "h2d",
        "forward a",
        "forward b",
        "forward c",
        "backward c",
        "backward b",
        "backward a",
        "communicate a",
        "update",
    ]
    expected = {"input": 5e-3, "h2d": 1e-3, "forward": 6e-3, "backward": 12e-3, "update": 1e-3}
    seconds = path_by_kind_s(path)
    for kind, value in expected.items():
        assert seconds[kind] == pytest.approx(value)
    assert seconds["communicate"] == pytest.approx(14 * (4e-5 + 1e6 * 8e-10))


def test_a_slow_link_is_on_the_path_as_its_lag():
    healthy, slow = (
        simulate(ring_graph(THREE, Schedule("end_of_backward"), 64, LINK, slow_links=links))
        for links in ({}, {3: SLOW})
    )
    seconds = path_by_kind_s(critical_path(slow))
    assert seconds[WAITING] == pytest.approx(slow.step_s - healthy.step_s)


@pytest.mark.parametrize("exchange", [CentralServer(4, line(LINK)), ShardedServer(4, line(LINK))])
def test_the_path_through_a_queue_adds_up(exchange):
    found = simulate(step_graph(THREE, Schedule(), exchange, late={2: Late(1e-3)}))
    assert path_by_kind_s(critical_path(found)).sum() == pytest.approx(found.step_s)


def test_a_fair_resource_has_no_path():
    found = simulate(step_graph(THREE, Schedule(), ring_exchange(4, LINK), fair=True))
    with pytest.raises(InputError, match="fair"):
        critical_path(found)


def test_the_device_waits_for_its_input_then_for_communication():
    found = simulate(step_graph(THREE, Schedule("end_of_backward"), ring_exchange(8, LINK)))
    waits = device_waits(found).set_index("kind")["wait_s"]
    assert waits["h2d"] == pytest.approx(6e-3)
    assert waits["communicate"] == pytest.approx(14 * (4e-5 + 11e6 / 8 * 8e-10))
    assert set(waits.index) == {"h2d", "communicate"}


def test_a_worker_on_time_waits_for_the_late_one():
    found = simulate(ring_graph(THREE, Schedule("end_of_backward"), 8, LINK, late={5: Late(delay_s=0.1)}))
    exposed = exposed_communication_s(found)
    assert exposed[0] - exposed[5] == pytest.approx(0.1)


def test_one_worker_exposes_nothing():
    found = simulate(step_graph(THREE, Schedule(), ring_exchange(1, LINK)))
    assert exposed_communication_s(found).tolist() == [0]
