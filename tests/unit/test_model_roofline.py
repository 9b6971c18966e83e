"""The roofline against closed forms: bytes and operations of single layers, the roof, and what limits a step."""

import numpy as np
import pandas as pd
import pytest

from steptime.core.machine import Machine
from steptime.model.roofline import attainable_flops_per_s, balance, layer_bytes, layer_work, limits, roofline
from steptime.networks import NAMES, Builder, build

MACHINE = Machine(
    name="m", device="cpu", cores=1, memory_bytes=1, peak_flops_per_s=1e11, memory_bytes_per_s=1e10, source="planted"
)


def test_the_roof_is_the_smaller_of_peak_and_slope_and_bends_at_the_balance() -> None:
    assert balance(MACHINE) == 10
    assert attainable_flops_per_s(np.array([1, 10, 100]), MACHINE) == pytest.approx([1e10, 1e11, 1e11])


def test_bytes_of_a_dense_layer() -> None:
    b = Builder((30,))
    b.dense("first", "input", 20)
    b.dense("second", "first", 10)
    first, second = b.network("n", "quick").layers
    # batch 7: inputs 210 values, output 140, parameters 620; the first layer's input has no gradient
    assert layer_bytes(first, 7, needs_input_gradient=False) == (4 * (210 + 140 + 620), 4 * (140 + 210 + 2 * 620))
    # inputs 140, output 70, parameters 210
    assert layer_bytes(second, 7) == (4 * (140 + 70 + 210), 4 * (70 + 140 + 2 * 210 + 140))
    assert layer_bytes(second, 7, "bfloat16")[0] == 2 * (140 + 70 + 210)


def test_work_of_a_network_knows_what_needs_no_input_gradient_and_which_peak_bounds() -> None:
    b = Builder((1000,))
    b.dense("dense", "input", 1000)
    b.relu("relu", "dense")
    table = layer_work(b.network("n", "quick"), 1000, "float32", MACHINE).set_index(["layer", "pass"])
    dense = table.loc[("dense", "forward")]
    assert dense["flops"] == 2 * 1000**3
    assert dense["bytes"] == 4 * (3 * 10**6 + 1000)
    assert (dense["bound"], dense["bound_s"]) == ("arithmetic", pytest.approx(2e9 / 1e11))
    assert table.loc[("dense", "backward"), "bytes"] == 4 * (2 * 10**6 + 2 * (10**6 + 1000))
    relu = table.loc[("relu", "forward")]
    assert (relu["bound"], relu["bound_s"]) == ("memory", pytest.approx(8e6 / 1e10))
    assert relu["intensity"] == pytest.approx(1 / 8)


def test_what_a_layer_reached_is_its_least_time_over_its_time() -> None:
    b = Builder((1000,))
    b.dense("dense", "input", 1000)
    times = pd.DataFrame({"layer": ["dense"], "forward_s": [0.04], "backward_s": [0.0], "time_s": [9.0]})
    table = roofline(b.network("n", "quick"), 1000, "float32", MACHINE, times)
    (row,) = table.to_dict("records")  # a pass that took no time is not there
    assert row["flops_per_s"] == pytest.approx(5e10)
    assert row["reached"] == pytest.approx(0.5)
    assert row["attainable_flops_per_s"] == 1e11


def test_limits_add_up_and_name_the_rest() -> None:
    b = Builder((1000,))
    b.dense("dense", "input", 1000)
    b.relu("relu", "dense")
    network = b.network("n", "quick")
    shares = limits(network, 1000, "float32", MACHINE, step_s=0.1, io_s=0.01)
    # dense: 2 + 2 GFLOP (weight gradient only); relu: 8 MB forward, 12 MB backward
    assert shares["arithmetic"] == pytest.approx(0.04 / 0.1)
    assert shares["memory"] == pytest.approx(2e-3 / 0.1)
    assert shares["input"] == pytest.approx(0.1)
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.parametrize("name", NAMES)
def test_every_network_has_work_and_only_views_move_nothing(name: str) -> None:
    network = build(name)
    table = layer_work(network, 2, "float32", MACHINE)
    assert table["flops"].sum() == 2 * (network.forward_flops + network.backward_flops)
    assert set(table.loc[table["bytes"] == 0, "kind"]) <= {"flatten"}


def test_an_embedding_reads_rows_and_writes_the_table_s_gradient() -> None:
    layer = next(layer for layer in build("lstm").layers if layer.kind == "embedding")
    rows, table = layer.activation_count, layer.parameter_count
    (steps,) = layer.in_shapes[0]
    forward, backward = layer_bytes(layer, 3)
    assert forward == 3 * (8 * steps + 2 * 4 * rows)
    assert backward == 3 * (8 * steps + 4 * rows) + 4 * table
