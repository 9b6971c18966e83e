"""Memory of parallel training: ZeRO's and the recomputation paper's published figures, and what must not grow."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.model.parallelism import RECOMPUTE, SCHEDULES, Plan, Transformer
from steptime.model.training_memory import (
    SINGLE,
    layer_activations,
    model_states,
    outside_activations,
    peak_memory,
)

GPT3 = Transformer(layers=96, hidden=12288, heads=96, sequence=2048)
MT_NLG = Transformer(layers=105, hidden=20480, heads=128, sequence=2048)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_stages_of_the_published_model(stage, gigabytes):
    """Figure 1 of arXiv 1910.02054: 7.5 B parameters, 64 GPUs, mixed precision with Adam."""
    assert sum(model_states(7.5e9, 64, stage)) / 1e9 == pytest.approx(gigabytes, abs=0.051)


def test_single_precision_takes_as_much_as_mixed_without_the_copy():
    assert sum(model_states(1e9, 1, 0, SINGLE)) == 16e9


@pytest.mark.parametrize(("model", "attention", "saved"), [(GPT3, 80, 0.70), (MT_NLG, 64, 0.65)])
def test_attention_is_most_of_what_a_layer_keeps(model, attention, saved):
    """Sections 4.1 and 5 of arXiv 2205.05198."""
    unit = model.sequence * model.hidden
    everything = layer_activations(model, Plan())
    assert everything / unit == pytest.approx(34 + attention)
    kept = layer_activations(model, Plan(recompute="selective"))
    assert 1 - kept / everything == pytest.approx(saved, abs=0.006)


@pytest.mark.parametrize(
    ("plan", "bytes_a_value"),
    [
        (Plan(tensor=8), 10 + 24 / 8 + 80 / 8),
        (Plan(tensor=8, sequence_parallel=True), 34 / 8 + 80 / 8),
        (Plan(tensor=8, recompute="selective"), 10 + 24 / 8),
        (Plan(tensor=8, recompute="selective", sequence_parallel=True), 34 / 8),
        (Plan(tensor=8, recompute="full"), 2),
    ],
)
def test_a_layer_keeps_what_table_2_says(plan, bytes_a_value):
    assert layer_activations(GPT3, plan) / (2048 * 12288) == pytest.approx(bytes_a_value)


def test_both_techniques_save_five_times_what_tensor_parallelism_alone_keeps():
    """Section 6.1 of arXiv 2205.05198, 22 B, 175 B, 530 B and 1 T at 8-way tensor parallelism: a factor of five."""
    models = (Transformer(48, 6144, 64, 2048), GPT3, MT_NLG, Transformer(128, 25600, 160, 2048))
    for model in models:
        both = Plan(tensor=8, sequence_parallel=True, recompute="selective")
        assert round(float(layer_activations(model, Plan(tensor=8)) / layer_activations(model, both))) >= 5


def test_one_forward_one_backward_keeps_all_layers_whatever_the_stages():
    plan = Plan(micro_batches=64, tensor=8)
    kept = [peak_memory(GPT3, replace(plan, pipeline=stages)).layers for stages in (1, 2, 8, 32)]
    np.testing.assert_allclose(kept, kept[0])
    assert peak_memory(GPT3, replace(plan, pipeline=8, schedule="gpipe")).layers == pytest.approx(8 * kept[0])


def test_activations_outside_the_layers_are_small_where_the_paper_says():
    """Section 4.3 of arXiv 2205.05198: below 0.01 % for 22 B with one stage is its value without the logits."""
    model, plan = Transformer(48, 6144, 64, 2048), Plan(micro_batch=4, tensor=8, sequence_parallel=True)
    share = outside_activations(model, plan) / peak_memory(model, plan).layers
    per_layer = 34 + 5 * 64 * 2048 / 6144
    assert share == pytest.approx((1 + 4 * (1 + 51_200 / 6144)) / (48 * per_layer))


@given(
    plan=st.builds(
        Plan,
        micro_batch=st.integers(1, 8),
        micro_batches=st.integers(1, 64),
        data=st.integers(1, 64),
        tensor=st.sampled_from([1, 2, 4, 8]),
        pipeline=st.integers(1, 16),
        schedule=st.sampled_from(SCHEDULES),
        chunks=st.integers(1, 4),
        recompute=st.sampled_from(RECOMPUTE),
        sequence_parallel=st.booleans(),
    )
)
@settings(max_examples=200)
def test_each_measure_saves_and_parts_add_up(plan):
    stages = [peak_memory(GPT3, replace(plan, zero_stage=stage)) for stage in range(4)]
    totals = [memory.total for memory in stages]
    assert totals == sorted(totals, reverse=True)
    first = stages[0]
    assert first.total == pytest.approx(first.values + first.gradients + first.optimizer + first.layers + first.outside)
    assert first.states == pytest.approx(first.values * 8)
    again = [layer_activations(GPT3, replace(plan, recompute=kind)) for kind in RECOMPUTE]
    assert again == sorted(again, reverse=True)
    split = layer_activations(GPT3, replace(plan, sequence_parallel=True))
    assert split <= layer_activations(GPT3, replace(plan, sequence_parallel=False))
