"""The roofline: what the machine's two peaks allow a layer, beside what it reached.

A layer that does `flops` operations on `bytes` of memory takes at least the longer of flops / peak and bytes /
bandwidth, so its rate is at most min(peak, intensity x bandwidth), intensity = flops / bytes (Williams, Waterman,
Patterson: Roofline, Communications of the ACM 52(4), 2009). Bytes are counted from the description, each value once, as
an unlimited cache would move them; a layer whose values are still in the cache can be faster than the copy's
bandwidth allows.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from steptime.core.machine import Machine
from steptime.core.network import BYTES_PER_VALUE, Layer, Network

PASSES = ("forward", "backward")
TOKEN_BYTES = 8
VIEWS = ("flatten",)
"""Kinds that move nothing: another shape of the same memory."""
COLUMNS = ["layer", "kind", "pass", "flops", "bytes", "intensity", "bound", "bound_s"]


def attainable_flops_per_s(intensity: np.ndarray | float, machine: Machine) -> np.ndarray:
    """min(peak, intensity x bandwidth) for intensities in FLOPs a byte."""
    return np.minimum(machine.peak_flops_per_s, np.asarray(intensity, float) * machine.memory_bytes_per_s)


def balance(machine: Machine) -> float:
    """FLOPs a byte at which arithmetic and memory take equally long: below it a layer is bound by memory."""
    return machine.peak_flops_per_s / machine.memory_bytes_per_s


def layer_bytes(layer: Layer, batch: int, dtype: str = "float32", needs_input_gradient: bool = True) -> tuple[int, int]:
    """Bytes of one mini-batch's forward and backward pass through `layer`, each value counted once.

    Forward: inputs, output and parameters. Backward: the output's gradient, the inputs and the parameters are read,
    the parameters' gradients and (where something before the layer is trained) the inputs' gradients written. An
    embedding reads the rows it looks up, not the table, but writes the whole table's gradient.
    """
    if layer.kind in VIEWS:
        return 0, 0
    size = BYTES_PER_VALUE[dtype]
    output = layer.activation_count * batch * size
    parameters = layer.parameter_count * size
    if layer.kind == "embedding":
        tokens = _values(layer) * batch * TOKEN_BYTES
        return tokens + 2 * output, tokens + output + parameters
    inputs = _values(layer) * batch * size
    forward = inputs + output + parameters
    return forward, output + inputs + 2 * parameters + inputs * needs_input_gradient


def layer_work(network: Network, batch: int, dtype: str, machine: Machine) -> pd.DataFrame:
    """FLOPs and bytes of every layer and pass of one step, and the least time that the machine's peaks allow.

    Columns: layer, kind, pass, flops, bytes, intensity (FLOPs a byte), bound ("arithmetic" or "memory"), bound_s.
    """
    rows = []
    for layer, needs in zip(network.layers, _needs_input_gradient(network), strict=True):
        flops = (layer.forward_flops * batch, layer.backward_flops * batch)
        for name, work, moved in zip(PASSES, flops, layer_bytes(layer, batch, dtype, needs), strict=True):
            arithmetic_s, memory_s = work / machine.peak_flops_per_s, moved / machine.memory_bytes_per_s
            bound = "arithmetic" if arithmetic_s >= memory_s and work else "memory"
            intensity = work / moved if moved else 0.0
            rows.append((layer.name, layer.kind, name, work, moved, intensity, bound, max(arithmetic_s, memory_s)))
    return pd.DataFrame(rows, columns=COLUMNS)


def roofline(network: Network, batch: int, dtype: str, machine: Machine, times: pd.DataFrame) -> pd.DataFrame:
    """What each layer reached, one row a layer and pass that takes time: `layer_work` with time_s and the rates.

    `times`: columns layer, forward_s, backward_s (one mini-batch). Adds time_s, flops_per_s, bytes_per_s,
    attainable_flops_per_s and `reached`, bound_s / time_s: 1 is the roof.
    """
    long = times[["layer", "forward_s", "backward_s"]].melt("layer", var_name="pass", value_name="time_s")
    long["pass"] = long["pass"].str.removesuffix("_s")
    table = layer_work(network, batch, dtype, machine).merge(long, on=["layer", "pass"])
    table = table[(table["time_s"] > 0) & (table["bytes"] > 0)].reset_index(drop=True)
    table["flops_per_s"] = table["flops"] / table["time_s"]
    table["bytes_per_s"] = table["bytes"] / table["time_s"]
    table["attainable_flops_per_s"] = attainable_flops_per_s(table["intensity"].to_numpy(), machine)
    table["reached"] = table["bound_s"] / table["time_s"]
    return table


def limits(
    network: Network, batch: int, dtype: str, machine: Machine, step_s: float, io_s: float = 0.0
) -> Mapping[str, float]:
    """Shares of a step of `step_s` seconds: what it spends at least on what, and the rest that no peak explains.

    `input`: reading, `io_s` (0 where it is hidden). `arithmetic` and `memory`: the least time of the layers that each
    of them bounds. `rest`: kernels slower than the peaks, and time between kernels. Shares add up to 1; the rest is
    negative where the caches beat the copy's bandwidth.
    """
    work = layer_work(network, batch, dtype, machine).groupby("bound")["bound_s"].sum()
    least = {"input": io_s, "arithmetic": float(work.get("arithmetic", 0.0)), "memory": float(work.get("memory", 0.0))}
    shares = {name: seconds / step_s for name, seconds in least.items()}
    return shares | {"rest": 1.0 - sum(shares.values())}


def _values(layer: Layer) -> int:
    """Values that come in, for one sample."""
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in layer.in_shapes)


def _needs_input_gradient(network: Network) -> list[bool]:
    """For each layer: is anything before it trained, so that its inputs' gradient is computed?"""
    trained: dict[str, bool] = {}
    needs = []
    for layer in network.layers:
        before = any(trained.get(name, False) for name in layer.inputs)
        needs.append(before)
        trained[layer.name] = before or bool(layer.parameters)
    return needs
