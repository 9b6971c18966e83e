"""Parallel steps: published sizes and fractions, pipelines run task by task, limits."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.model import parallelism
from steptime.model.megatron import PRIOR_RATES
from steptime.model.parallelism import Plan, Rates, Transformer, bubble_fraction, in_flight, predict
from steptime.model.schedules import pipeline_graph
from steptime.model.simulator import simulate

# Layers, hidden size, heads, billions of parameters: table 1 of arXiv 2104.04473 (sequence 2048, vocabulary 51,200).
PUBLISHED = [
    (24, 2304, 24, 1.7),
    (30, 3072, 32, 3.6),
    (36, 4096, 32, 7.5),
    (40, 6144, 48, 18.4),
    (48, 8192, 64, 39.1),
    (60, 10240, 80, 76.1),
    (80, 12288, 96, 145.6),
    (96, 16384, 128, 310.1),
    (105, 20480, 128, 529.6),
    (128, 25600, 160, 1008.0),
]
MODEL = Transformer(layers=48, hidden=6144, heads=64, sequence=2048)


@pytest.mark.parametrize(("layers", "hidden", "heads", "billions"), PUBLISHED)
def test_parameters_are_the_published_ones(layers, hidden, heads, billions):
    assert Transformer(layers, hidden, heads, 2048).parameters / 1e9 == pytest.approx(billions, abs=0.051)


def test_operations_follow_equation_3_with_full_recomputation():
    samples, h, s, length, v = 1536, 8192, 2048, 48, 51_200
    expected = 96 * samples * s * length * h**2 * (1 + s / (6 * h) + v / (16 * length * h))
    model = Transformer(length, h, 64, s, v)
    assert model.step_flops(samples, "full") == pytest.approx(expected, rel=1e-12)
    assert model.step_flops(samples) < model.step_flops(samples, "selective") < expected


@pytest.mark.parametrize(("layers", "hidden", "heads", "percent"), [(96, 12288, 96, 2.7), (105, 20480, 128, 1.6)])
def test_selective_recomputation_adds_a_third_of_the_published_share(layers, hidden, heads, percent):
    """Section 5 of arXiv 2205.05198 counts s / 6h more, which is forward and backward of the attention; what is run
    again is its forward pass alone."""
    model = Transformer(layers, hidden, heads, 2048)
    added = model.step_flops(1, "selective") / model.step_flops(1) - 1
    assert 100 * 3 * added == pytest.approx(percent, abs=0.06)


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 16])
def test_the_bubble_is_that_of_the_pipeline_run_task_by_task(stages, micro_batches):
    forward_s, backward_s = 1.0, 2.0
    ran = simulate(pipeline_graph([forward_s] * stages, [backward_s] * stages, micro_batches)).step_s
    useful = micro_batches * (forward_s + backward_s)
    assert ran / useful - 1 == pytest.approx(bubble_fraction(stages, micro_batches), abs=1e-9)


def run_in_order(stages: int, micro_batches: int, orders: list[list[tuple[str, int]]]) -> tuple[float, list[int]]:
    """A pipeline whose stages work through `orders`, forward 1 s and backward 2 s: its end, and the most micro batches
    of each stage that were run forward and not yet backward."""
    ends: dict[tuple[str, int, int], float] = {}
    free, done, kept = [0.0] * stages, [0] * stages, [0] * stages
    while any(done[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while done[stage] < len(orders[stage]):
                kind, number = orders[stage][done[stage]]
                needs = (kind, stage - 1, number) if kind == "f" else (kind, stage + 1, number)
                outside = needs[1] in (-1, stages)
                if not outside and needs not in ends:
                    break
                start = max(free[stage], 0.0 if outside else ends[needs])
                free[stage] = ends[kind, stage, number] = start + (1.0 if kind == "f" else 2.0)
                done[stage] += 1
                so_far = [order[0] for order in orders[stage][: done[stage]]]
                kept[stage] = max(kept[stage], so_far.count("f") - so_far.count("b"))
    return max(free), kept


def gpipe(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    return [("f", n) for n in range(micro_batches)] + [("b", n) for n in range(micro_batches)]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    ahead = min(stages - 1 - stage, micro_batches)
    order = [("f", n) for n in range(ahead)]
    for n in range(micro_batches):
        order += ([("f", ahead + n)] if ahead + n < micro_batches else []) + [("b", n)]
    return order


@pytest.mark.parametrize(("schedule", "order"), [("gpipe", gpipe), ("1f1b", one_forward_one_backward)])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (4, 2), (4, 4), (3, 8)])
def test_micro_batches_in_flight_are_those_of_the_order_played_out(schedule, order, stages, micro_batches):
    end, kept = run_in_order(stages, micro_batches, [order(s, stages, micro_batches) for s in range(stages)])
    assert kept == [in_flight(schedule, stages, micro_batches, stage) for stage in range(stages)]
    assert end == pytest.approx(3 * micro_batches * (1 + bubble_fraction(stages, micro_batches)))


def test_interleaving_divides_the_bubble_and_keeps_more():
    assert bubble_fraction(8, 16, 4) == pytest.approx(7 / 64)
    assert in_flight("interleaved", 8, 64, chunks=4) == pytest.approx(8 * (1 + 7 / 32))
    assert in_flight("interleaved", 8, 4, chunks=4) == 4


def test_zero_sends_as_much_as_plain_data_parallelism_up_to_stage_2():
    values = [float(parallelism.data_parallel_values(1e9, 1_000_000, stage)) for stage in range(4)]
    assert values == pytest.approx([2e9, 2e9, 2e9, 3e9], rel=1e-5)
    assert parallelism.data_parallel_values(1e9, 1, 3) == 0
    assert parallelism.data_parallel_values(1e9, 2, 2, 4) == pytest.approx(5e9 / 2)


def test_tensor_parallelism_sends_four_all_reduces_a_layer():
    output = 2 * 4 * 2048 * 6144
    assert parallelism.tensor_bytes(MODEL, Plan(micro_batch=4, tensor=8)) == pytest.approx(4 * 2 * 7 / 8 * output)
    assert parallelism.tensor_bytes(MODEL, Plan(micro_batch=4)) == 0
    again = parallelism.tensor_bytes(MODEL, Plan(micro_batch=4, tensor=8, recompute="full"))
    assert again == pytest.approx(6 * 2 * 7 / 8 * output)


def test_a_step_of_products_alone_takes_their_operations_over_the_rate_and_the_bubble():
    least = {field.name: 1e-12 if field.name.endswith("_s") else 1e-9 for field in fields(Rates)}
    fast = {name: 1e30 for name in least if name.endswith("per_s")}
    rates = Rates(**(least | fast | {"flops_per_s": 1e12, "attention_flops_per_s": 1e12, "overlap": 8.0}))
    rates = replace(rates, head_slowdown=1.0, split_overlap=8.0)
    model = Transformer(layers=8, hidden=1024, heads=16, sequence=512, vocabulary=0)
    plan = Plan(micro_batch=2, micro_batches=6, pipeline=4)
    step = predict(model, plan, rates)
    useful = model.step_flops(12) / 1e12 / 4
    assert step.total_s == pytest.approx(useful * (1 + bubble_fraction(4, 6)), rel=1e-6)
    full = predict(model, replace(plan, recompute="full"), rates)
    assert full.total_s / step.total_s == pytest.approx(4 / 3, rel=1e-6)
    assert predict(model, replace(plan, chunks=2), rates).bubble_s == pytest.approx(step.bubble_s / 2, rel=1e-6)


plans = st.builds(
    Plan,
    micro_batch=st.integers(1, 16),
    micro_batches=st.integers(1, 64),
    data=st.integers(1, 64),
    tensor=st.sampled_from([1, 2, 4, 8, 16]),
    pipeline=st.integers(1, 16),
    zero_stage=st.sampled_from(parallelism.ZERO_STAGES),
    recompute=st.sampled_from(parallelism.RECOMPUTE),
    sequence_parallel=st.booleans(),
)


@given(plans, st.sampled_from([field.name for field in fields(Rates)]))
@settings(max_examples=200)
def test_every_part_is_finite_and_faster_machines_are_not_slower(plan, name):
    step = predict(MODEL, plan, PRIOR_RATES)
    parts = [getattr(step, field.name) for field in fields(step)]
    assert all(np.isfinite(part) and part >= 0 for part in parts)
    worse = 0.5 if name.endswith("per_s") or "overlap" in name else 2.0
    slower = replace(PRIOR_RATES, **{name: max(getattr(PRIOR_RATES, name) * worse, 1.0 if "overlap" in name else 0)})
    assert predict(MODEL, plan, slower).total_s >= step.total_s * (1 - 1e-12)


@given(st.lists(plans, min_size=1, max_size=4))
@settings(max_examples=30)
def test_arrays_are_the_numbers_one_by_one(listed):
    names = [field.name for field in fields(Plan)]
    together = Plan(**{name: np.array([getattr(plan, name) for plan in listed]) for name in names})
    alone = [predict(MODEL, plan, PRIOR_RATES).total_s for plan in listed]
    np.testing.assert_allclose(predict(MODEL, together, PRIOR_RATES).total_s, alone, rtol=1e-12)
