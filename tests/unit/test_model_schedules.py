"""Task graphs of the schedules: the simulator equals the closed forms."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.core.machine import Link
from steptime.core.step import AGGREGATIONS, COPIES, LayerProfile, Schedule
from steptime.model import merging
from steptime.model.collectives import AllReduce, line, ring
from steptime.model.critical_path import exposed_communication_s
from steptime.model.exchanges import (
    CentralServer,
    Collective,
    Hierarchical,
    ShardedServer,
    SparseCollective,
    SufficientFactors,
    ring_exchange,
)
from steptime.model.schedules import framework_schedules, local_sgd_graph, pipeline_graph, step_graph
from steptime.model.simulator import simulate, steady_step_s
from steptime.model.sparse import Sparse
from steptime.model.step import (
    aggregation,
    local_sgd_step_s,
    messages,
    overlap_bound_s,
    pipeline_step_s,
    predict_step,
    sending_order,
)
from steptime.model.sufficient_factors import is_factored
from steptime.model.tasks import KINDS
from steptime.model.what_if import steady_s

LINK = Link(name="planted", alpha_s=4e-5, beta_s_per_byte=8e-10, source="planted")
FAST = Link(name="planted", alpha_s=1e-6, beta_s_per_byte=1e-10, source="planted")


@st.composite
def profiles(draw, most=8):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, most))
    return LayerProfile(
        network="planted",
        source="planted",
        batch=8,
        layers=tuple(f"layer{number}" for number in range(count)),
        forward_s=rng.uniform(0, 2e-3, count),
        backward_s=rng.uniform(0, 4e-3, count),
        parameter_bytes=rng.integers(0, 8_000_000, count) * (rng.random(count) < 0.8) * 1.0,
        activation_bytes=np.zeros(count),
        t_io_s=draw(st.sampled_from([0.0, 0.004, 0.05])),
        t_h2d_s=draw(st.sampled_from([0.0, 0.001, 0.03])),
        t_u_s=draw(st.sampled_from([0.0, 0.001])),
    )


schedules = st.builds(
    Schedule,
    aggregation=st.sampled_from(AGGREGATIONS),
    prefetch=st.booleans(),
    bucket_bytes=st.just(4e6),
    loaders=st.integers(1, 4),
    copy=st.sampled_from(COPIES),
)


@settings(max_examples=200, deadline=None)
@given(profiles(), schedules, st.integers(1, 64), st.booleans())
def test_the_steady_state_is_the_closed_form(profile, schedule, workers, shared):
    graph = step_graph(profile, schedule, ring_exchange(workers, LINK), shared_cores=shared)
    expected = predict_step(profile, schedule, workers, LINK, shared_cores=shared)
    assert steady_step_s(graph) == pytest.approx(expected.step_s, abs=1e-9)


@settings(max_examples=80, deadline=None)
@given(profiles(), st.sampled_from(AGGREGATIONS), st.integers(2, 64))
def test_the_exposed_communication_is_the_closed_form(profile, aggregated, workers):
    schedule = Schedule(aggregated, bucket_bytes=4e6)
    found = simulate(step_graph(profile, schedule, ring_exchange(workers, LINK)))
    expected = predict_step(profile, schedule, workers, LINK)
    assert exposed_communication_s(found).tolist() == pytest.approx([expected.t_c_no_s], abs=1e-9)
    assert found.step_s == pytest.approx(expected.step_s, abs=1e-9)  # nothing is read ahead


@settings(max_examples=80, deadline=None)
@given(profiles(), st.integers(2, 64))
def test_no_wait_free_step_beats_perfect_overlap(profile, workers):
    step = predict_step(profile, Schedule("wait_free"), workers, LINK)
    alone = step.step_s - step.t_io_s - step.t_h2d_s - step.t_u_s
    assert alone >= overlap_bound_s(step.t_f_s, step.t_b_s, step.t_c_s) - 1e-12


def of_layers(sizes, forward=1e-3, backward=2e-3, **phases):
    count = len(sizes)
    return LayerProfile(
        network="planted",
        source="planted",
        batch=8,
        layers=tuple(f"layer{number}" for number in range(count)),
        forward_s=np.full(count, forward),
        backward_s=np.full(count, backward),
        parameter_bytes=np.array(sizes, dtype=float),
        activation_bytes=np.zeros(count),
        **phases,
    )


# -------------------------------------------------------------------------------------------------------- exchanges


@settings(max_examples=60, deadline=None)
@given(profiles(), st.sampled_from(AGGREGATIONS), st.integers(2, 32))
def test_a_central_server_is_two_queues_in_a_row(profile, aggregated, workers):
    exchange = CentralServer(workers, line(LINK))
    schedule = Schedule(aggregated, bucket_bytes=4e6)
    sent = messages(profile, schedule, exchange.cost)
    into = out = 0.0
    for ready, n_bytes in zip(sent.ready_s, sent.n_bytes, strict=True):
        one_way = workers * (LINK.alpha_s + n_bytes * LINK.beta_s_per_byte)
        into = max(into, ready) + one_way
        out = max(out, into) + one_way
    expected = profile.t_io_s + profile.t_h2d_s + profile.t_f_s + max(profile.t_b_s, out) + profile.t_u_s
    assert simulate(step_graph(profile, schedule, exchange)).step_s == pytest.approx(expected, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(profiles(), st.sampled_from(["end_of_backward", "merged"]), st.integers(2, 32))
def test_a_sharded_server_with_one_message_at_a_time_is_a_ring(profile, aggregated, workers):
    # pushes and pulls keep the node's interface busy for as long as the ring's rounds do
    schedule = Schedule(aggregated)
    server, rings = ShardedServer(workers, line(LINK)), ring_exchange(workers, LINK)
    sizes = np.array([1e3, 1e7])
    np.testing.assert_allclose(server.cost.time_s(sizes), rings.cost.time_s(sizes))
    steps = [simulate(step_graph(profile, schedule, exchange)).step_s for exchange in (server, rings)]
    assert steps[0] == pytest.approx(steps[1], abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(profiles(), st.integers(1, 8), st.integers(2, 16))
def test_two_levels_without_overlap_are_their_sum(profile, per_node, nodes):
    exchange = Hierarchical(nodes, per_node, line(FAST), line(LINK))
    step = simulate(step_graph(profile, Schedule("end_of_backward"), exchange)).step_s
    n_bytes = float(profile.parameter_bytes.sum())
    inside = (per_node - 1) * FAST.alpha_s + n_bytes * FAST.beta_s_per_byte if per_node > 1 else 0.0
    leaders = 2 * (nodes - 1) * (LINK.alpha_s + n_bytes / nodes * LINK.beta_s_per_byte)
    exposed = 2 * inside + leaders if n_bytes else 0.0
    expected = profile.t_io_s + profile.t_h2d_s + profile.t_f_s + profile.t_b_s + exposed + profile.t_u_s
    assert step == pytest.approx(expected, abs=1e-9)


def test_two_levels_overlap_the_bus_of_one_message_with_the_link_of_another():
    profile = of_layers([8e6] * 4, backward=0.0)
    apart = simulate(step_graph(profile, Schedule("wait_free"), Hierarchical(4, 4, line(FAST), line(LINK)))).step_s
    in_a_row = simulate(
        step_graph(profile, Schedule("wait_free"), Collective(16, Hierarchical(4, 4, line(FAST), line(LINK)).cost))
    ).step_s
    assert apart < in_a_row


@settings(max_examples=60, deadline=None)
@given(profiles(), st.sampled_from(AGGREGATIONS), st.integers(2, 32))
def test_a_sparse_all_reduce_chooses_before_it_sends(profile, aggregated, workers):
    sparse = Sparse(ring(workers, LINK), 0.85, 131_072.0, 2e-4)
    schedule = Schedule(aggregated, bucket_bytes=4e6)
    found = simulate(step_graph(profile, schedule, SparseCollective(workers, sparse)))
    sent = aggregation(profile, schedule, sparse)
    expected = profile.t_io_s + profile.t_h2d_s + profile.t_f_s + max(profile.t_b_s, sent.end_s) + profile.t_u_s
    assert found.step_s == pytest.approx(expected, abs=1e-9)
    assert (found.graph.kind == KINDS.index("compress")).sum() == len(sent.names)


@pytest.mark.parametrize("workers", [2, 4, 8, 50, 51, 128, 129])
def test_factors_travel_where_poseidon_sends_them(workers):
    dense = [(4096, 4096), (4096, 1000), (1024, 1000)]
    batch = 32
    n_bytes = np.array([4.0 * rows * columns for rows, columns in dense])
    factors = np.array([4.0 * batch * (rows + columns) for rows, columns in dense])
    exchange = SufficientFactors(workers, line(LINK), factors)
    expected = [is_factored(rows, columns, batch, workers, workers) for rows, columns in dense]
    assert exchange.by_factors(n_bytes).tolist() == expected
    push, pull = exchange.stages(n_bytes)
    for place, factored in enumerate(expected):
        one_way = (workers - 1) * (LINK.alpha_s + n_bytes[place] / workers * LINK.beta_s_per_byte)
        whole = (workers - 1) * (LINK.alpha_s + factors[place] * LINK.beta_s_per_byte)
        assert push.time_s[place] == pytest.approx(whole if factored else one_way)
        assert pull.time_s[place] == pytest.approx(0 if factored else one_way)


def test_a_layer_without_factors_goes_to_the_server():
    exchange = SufficientFactors(4, line(LINK), np.array([np.inf, 1.0]))
    assert exchange.by_factors(np.array([1e6, 1e6])).tolist() == [False, True]
    assert np.isfinite(exchange.stages(np.array([1e6, 1e6]))[0].time_s).all()


def test_factors_need_a_message_a_layer():
    exchange = SufficientFactors(4, line(LINK), np.array([1.0, 1.0]))
    with pytest.raises(InputError, match="2 layers for 1 messages"):
        step_graph(of_layers([1e6, 1e6]), Schedule("end_of_backward"), exchange)


# ---------------------------------------------------------------------------------------------------------- merging


def test_buckets_close_with_the_gradient_that_fills_them():
    assert merging.bucket_groups(np.array([3.0, 3.0, 3.0, 9.0, 1.0]), 6.0) == (2, 4, 5)
    assert merging.bucket_groups(np.array([9.0]), 6.0) == (1,)
    assert merging.bucket_groups(np.zeros(0), 6.0) == ()
    assert merging.bucket_groups(np.full(4, 1.0), 1e9) == (4,)
    assert merging.bucket_groups(np.full(3, 1.0), 1e-9) == merging.layer_wise(3)


def test_layers_after_backward_send_the_same_messages_later():
    profile = of_layers([8e6] * 6)
    free, after = (predict_step(profile, Schedule(name), 8, LINK) for name in ("wait_free", "layers_after_backward"))
    assert after.messages == free.messages == 6
    assert after.t_c_s == pytest.approx(free.t_c_s)
    assert after.t_c_no_s == pytest.approx(after.t_c_s)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"aggregation": "ring"}, "schedule = 'ring': unknown"),
        ({"copy": "never"}, "copy = 'never'"),
        ({"loaders": 0}, "loaders = 0"),
        ({"bucket_bytes": 0.0}, "bucket_bytes = 0.0"),
    ],
)
def test_a_schedule_that_is_none_is_refused(values, message):
    with pytest.raises(InputError, match=message):
        Schedule(**values)


# -------------------------------------------------------------------------------------------------- other schedules


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 8, 13])
def test_a_pipeline_of_equal_stages_is_the_closed_form(stages, microbatches):
    graph = pipeline_graph([1.0] * stages, [2.0] * stages, microbatches)
    assert simulate(graph).step_s == pytest.approx(pipeline_step_s(1.0, 2.0, stages, microbatches))


def test_one_forward_one_backward_keeps_few_microbatches_alive():
    stages, microbatches = 4, 12
    found = simulate(pipeline_graph([1.0] * stages, [2.0] * stages, microbatches))
    graph = found.graph
    for stage in range(stages):
        of_stage = graph.worker == stage
        begins = np.sort(found.start_s[of_stage & graph.of_kind("forward")])
        ends = np.sort(found.end_s[of_stage & graph.of_kind("backward")])
        alive = [np.sum(begins <= now) - np.sum(ends <= now) for now in begins]
        assert max(alive) == stages - stage


def test_the_slowest_stage_decides_a_long_pipeline():
    few, many = (simulate(pipeline_graph([1.0, 3.0, 1.0], [1.0, 3.0, 1.0], count)).step_s for count in (50, 100))
    assert many - few == pytest.approx(50 * 6.0)


def test_sends_between_stages_lengthen_the_fill_and_the_drain():
    plain, sent = (simulate(pipeline_graph([1.0] * 3, [1.0] * 3, 1, each)).step_s for each in (0.0, 0.5))
    assert sent - plain == pytest.approx(4 * 0.5)


def test_a_pipeline_needs_times_of_every_stage():
    with pytest.raises(InputError, match="2 forward, 1 backward"):
        pipeline_graph([1.0, 1.0], [1.0], 4)


@settings(max_examples=30, deadline=None)
@given(profiles(), st.integers(1, 5), st.integers(2, 16))
def test_local_sgd_pays_for_communication_every_h_steps(profile, local_steps, workers):
    cost = ring(workers, LINK)
    graph = local_sgd_graph(profile, workers, cost, local_steps)
    compute = profile.t_f_s + profile.t_b_s + profile.t_u_s
    average = cost.time_s(float(profile.parameter_bytes.sum()))
    expected = local_sgd_step_s(compute, average, local_steps)
    assert steady_step_s(graph) / local_steps == pytest.approx(expected, abs=1e-9)
    assert simulate(graph).step_s / local_steps == pytest.approx(expected, abs=1e-9)


def test_no_local_steps_are_refused():
    with pytest.raises(InputError, match="local_steps = 0"):
        local_sgd_graph(of_layers([1e6]), 2, AllReduce(0.0, 1e-9), 0)


# ------------------------------------------------------------------------------------------------------- frameworks


def test_the_four_frameworks_do_what_is_said_of_them():
    profile = of_layers([8e6] * 6, t_io_s=0.01, t_h2d_s=0.001)
    found = framework_schedules(8, LINK, request_s=1e-4)
    steps = {name: steady_s(step_graph(profile, each.schedule, each.exchange)) for name, each in found.items()}
    assert steps["caffe-mpi"] == pytest.approx(predict_step(profile, Schedule(prefetch=True), 8, LINK).step_s)
    assert steps["cntk"] == pytest.approx(
        predict_step(profile, Schedule("layers_after_backward", prefetch=True), 8, LINK).step_s
    )
    # what overlaps less is slower, and one server is the slowest at eight workers
    assert steps["caffe-mpi"] < steps["cntk"] < steps["tensorflow"]
    assert not any(each.checked for each in found.values())
    input_bound = replace(profile, t_io_s=1.0)
    for each in found.values():
        slow = steady_s(step_graph(input_bound, each.schedule, each.exchange))
        assert slow == pytest.approx(max(1.001, slow))


def test_sending_order_is_last_layer_first():
    profile = of_layers([1e6, 0.0, 3e6])
    exchange = ring_exchange(4, LINK)
    graph = step_graph(profile, Schedule(), exchange)
    sends = graph.of_kind("communicate")
    assert [graph.layers[layer] for layer in graph.layer[sends]] == ["layer2", "layer0"]
    np.testing.assert_allclose(graph.duration_s[sends], exchange.cost.time_s(sending_order(profile)[1]))
