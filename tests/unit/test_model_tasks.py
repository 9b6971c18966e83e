"""Task graphs: what they refuse, and which edges ordered resources add."""

import numpy as np
import pytest

from steptime.core.errors import InputError
from steptime.model.simulator import simulate, simulate_events, topological_order
from steptime.model.tasks import GraphBuilder, Resource, order_edges


def chain(durations, slots=1):
    builder = GraphBuilder()
    builder.add("forward", builder.on("device", 0, slots=slots), np.array(durations, dtype=float))
    return builder.graph()


def test_an_ordered_resource_serves_in_the_graphs_order():
    before, after, iterations = order_edges(chain([1, 2, 3]))
    assert sorted(zip(before.tolist(), after.tolist(), iterations.tolist(), strict=True)) == [
        (0, 1, 0),
        (1, 2, 0),
        (2, 0, 1),
    ]


def test_the_nth_task_takes_the_slot_of_the_one_slots_before():
    before, after, iterations = order_edges(chain([1, 2, 3], slots=2))
    # the global sequence is 0 1 2 0' 1' 2' …: task 0 waits for task 1 of the iteration before, task 1 for task 2
    assert sorted(zip(after.tolist(), before.tolist(), iterations.tolist(), strict=True)) == [
        (0, 1, 1),
        (1, 2, 1),
        (2, 0, 0),
    ]


def test_more_slots_than_tasks_reach_back_several_iterations():
    _, _, iterations = order_edges(chain([1.0], slots=3))
    assert iterations.tolist() == [3]


@pytest.mark.parametrize("run", [simulate, simulate_events, topological_order])
def test_a_cycle_is_named(run):
    builder = GraphBuilder(layers=("conv1", "conv2"))
    first = builder.add("forward", builder.on("device", 0), 1.0, layer=0)
    second = builder.add("communicate", -1, 1.0, layer=1)
    builder.add("update", -1, 1.0)
    builder.edge(first, second)
    builder.edge(second, first)
    with pytest.raises(InputError, match=r"forward conv1 \(task 0\).*communicate conv2 \(task 1\).*cycle"):
        run(builder.graph())


@pytest.mark.parametrize("run", [simulate, simulate_events])
def test_an_order_against_the_edges_is_a_cycle(run):
    builder = GraphBuilder()
    first, second = builder.add("update", builder.on("device", 0), np.ones(2))
    builder.edge(second, first)
    with pytest.raises(InputError, match="cycle"):
        run(builder.graph())


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_a_duration_that_is_no_time_is_refused(value):
    builder = GraphBuilder(layers=("conv1",))
    builder.add("forward", builder.on("device", 0), value, layer=0)
    with pytest.raises(InputError, match="forward conv1: duration_s"):
        builder.graph()


@pytest.mark.parametrize("value", [-1.0, np.nan])
def test_a_lag_that_is_no_time_is_refused(value):
    builder = GraphBuilder()
    tasks = builder.add("update", -1, np.ones(2))
    builder.edge(*tasks, value)
    with pytest.raises(InputError, match="edge 0: lag_s"):
        builder.graph()


def test_an_edge_to_nowhere_is_refused():
    builder = GraphBuilder()
    builder.add("update", -1, 1.0)
    builder.edge(0, 7)
    with pytest.raises(InputError, match="edge to task 7"):
        builder.graph()


def test_an_unknown_discipline_and_no_slots_are_refused():
    with pytest.raises(InputError, match="discipline = 'lifo'"):
        Resource("link", "lifo")
    with pytest.raises(InputError, match="slots = 0"):
        Resource("link", slots=0)


def test_a_graph_without_tasks_takes_no_time():
    assert simulate(GraphBuilder().graph()).step_s == 0
    assert simulate_events(GraphBuilder().graph()).step_s == 0
