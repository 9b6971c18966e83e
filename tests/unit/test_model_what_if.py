"""What-if: each column is its own simulation; each bottleneck's gain is what removing it gives; injected causes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.core.machine import Link
from steptime.core.step import LayerProfile, Schedule
from steptime.model import simulator_benchmark
from steptime.model.collectives import line
from steptime.model.exchanges import CentralServer, ring_exchange
from steptime.model.schedules import Late, ring_graph, step_graph
from steptime.model.simulator import simulate, unroll
from steptime.model.tasks import GraphBuilder
from steptime.model.what_if import CAUSES, bottlenecks, cause_groups, rank_causes, what_if

LINK = Link(name="planted", alpha_s=4e-5, beta_s_per_byte=8e-10, source="planted")


def profile_of(forward, backward, sizes, **phases):
    count = len(forward)
    names = tuple(f"layer{number}" for number in range(count))
    times = (np.array(values, dtype=float) for values in (forward, backward, sizes))
    return LayerProfile("planted", "planted", 8, names, *times, np.zeros(count), **phases)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3000))
def test_each_scenario_is_a_simulation_of_its_own(seed, scenarios):
    rng = np.random.default_rng(seed)
    profile = profile_of(rng.uniform(0, 1, 3), rng.uniform(0, 1, 3), rng.integers(0, 2e8, 3), t_io_s=0.1)
    links = {1: LINK.model_copy(update={"alpha_s": 0.01})} if rng.random() < 0.5 else {}
    graph = ring_graph(profile, Schedule(), 5, LINK, late={2: Late(0.1)}, slow_links=links)
    durations = graph.duration_s[:, None] * rng.uniform(0, 2, (len(graph), scenarios))
    steps = what_if(graph, durations)
    for column in rng.integers(0, scenarios, 3).tolist():
        alone = simulate(replace(graph, duration_s=durations[:, column]))
        assert steps[column] == pytest.approx(alone.step_s)
        every = what_if(graph, durations, np.arange(len(graph)))
        np.testing.assert_allclose(every[:, column], alone.end_s, atol=1e-12)


def test_the_plain_loop_of_the_benchmark_computes_the_same():
    rng = np.random.default_rng(3)
    profile = simulator_benchmark.resnet50_profile()
    assert (profile.parameter_bytes > 0).sum() == len(profile.layers) == 54
    assert profile.parameter_bytes.sum() == 4 * 25_557_032
    graph = ring_graph(profile, Schedule(), 4, LINK, slow_links={1: LINK.model_copy(update={"alpha_s": 1e-3})})
    durations = graph.duration_s[:, None] * rng.uniform(0, 2, (len(graph), 3))
    np.testing.assert_allclose(simulator_benchmark.plain_what_if(graph, durations), what_if(graph, durations))


def test_scenarios_of_another_graph_and_of_a_queue_are_refused():
    graph = step_graph(profile_of([1], [1], [1e6]), Schedule(), ring_exchange(2, LINK))
    with pytest.raises(InputError, match=r"shape \(2, 3\)"):
        what_if(graph, np.ones((2, 3)))
    builder = GraphBuilder()
    builder.add("update", builder.on("server", discipline="fifo"), 1.0)
    with pytest.raises(InputError, match="as_served"):
        what_if(builder.graph(), np.ones((1, 1)))


def test_the_bottleneck_is_named_with_its_gain():
    ahead = Schedule(prefetch=True)
    compute_bound = profile_of([1.0], [2.0], [1e6], t_io_s=2.0)
    table = bottlenecks(step_graph(compute_bound, ahead, ring_exchange(4, LINK))).set_index("resource")
    assert table.index[0] == "device"
    exposed = ring_exchange(4, LINK).cost.time_s(1e6)
    # without computing the step is what reading allows, without the link only its exposed part is gained
    assert table.loc["device", "free_step_s"] == pytest.approx(2.0)
    assert table.loc["link", "gain_s"] == pytest.approx(exposed)
    assert table.loc["input", "gain_s"] == pytest.approx(0, abs=1e-12)
    input_bound = profile_of([1.0], [2.0], [1e6], t_io_s=5.0)
    table = bottlenecks(step_graph(input_bound, ahead, ring_exchange(4, LINK)))
    assert table["resource"][0] == "input"
    assert table["gain_s"][0] == pytest.approx(5.0 - 3.0 - exposed)
    assert table["busy_s"][0] == pytest.approx(5.0)


def test_of_two_full_resources_neither_gains_much_alone():
    profile = profile_of([1e-3] * 8, [1e-3] * 8, [8e6] * 8)
    table = bottlenecks(step_graph(profile, Schedule(), CentralServer(32, line(LINK)))).set_index("resource")
    assert table.loc["server in", "busy_s"] > 0.9 * (table.loc["server in", "free_step_s"] - 16e-3)
    assert max(table["gain"]) < 0.2


@pytest.mark.parametrize("exchange", [ring_exchange(8, LINK), CentralServer(8, line(LINK))])
def test_no_gain_is_negative_or_more_than_the_step(exchange):
    profile = profile_of([0.01, 0.02], [0.02, 0.03], [1e7, 3e7], t_io_s=0.05, t_h2d_s=0.01, t_u_s=0.002)
    for prefetch in (False, True):
        gains = bottlenecks(step_graph(profile, Schedule(prefetch=prefetch), exchange))["gain"]
        assert (gains >= -1e-12).all()
        assert (gains <= 1).all()


# ------------------------------------------------------------------------------------------------- injected causes

ITERATIONS = 4
JITTER = 0.01


def healthy_job(rng):
    """A job of 2-8 workers, all tasks there, and its graph over a few iterations."""
    count, workers = int(rng.integers(4, 9)), int(rng.integers(2, 9))
    profile = profile_of(
        rng.uniform(1e-3, 4e-3, count),
        rng.uniform(2e-3, 8e-3, count),
        rng.integers(100_000, 4_000_000, count),
        t_u_s=1e-3,
        t_h2d_s=1e-3,
        t_io_s=float(rng.uniform(0.2, 0.9)) * 6e-3 * count,
    )
    schedule = Schedule(
        str(rng.choice(["wait_free", "end_of_backward", "buckets"])),
        prefetch=bool(rng.random() < 0.5),
        bucket_bytes=4e6,
    )
    host = {worker: Late(delay_s=5e-4) for worker in range(workers)}
    graph = ring_graph(profile, schedule, workers, LINK, late=host, folded=False)
    return unroll(graph, ITERATIONS)


def injected(graph, cause, rng):
    """A place for the cause, and by how much its tasks get longer: the step by a twentieth to its double."""
    places = [where for name, where in cause_groups(graph) if name == cause]
    where = str(rng.choice(places))
    tasks = cause_groups(graph)[cause, where]
    healthy = simulate(graph).step_s
    wanted = healthy * float(rng.uniform(1.05, 2.0))
    factor = 1.0
    while (
        simulate(replace(graph, duration_s=np.where(tasks, graph.duration_s * factor, graph.duration_s))).step_s
        < wanted
    ):
        factor *= 1.2
    return where, tasks, factor


@pytest.mark.parametrize("cause", CAUSES)
def test_an_injected_cause_is_named_first_with_its_gain(cause):
    named, gains = [], []
    for seed in range(24):
        rng = np.random.default_rng([CAUSES.index(cause), seed])
        graph = healthy_job(rng)
        where, tasks, factor = injected(graph, cause, rng)
        # every task is as uneven as on a real machine; the one who looks knows only the durations, and a healthy run's
        uneven = graph.duration_s * np.exp(rng.normal(0, JITTER, len(graph)))
        observed = np.where(tasks, uneven * factor, uneven)
        first = rank_causes(graph, observed, graph.duration_s).iloc[0]
        named.append((first["cause"], first["where"]) == (cause, where))
        truly = [simulate(replace(graph, duration_s=durations)).step_s for durations in (observed, uneven)]
        gains.append(first["gain_s"] / (truly[0] - truly[1]) - 1)
    assert np.mean(named) >= 0.95
    assert np.mean(np.abs(gains) <= 0.05) >= 0.95


def test_without_a_cause_nothing_gains_much():
    rng = np.random.default_rng(5)
    graph = healthy_job(rng)
    uneven = graph.duration_s * np.exp(rng.normal(0, JITTER, len(graph)))
    table = rank_causes(graph, uneven, graph.duration_s)
    assert table["gain_s"].max() < 0.02 * simulate(graph).step_s
