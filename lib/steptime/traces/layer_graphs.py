"""Layer-profile graphs: per layer of each network its times, sizes and inputs, as profilers of pipeline planners write.

CSV with the columns network, index, layer, op, forward_s, backward_s, activation_bytes, parameter_bytes, inputs (names
of layers, separated by spaces). Seconds and bytes of one mini-batch.
"""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steptime.core.errors import InputError
from steptime.core.files import read_text
from steptime.core.step import LayerProfile

COLUMNS = (
    *("network", "index", "layer", "op", "forward_s", "backward_s"),
    *("activation_bytes", "parameter_bytes", "inputs"),
)
_NUMBERS = ("forward_s", "backward_s", "activation_bytes", "parameter_bytes")


def read_layer_graphs(path: Path, batch: int) -> dict[str, LayerProfile]:
    """The networks in a file, layers in an order in which each comes after its inputs; `batch` is what was profiled.

    Nodes whose op begins with "Input" are where data enter: their time is `t_io_s`, and they are no layers. Raises
    InputError naming line, column and value, or the node of a cycle.
    """
    if batch < 1:
        raise InputError(f"batch = {batch}: must be at least 1; say the batch that was profiled")
    rows = _rows(path)
    networks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        networks.setdefault(row["network"], []).append(row)
    return {name: _profile(path, name, nodes, batch) for name, nodes in networks.items()}


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        table = pd.read_csv(io.StringIO(read_text(path)), dtype=str, keep_default_na=False, skip_blank_lines=False)
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise InputError(f"{path}: is no table ({str(error).splitlines()[0]}); mend or remove the row") from None
    if not isinstance(table.index, pd.RangeIndex):
        raise InputError(f"{path}: line 2: has more fields than the header; mend or remove the row")
    if tuple(table.columns) != COLUMNS:
        wrong = next((name for name in table.columns if name not in COLUMNS), None)
        what = f"column {wrong!r} is not known" if wrong else "a column is missing or out of order"
        raise InputError(f"{path}: {what}; the columns are {', '.join(COLUMNS)}")
    if table.empty:
        raise InputError(f"{path}: has no rows; add at least one layer")
    rows: list[dict[str, Any]] = []
    seen: set[tuple[str, str]] = set()
    for line, row in enumerate(table.to_dict("records"), start=2):
        name = (row["network"].strip(), row["layer"].strip())
        if not all(name):
            raise InputError(f"{path}: line {line}: network or layer is empty; name it")
        if name in seen:
            raise InputError(f"{path}: line {line}: layer {name[1]!r} of {name[0]} is there twice; remove one")
        seen.add(name)
        numbers = {column: _number(path, line, column, row[column]) for column in _NUMBERS}
        inputs = row["inputs"].split()
        rows.append({"line": line, "network": name[0], "layer": name[1], "op": row["op"], "inputs": inputs, **numbers})
    return rows


def _number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1e15:
        raise InputError(f"{path}: line {line}: {column} = {text[:40]!r}: must be a number from 0 on; correct the row")
    return value


def _profile(path: Path, network: str, nodes: list[dict[str, Any]], batch: int) -> LayerProfile:
    ordered = _after_inputs(path, network, {node["layer"]: node for node in nodes})
    entering = [node for node in ordered if node["op"].startswith("Input")]
    layers = [node for node in ordered if not node["op"].startswith("Input")]
    if not layers:
        raise InputError(f"{path}: network {network} has inputs only; add its layers")
    forward, backward, activations, parameters = (np.array([node[name] for node in layers]) for name in _NUMBERS)
    return LayerProfile(
        network=network,
        source=str(path),
        batch=batch,
        layers=tuple(node["layer"] for node in layers),
        t_io_s=sum(node["forward_s"] + node["backward_s"] for node in entering),
        forward_s=forward,
        backward_s=backward,
        activation_bytes=activations,
        parameter_bytes=parameters,
    )


def _after_inputs(path: Path, network: str, nodes: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The nodes, each after its inputs; of those that are free, the first in the file first (Kahn's algorithm)."""
    for node in nodes.values():
        missing = next((name for name in node["inputs"] if name not in nodes), None)
        if missing is not None:
            where = f"{path}: line {node['line']}: inputs of {node['layer']!r}"
            raise InputError(f"{where}: {missing!r} is no layer of {network}; correct the name")
    order: list[dict[str, Any]] = []
    waiting = {name: set(node["inputs"]) for name, node in nodes.items()}
    users: dict[str, list[str]] = {}
    for name, inputs in waiting.items():
        for source in inputs:
            users.setdefault(source, []).append(name)
    free = [name for name, inputs in waiting.items() if not inputs]
    while free:
        name = free.pop(0)
        order.append(nodes[name])
        for user in users.get(name, []):
            waiting[user].discard(name)
            if not waiting[user]:
                free.append(user)
    if len(order) < len(nodes):
        done = {node["layer"] for node in order}
        cycle = _cycle({name: node["inputs"] for name, node in nodes.items() if name not in done})
        line = nodes[cycle[0]]["line"]
        raise InputError(
            f"{path}: line {line}: layer {cycle[0]!r} of {network} is in a cycle ({' <- '.join(cycle[:6])}"
            f"{' …' if len(cycle) > 6 else ''}); take out one of its inputs"
        )
    return order


def _cycle(inputs: dict[str, list[str]]) -> list[str]:
    """The nodes of one cycle; every node given has an input among them."""
    walked: list[str] = []
    name = next(iter(inputs))
    while name not in walked:
        walked.append(name)
        name = next(source for source in inputs[name] if source in inputs)
    return walked[walked.index(name) :]
