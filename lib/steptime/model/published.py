"""The published measurements in data/published that are tables: read, checked, and turned into the model's types."""

from pathlib import Path

import pandas as pd
import pandera.pandas as pa

from steptime.core.campaign import read_table
from steptime.core.errors import InputError
from steptime.core.step import LayerProfile
from steptime.model.collectives import Curve, Piecewise
from steptime.model.fitting import fit_all_reduce, profile_from_table

_SECONDS = pa.Column(float, pa.Check.ge(0), coerce=True)
_COUNT = pa.Column(int, pa.Check.ge(0))
LAYERS = pa.DataFrameSchema(
    {
        "nodes": _COUNT,
        "layer": _COUNT,
        "tensor": _COUNT,
        "parameter_bytes": _COUNT,
        "layer_backward_s": _SECONDS,
        "tensor_comm_s": _SECONDS,
    },
    strict=True,
)
STEPS = pa.DataFrameSchema(
    {
        "network": pa.Column(str),
        "schedule": pa.Column(str),
        "nodes": _COUNT,
        "batch_per_node": _COUNT,
        "step_time_s": _SECONDS,
    },
    strict=True,
)
ALL_REDUCE = pa.DataFrameSchema({"nodes": _COUNT, "n_bytes": _COUNT, "time_s": _SECONDS}, strict=True)
POSEIDON = pa.DataFrameSchema(
    {"system": pa.Column(str), "nodes": _COUNT, "seconds_per_20_steps": _SECONDS}, strict=True
)

SWITCH_BYTES = 522_240
"""Where MPI changes its all-reduce algorithm on those nodes: at 8 nodes the times jump by half between the measured
sizes 520,192 and 524,288; B-Caffe's own predictor has two line pieces that part there too."""
SMALLEST_BYTES = 8 * 1024
"""Smaller messages are left out of the fits: latency there falls below the line, and they carry no gradient of note."""


def bcaffe_steps(folder: Path) -> pd.DataFrame:
    """Measured step times of B-Caffe: network, schedule, nodes, batch_per_node, step_time_s."""
    return read_table(Path(folder) / "bcaffe_measured_steps.csv", STEPS)


def bcaffe_layers(folder: Path, nodes: int) -> pd.DataFrame:
    """B-Caffe's log of GoogLeNet at 2, 4 or 8 nodes, one row a learnable layer in forward order.

    Columns: layer, backward_s, parameter_bytes, comm_s (its tensors' all-reduces, measured). Raises InputError for
    another number of nodes.
    """
    path = Path(folder) / "bcaffe_googlenet_layers.csv"
    table = _of_nodes(read_table(path, LAYERS), nodes, path)
    return table.groupby("layer", as_index=False).agg(
        backward_s=("layer_backward_s", "first"),
        parameter_bytes=("parameter_bytes", "sum"),
        comm_s=("tensor_comm_s", "sum"),
    )


def bcaffe_profile(folder: Path, nodes: int) -> LayerProfile:
    """The layer profile in that log; forward, input and update together are the rest of the measured one-node step."""
    steps = bcaffe_steps(folder)
    one = steps[(steps["network"] == "GoogLeNet") & (steps["schedule"] == "WFBP") & (steps["nodes"] == 1)].iloc[0]
    return profile_from_table(
        bcaffe_layers(folder, nodes),
        network="googlenet",
        source=f"B-Caffe log, {nodes} nodes",
        batch=int(one["batch_per_node"]),
        step_s=float(one["step_time_s"]),
    )


def bcaffe_all_reduce(folder: Path, nodes: int) -> Piecewise:
    """MPI all-reduce on the same nodes (OSU benchmark): two fitted lines, below and above the change of algorithm."""
    path = Path(folder) / "bcaffe_osu_allreduce.csv"
    table = _of_nodes(read_table(path, ALL_REDUCE), nodes, path)
    table = table[table["n_bytes"] >= SMALLEST_BYTES]
    small, large = table[table["n_bytes"] < SWITCH_BYTES], table[table["n_bytes"] >= SWITCH_BYTES]
    return Piecewise(
        fit_all_reduce(small["n_bytes"].to_numpy(), small["time_s"].to_numpy()),
        fit_all_reduce(large["n_bytes"].to_numpy(), large["time_s"].to_numpy()),
        SWITCH_BYTES,
    )


def bcaffe_curve(folder: Path, nodes: int) -> Curve:
    """The same benchmark as measured, 4 B to 1 MiB, without a fit; larger messages by the upper of the two lines."""
    path = Path(folder) / "bcaffe_osu_allreduce.csv"
    table = _of_nodes(read_table(path, ALL_REDUCE), nodes, path).sort_values("n_bytes")
    large = bcaffe_all_reduce(folder, nodes).large
    return Curve(tuple(table["n_bytes"].astype(float)), tuple(table["time_s"]), large)


def poseidon_scaling(folder: Path) -> pd.DataFrame:
    """Seconds of 20 steps of VGG19-22K by system (caffe: plain, on one node) and nodes, 40 Gbit/s Ethernet.

    From safpla/autoLoss (commit 4cc6ddb), utils/lineplot.py, the figure of Poseidon's authors. Columns: system, nodes,
    seconds_per_20_steps.
    """
    return read_table(Path(folder) / "poseidon_scaling.csv", POSEIDON)


def _of_nodes(table: pd.DataFrame, nodes: int, path: Path) -> pd.DataFrame:
    if nodes not in set(table["nodes"]):
        known = ", ".join(str(number) for number in sorted(set(table["nodes"])))
        raise InputError(f"{path}: nodes = {nodes}: was not measured; there are {known}")
    return table[table["nodes"] == nodes]
