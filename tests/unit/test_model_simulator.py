"""The simulator: against a plain loop over events, the folded against every worker and round, steady states."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.core.machine import Link
from steptime.core.step import AGGREGATIONS, LayerProfile, Schedule, Task
from steptime.model.collectives import line
from steptime.model.exchanges import CentralServer, ShardedServer, ring_exchange
from steptime.model.schedules import Late, ring_graph, step_graph
from steptime.model.simulator import (
    as_served,
    iteration_ends_s,
    simulate,
    simulate_events,
    simulate_iterations,
    steady_step_s,
    unroll,
)
from steptime.model.tasks import GraphBuilder

LINK = Link(name="planted", alpha_s=4e-5, beta_s_per_byte=8e-10, source="planted")
NANOSECOND = 1e-9


def drawn_profile(rng, most_layers=6, *, with_input=True):
    count = int(rng.integers(1, most_layers + 1))
    return LayerProfile(
        network="planted",
        source="planted",
        batch=8,
        layers=tuple(f"layer{number}" for number in range(count)),
        forward_s=rng.uniform(0, 2e-3, count),
        backward_s=rng.uniform(0, 4e-3, count),
        parameter_bytes=rng.integers(0, 8_000_000, count) * (rng.random(count) < 0.8) * 1.0,
        activation_bytes=np.zeros(count),
        t_io_s=float(rng.uniform(0, 0.01)) * with_input,
        t_h2d_s=float(rng.uniform(0, 0.002)) * with_input,
        t_u_s=float(rng.uniform(0, 0.002)),
    )


def drawn_irregular(rng, workers, late, slow):
    """Late workers (delay or slower), and slow links that are up to five times and twenty times as slow."""
    lates = {
        int(worker): Late(float(rng.uniform(0, 0.02)), float(rng.uniform(0.5, 2)))
        for worker in rng.choice(workers, min(late, workers), replace=False)
    }
    links = {
        int(worker): LINK.model_copy(
            update={
                "alpha_s": LINK.alpha_s * float(rng.uniform(1, 5)),
                "beta_s_per_byte": LINK.beta_s_per_byte * float(rng.uniform(1, 20)),
            }
        )
        for worker in rng.choice(workers, min(slow, workers), replace=False)
    }
    return lates, links


def random_graph(rng, disciplines=("ordered",)):
    """Tasks on a few resources, edges from lower to higher index, some from an iteration before."""
    builder = GraphBuilder()
    count = int(rng.integers(1, 25))
    for number in range(int(rng.integers(1, 5))):
        builder.on("device", number, str(rng.choice(disciplines)))
    engines = rng.integers(-1, len(builder.resources), count)
    builder.add("forward", engines, rng.choice([0.0, 1.0, 2.0, 0.7], count))
    for after in range(1, count):
        for before in rng.choice(after, min(after, int(rng.integers(0, 4))), replace=False):
            builder.edge(int(before), after, float(rng.choice([0.0, 0.0, 0.3])))
    builder.edge(count - 1, 0, iterations=int(rng.integers(1, 4)))
    return builder.graph()


# ------------------------------------------------------------------------------------- the fast and the plain engine


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_the_longest_path_is_what_the_loop_over_events_finds(seed):
    graph = unroll(random_graph(np.random.default_rng(seed)), 3)
    fast, plain = simulate(graph), simulate_events(graph)
    np.testing.assert_allclose(fast.start_s, plain.start_s, atol=1e-12)
    np.testing.assert_allclose(fast.end_s, plain.end_s, atol=1e-12)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_what_is_put_in_the_order_served_has_the_same_times(seed):
    graph = random_graph(np.random.default_rng(seed), ("ordered", "fifo"))
    served = as_served(simulate_events(graph))
    np.testing.assert_allclose(simulate(served.graph).end_s, served.end_s, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["ordered", "fifo", "fair"]))
def test_no_task_starts_before_what_it_waits_for_nor_is_shorter_than_it_is(seed, discipline):
    graph = random_graph(np.random.default_rng(seed), (discipline,))
    found = simulate(graph)
    now = graph.iterations == 0
    assert (found.start_s[graph.after[now]] >= (found.end_s[graph.before] + graph.lag_s)[now] - 1e-12).all()
    assert (found.end_s - found.start_s >= graph.duration_s - 1e-9).all()


def test_an_index_order_against_the_edges_is_sorted_first():
    builder = GraphBuilder()
    last, middle, first = builder.add("update", -1, np.array([1.0, 2.0, 4.0]))
    builder.edge(first, middle)
    builder.edge(middle, last)
    builder.edge(first, last, 5.0)
    assert simulate(builder.graph()).start_s.tolist() == [9.0, 4.0, 0.0]


def two_on(discipline, durations, second_ready_s=0.0):
    builder = GraphBuilder()
    gate = builder.add("host", -1, second_ready_s)
    tasks = builder.add("communicate", builder.on("link", discipline=discipline), np.array(durations))
    builder.edge(gate, tasks[1])
    found = simulate(builder.graph())
    return found.start_s[tasks].tolist(), found.end_s[tasks].tolist()


def test_a_fair_link_shares_its_rate():
    # both at half rate until the short one is through at 2, then the long one alone: 3 of its 4 are left
    assert two_on("fair", [4.0, 1.0]) == ([0, 0], [5, 2])
    # the second comes at 1: 3 and 1 are left, so it is through at 3 and the first at 5
    assert two_on("fair", [4.0, 1.0], 1.0) == ([0, 1], [5, 3])


def test_a_fifo_link_takes_one_after_the_other():
    assert two_on("fifo", [4.0, 1.0], 1.0) == ([0, 4], [4, 5])


def test_a_fifo_link_serves_by_readiness_and_an_ordered_one_by_the_graph():
    for discipline, expected in (("fifo", [3, 0]), ("ordered", [3, 4])):
        builder = GraphBuilder()
        late = builder.add("host", -1, 3.0)
        tasks = builder.add("communicate", builder.on("link", discipline=discipline), np.array([1.0, 1.0]))
        builder.edge(late, tasks[0])
        starts = simulate(builder.graph()).start_s[tasks]
        assert starts.tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_sharing_a_link_fairly_ends_the_last_message_when_fifo_does(seed):
    # a link that is never idle while something waits has carried the same seconds of work by then
    profile = drawn_profile(np.random.default_rng(seed))
    exchange = ring_exchange(8, LINK)
    fifo, fair = (simulate(step_graph(profile, Schedule("wait_free"), exchange, fair=each)) for each in (False, True))
    assert fair.step_s == pytest.approx(fifo.step_s, abs=NANOSECOND)


# ------------------------------------------------------------------------------------------------------- folding


CASES = [
    (workers, late, slow, seed)
    for workers in (2, 3, 4, 7, 16, 33, 64)
    for late, slow in ((0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (4, 0), (0, 4), (2, 2), (4, 4))
    for seed in range(2 if workers > 16 else 6)
]


@pytest.mark.parametrize(("workers", "late", "slow", "seed"), CASES)
def test_folded_is_every_worker_and_every_round(workers, late, slow, seed):
    rng = np.random.default_rng([workers, late, slow, seed])
    profile = drawn_profile(rng)
    schedule = Schedule(
        str(rng.choice(AGGREGATIONS)),
        bool(rng.random() < 0.5),
        bucket_bytes=4e6,
    )
    lates, links = drawn_irregular(rng, workers, late, slow)
    folded, every = (
        ring_graph(profile, schedule, workers, LINK, late=lates, slow_links=links, folded=fold)
        for fold in (True, False)
    )
    few, all_of_them = (simulate_iterations(graph, 3) for graph in (folded, every))
    assert np.abs(iteration_ends_s(few) - iteration_ends_s(all_of_them)).max() < NANOSECOND
    # each worker kept does at the same times what it does among all
    updates = [one.graph.of_kind("update") for one in (few, all_of_them)]
    ends = {
        (int(worker), int(step)): end
        for worker, step, end in zip(
            all_of_them.graph.worker[updates[1]],
            all_of_them.step_of[updates[1]],
            all_of_them.end_s[updates[1]],
            strict=True,
        )
    }
    for worker, step, end in zip(
        few.graph.worker[updates[0]], few.step_of[updates[0]], few.end_s[updates[0]], strict=True
    ):
        assert abs(ends[int(worker), int(step)] - end) < NANOSECOND
    assert sum(folded.stands_for) == workers


@pytest.mark.parametrize(("late", "slow"), [(0, 0), (1, 0), (2, 0), (4, 0), (0, 1), (0, 2), (0, 4)])
def test_what_is_simulated_does_not_grow_with_the_workers(late, slow):
    profile = drawn_profile(np.random.default_rng(0))
    counts = []
    for workers in (64, 1024, 16_384):
        lates = {place * 16: Late(delay_s=1e-3 * (place + 1)) for place in range(late)}
        links = {place * 16: LINK.model_copy(update={"alpha_s": 1e-3}) for place in range(slow)}
        counts.append(simulate(ring_graph(profile, Schedule(), workers, LINK, late=lates, slow_links=links)).tasks)
    assert len(set(counts)) == 1
    of_one = simulate(ring_graph(profile, Schedule(), 64, LINK)).tasks
    assert counts[0] <= (1 + late) * of_one + 6 * slow * of_one
    every = simulate(ring_graph(profile, Schedule(), 64, LINK, folded=False)).tasks
    messages = int((profile.parameter_bytes > 0).sum())
    assert every >= 64 * messages * 2 * 63 > 10 * counts[0]


@pytest.mark.parametrize(
    "exchange", [CentralServer(9, line(LINK)), ShardedServer(9, line(LINK)), ring_exchange(9, LINK)]
)
@pytest.mark.parametrize("late", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_folded_servers_serve_every_worker(exchange, late, seed):
    rng = np.random.default_rng([late, seed])
    profile, (lates, _) = drawn_profile(rng), drawn_irregular(rng, 9, late, 0)
    schedule = Schedule(str(rng.choice(AGGREGATIONS)), bucket_bytes=4e6)
    few, all_of_them = (
        simulate(step_graph(profile, schedule, exchange, late=lates, folded=fold)) for fold in (True, False)
    )
    assert few.step_s == pytest.approx(all_of_them.step_s, abs=NANOSECOND)
    assert few.tasks < all_of_them.tasks
    assert few.graph.stands_for[0] == 9 - late


def test_a_late_worker_holds_up_every_other_once():
    profile = drawn_profile(np.random.default_rng(1), with_input=False)
    times = [
        simulate(ring_graph(profile, Schedule("end_of_backward"), 8, LINK, late={5: Late(delay_s=delay)})).step_s
        for delay in (0.0, 0.5)
    ]
    assert times[1] - times[0] == pytest.approx(0.5)


def test_a_slow_link_is_waited_for_in_every_round():
    slow = LINK.model_copy(update={"alpha_s": LINK.alpha_s + 1e-3})
    profile = replace(drawn_profile(np.random.default_rng(1)), parameter_bytes=np.array([8e6] * 4 + [0.0] * 2)[:1])
    profile = replace(profile, layers=("a",), forward_s=np.ones(1), backward_s=np.ones(1), activation_bytes=np.ones(1))
    plain, delayed = (
        simulate(ring_graph(profile, Schedule(), 8, LINK, slow_links=links)).step_s for links in ({}, {3: slow})
    )
    # 2 (N - 1) rounds, each a millisecond longer
    assert delayed - plain == pytest.approx(14e-3)


def test_what_a_slow_link_delays_is_absorbed_by_a_worker_that_is_late_for_the_next_message():
    # the worker furthest behind the slow link has its chunk of the last round d rounds earlier
    slow = LINK.model_copy(update={"alpha_s": LINK.alpha_s + 1e-3})
    profile = LayerProfile("p", "p", 1, ("a",), np.ones(1), np.ones(1), np.array([8e6]), np.zeros(1))
    graph = ring_graph(profile, Schedule(), 8, LINK, slow_links={0: slow}, folded=False)
    found = simulate(graph)
    update = found.start_s[graph.of_kind("update")]
    # worker 0 and worker 1, who receives the slow chunk, are last; from there each one is a round earlier
    assert np.diff(update[1:]) == pytest.approx([-1e-3] * 6)
    assert update[0] == pytest.approx(update[1])


def test_a_slow_link_that_is_faster_is_refused():
    faster = LINK.model_copy(update={"alpha_s": 0.0})
    profile = drawn_profile(np.random.default_rng(0))
    with pytest.raises(InputError, match="slow link of worker 2: is faster"):
        ring_graph(profile, Schedule(), 4, LINK, slow_links={2: faster})


@pytest.mark.parametrize(("workers", "late", "message"), [(0, {}, "workers = 0"), (4, {4: Late(1.0)}, "worker 4")])
def test_workers_that_are_not_there_are_refused(workers, late, message):
    with pytest.raises(InputError, match=message):
        ring_graph(drawn_profile(np.random.default_rng(0)), Schedule(), workers, LINK, late=late)


# --------------------------------------------------------------------------------------------------- steady state


def loading(t_io_s, compute_s, loaders):
    profile = LayerProfile(
        "p", "p", 1, ("a",), np.array([compute_s / 2]), np.array([compute_s / 2]), np.zeros(1), np.zeros(1), t_io_s
    )
    return step_graph(profile, Schedule(prefetch=True, loaders=loaders), ring_exchange(1, LINK))


def test_two_loaders_of_three_seconds_make_steps_of_one_and_a_half():
    graph = loading(3.0, 1.0, 2)
    assert steady_step_s(graph) == pytest.approx(1.5)
    gaps = np.diff(iteration_ends_s(simulate_iterations(graph, 21)))
    # the gaps alternate for ever: no single one is the step
    np.testing.assert_allclose(gaps[-4:], [2, 1, 2, 1] if gaps[-1] == 1 else [1, 2, 1, 2])
    assert gaps[-20:].mean() == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("t_io_s", "compute_s", "loaders", "step_s"),
    [(3, 1, 1, 3), (3, 1, 3, 1), (3, 1, 4, 1), (10, 1, 4, 2.5), (7, 3, 2, 3.5), (1, 5, 2, 5), (11, 2, 3, 11 / 3)],
)
def test_k_loaders_divide_the_reading_by_k(t_io_s, compute_s, loaders, step_s):
    assert steady_step_s(loading(t_io_s, compute_s, loaders)) == pytest.approx(step_s)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_steady_state_is_the_mean_over_many_iterations(seed):
    graph = random_graph(np.random.default_rng(seed))
    step = steady_step_s(graph)
    # the growth per iteration, over a number of iterations that all periods here divide
    ends = [simulate(unroll(graph, iterations)).step_s for iterations in (240, 480)]
    assert (ends[1] - ends[0]) / 240 == pytest.approx(step, rel=1e-6, abs=1e-9)


def test_a_graph_without_a_cycle_over_iterations_has_no_period():
    builder = GraphBuilder()
    builder.add("update", -1, 1.0)
    assert steady_step_s(builder.graph()) == 0


def test_the_steady_state_of_a_queue_is_refused():
    builder = GraphBuilder()
    builder.add("update", builder.on("server", discipline="fifo"), 1.0)
    with pytest.raises(InputError, match="as_served"):
        steady_step_s(builder.graph())


def test_no_iterations_are_refused():
    with pytest.raises(InputError, match="iterations = 0"):
        unroll(loading(1, 1, 1), 0)


# ------------------------------------------------------------------------------------------------------ timelines


def test_the_timeline_is_simulated_and_keeps_what_waits_for_what():
    profile = drawn_profile(np.random.default_rng(3))
    line = simulate_iterations(ring_graph(profile, Schedule(), 4, LINK, late={1: Late(1e-3)}), 2).timeline()
    assert line.kind == "simulated"
    assert {task.step for task in line.tasks} == {0, 1}
    assert {task.worker for task in line.tasks if task.resource == "device"} == {0, 1}
    for before, after in line.dependencies:
        assert line.tasks[before].end_s <= line.tasks[after].start_s + 1e-12
    assert {task.kind for task in line.tasks} >= {"host", "forward", "backward", "communicate"}
    by_lane: dict[tuple[int, str], list[Task]] = {}
    for task in line.tasks:
        by_lane.setdefault((task.worker, task.resource), []).append(task)
    for tasks in by_lane.values():
        tasks.sort(key=lambda task: task.start_s)
        assert all(before.end_s <= after.start_s + 1e-12 for before, after in pairwise(tasks))
