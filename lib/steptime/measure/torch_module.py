"""Measuring a torch module as it is: its layers are found in a child process, then it is a case like any other."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from steptime import frameworks
from steptime.core import statistics
from steptime.core.campaign import Campaign, read_campaign, write_campaign
from steptime.core.errors import InputError
from steptime.core.files import json_text
from steptime.core.network import Layer, Network, Parameter
from steptime.frameworks.settings import ADAPTERS
from steptime.measure.fingerprint import fingerprints, short_hash
from steptime.measure.lock import measuring_lock
from steptime.measure.plan import Case, Plan, read_plan
from steptime.measure.run import Run, Visit, build, campaign_of, measure_runs, with_stop_reason

ADAPTER = ADAPTERS / "torch_module.py"
FRAMEWORK = "torch"
ROOT_NAME = "(whole)"
"""The layer that is the module itself, as the adapter names it."""
_TARGET = re.compile(r"(?P<source>[\w./-]+\.py|\w+(\.\w+)*):(?P<name>\w+)")
_INPUT = re.compile(r"(?P<shape>[1-9]\d*(,[1-9]\d*)*)(:(?P<below>[1-9]\d*))?")


@dataclass(frozen=True)
class ModuleNetwork(Network):
    """A network that is a function's module: `module` is told to the adapter, and its layers are found by it."""

    module: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """What the child found of the module beside its layers: names of parameters that got no gradient, those that
    several layers use (name, layer, layer, ...), and how many values are not trained."""

    network: ModuleNetwork
    unused: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    frozen: int

    def lines(self) -> list[str]:
        """In words, a line each."""
        names = ", ".join(self.unused)
        lines = [f"{names}: no gradient reaches it: neither trained nor sent"] if self.unused else []
        lines += [
            f"{name}: shared by {', '.join(users)}; it is sent with {users[0]}, where its gradient is complete"
            for name, *users in self.tied
        ]
        return [*lines, f"{self.frozen:,} values are not trained"] if self.frozen else lines


def module_network(target: str, inputs: Sequence[str], folder: Path) -> ModuleNetwork:
    """The network that `target` (my_module:make_model, or a file: path/my_module.py:make_model) makes, not yet found.

    `inputs`: one text an argument of forward: the shape of one sample, e.g. 3,224,224, or 128:1000 for 128 whole
    numbers below 1000. The batch comes first. `folder`: where the module is looked for. Raises InputError for a text of
    another form.
    """
    said = _TARGET.fullmatch(target)
    if not said:
        raise InputError(f"measure: --torch = {target!r}: must be module:function or path/file.py:function")
    if not inputs:
        raise InputError("measure: --input: is missing; give the shape of one sample, e.g. --input 3,224,224")
    told: list[dict[str, Any]] = []
    for text in inputs:
        match = _INPUT.fullmatch(text)
        if not match:
            raise InputError(
                f"measure: --input = {text!r}: must be the shape of one sample, e.g. 3,224,224, or 128:1000 for whole "
                "numbers below 1000"
            )
        shape = [int(length) for length in match["shape"].split(",")]
        told.append({"shape": shape, "below": int(match["below"] or 0)})
    name = f"{Path(said['source']).stem}.{said['name']}".replace("-", "_")
    module = {"folder": str(folder.resolve()), "target": target, "inputs": told}
    return ModuleNetwork(name, "full", tuple(told[0]["shape"]), 0, (), told[0]["below"], module)


def measure_module(
    network: ModuleNetwork, values: Mapping[str, Any], out: Path, report: Callable[[str], None] = print
) -> tuple[Campaign, Found]:
    """Measure the module as a campaign of one case in `out`: whole steps, phases, and its layers in every round.

    `values`: batch, dtype, device, threads, and the keys of a Plan that say how often and how exactly. Beside
    runs.csv and samples.csv lies module.json: what was measured. Raises InputError where the module cannot be made, fed
    or trained: one line that says why.
    """
    values = dict(values)
    case = Case(
        FRAMEWORK, network.name, network.size, values.pop("batch"), values["dtypes"][0], values["devices"][0],
        values["threads"][0], "sequential",
    )  # fmt: skip
    # The plan says how to measure; which case it is, is said above.
    stand_in = {"frameworks": [FRAMEWORK], "networks": ["mlp"], "batch": {"mlp": case.batch}}
    plan = read_plan(stand_in | values, "measure")
    plan = plan.model_copy(update={"profile_rounds": plan.rounds})
    with measuring_lock():
        found = find_layers(network, case, plan)
        report(f"{len(found.network.layers)} layers found")
        runs, reason = _rounds(case, plan, network, report)
    if not any(run.is_finished for run in runs):
        raise InputError(f"measure: --torch = {network.module['target']!r}: {runs[-1].row['reason']}")
    told = {key: value for key, value in network.module.items() if key != "folder"}
    layers = [{"layer": layer.name, "kind": layer.kind, "parameters": layer.parameter_count} for layer in
              found.network.layers]  # fmt: skip
    beside = {"module.json": json_text({**told, "layers": layers, "remarks": found.lines()})}
    write_campaign(campaign_of([with_stop_reason(run, reason) for run in runs], out.name), out, beside)
    return read_campaign(out), found


def find_layers(network: ModuleNetwork, case: Case, plan: Plan) -> Found:
    """Build the module in a child and have it described. Raises InputError with the child's reason."""
    try:
        with frameworks.Child(FRAMEWORK, device=case.device, threads=case.threads, adapter=ADAPTER) as child:
            build(child, case, plan, network)
            answer = child.request("describe")
            # What keeps its layers from being timed is known before anything is measured.
            child.request("profile", count=1)
    except frameworks.ChildError as error:
        raise InputError(f"measure: --torch = {network.module['target']!r}: {error}") from None
    layers = tuple(
        Layer(
            name=layer["name"],
            kind=layer["kind"],
            inputs=(),
            in_shapes=(),
            out_shape=tuple(layer["out_shape"]),
            parameters=tuple(Parameter(one["name"], tuple(one["shape"])) for one in layer["parameters"]),
        )
        for layer in answer["layers"]
    )
    tied = tuple(tuple(names) for names in answer["tied"])
    return Found(replace(network, layers=layers), tuple(answer["unused"]), tied, answer["frozen"])


def _rounds(case: Case, plan: Plan, network: ModuleNetwork, report: Callable[[str], None]) -> tuple[list[Run], str]:
    """Fresh children of the case until it is known well enough, as in a campaign of many; and why that ended."""
    machine = fingerprints()
    fingerprint = short_hash([machine["machine"], machine[FRAMEWORK]])
    runs: list[Run] = []
    for number in range(plan.rounds):
        visit = Visit(case, number, 0, fingerprint)
        runs += [run for _, run in measure_runs([visit], plan, {case.network: network}, ADAPTER)]
        if not runs[-1].is_finished:
            return runs, "failure"
        times = [np.median([step["time_s"] for step in run.step_samples()]) for run in runs]
        report(f"round {number + 1}/{plan.rounds} run 1/1 {case.case_id}: {1e3 * times[-1]:.3g} ms")
        spent = sum(run.row["duration_s"] for run in runs)
        if number + 1 >= plan.min_rounds and statistics.settled(np.log(times), plan.target_half_width):
            return runs, "target"
        if number >= 1 and statistics.over_budget(spent, number + 1, plan.budget_s):
            return runs, "budget"
    return runs, "rounds"
