"""What every old framework's adapter is held to, beside torch's: a test file makes a subclass of `Checks`.

An old framework really trains here, in its own environment; where that is not made, its tests are skipped.
"""

import json
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np
import profiled
import psutil
import pytest

from steptime import networks
from steptime.core.network import Network
from steptime.frameworks import SETTINGS, Child, ChildError, child, installed_version
from steptime.networks import INPUT, Builder

TOLERANCE = 1e-4
"""Of the norm of a float32 tensor's difference over its norm."""

LAYERWISE_TOLERANCE = 1e-5

SEEDS = (5, 6, 7, 8)
"""Gradients have to agree at one of them, outputs at every one that is tried: see tests/unit/test_parity.py.

Batch norm makes kinks matter: at one seed in three a ReLU's input in Inception-v3 lies within a rounding of 0.
"""

LEARNING_RATE = 0.01
STEPS = 50

TINY: dict[str, dict[str, Any]] = {
    "mlp": {"width": 0.1},
    "lenet": {"width": 0.5},
    "alexnet": {"width": 0.1},
    "googlenet": {"width": 0.1, "depth": 1},
    "resnet50": {"width": 0.1, "depth": 1, "image": 64},
    "vgg16": {"width": 0.1},
    "vgg19": {"width": 0.1},
    "inception3": {"width": 0.1, "image": 107},
    "nin": {"width": 0.1, "image": 67},
    "fcn5": {"width": 0.05},
    "lstm": {"width": 0.1},
    "transformer": {"width": 0.1},
}

BATCH = {"resnet50": 8, "inception3": 8}
"""Batch norm over fewer values divides by variances that are mostly rounding."""


def patchwork() -> Network:
    """What the networks leave out: uneven padding, padded averages, pooling of negative values, joins, groups."""
    b = Builder((3, 17, 13))
    x = b.conv("conv", INPUT, 6, 3, stride=2, pad=(0, 2, 1, 0))
    left = b.conv("left", b.max_pool("max", x, 3, stride=2, pad=(1, 2, 2, 0)), 6, 3, groups=3, pad=1, bias=False)
    right = b.avg_pool("mean", b.lrn("lrn", x, size=3, alpha=0.5, k=2), 3, stride=2, pad=(1, 2, 2, 0))
    even = b.avg_pool("even_mean", b.max_pool("even_max", right, 3, pad=1), 3, pad=1)
    x = b.add("sum", left, right, even)
    x = b.concat("joined", x, left, b.batch_norm("bn", x))
    x = b.relu("relu", b.flatten("flatten", x))
    b.dense("last", b.relu("relu2", b.dense("fc", x, 11, bias=False)), 5)
    return b.network("patchwork", "quick")


NETWORKS = {**{name: networks.build(name, **TINY[name]) for name in networks.NAMES}, "patchwork": patchwork()}

LAYERWISE = """
import importlib.util, json, sys
import numpy as np
def load(path):
    spec = importlib.util.spec_from_file_location("loaded", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
worker, adapter = load(sys.argv[1]), load(sys.argv[2])
for network in json.load(sys.stdin):
    vocabulary, shape, classes = network["vocabulary"], network["input_shape"], network["classes"]
    if vocabulary:
        pool = worker.Tokens(shape, vocabulary, classes, 4, 1)
    else:
        pool = worker.Images(shape, classes, 4, 1, adapter.CHANNELS_LAST)
    trainer = adapter.build(network, worker.initial_weights(network, 1), 4, 1, 0.1, 1, "cpu", "float32", sys.argv[3])
    whole = trainer.gradients(*pool.first())
    found = trainer.arrays(trainer.layer_by_layer(*pool.first())[1])
    worst = max(np.linalg.norm(found[name] - whole[name]) / np.linalg.norm(whole[name]) for name in found)
    sys.stderr.write("\\n%d %g\\n" % (len(found), worst))
"""


def check_layer_by_layer(name: str, tried: Sequence[Network]) -> subprocess.CompletedProcess[str]:
    """Run the setting's adapter layer by layer, as it is timed, and compare the gradients with the whole network's.

    What its interpreter said is the answer, for a setting that is to refuse the networks.
    """
    setting = SETTINGS[name]
    command = [setting.interpreter, "-c", LAYERWISE, child.WORKER, setting.adapter, setting.mode]
    done = subprocess.run(
        list(map(str, command)),
        input=json.dumps([asdict(network) for network in tried]),
        text=True,
        capture_output=True,
        env=child._environment("cpu", 1) | setting.child_environment,
    )
    if done.returncode == 0:
        told = [line.split() for line in done.stderr.splitlines() if re.fullmatch(r"\d+ [-+.e\d]+", line)]
        assert [int(count) for count, _ in told] == [sum(len(layer.parameters) for layer in n.layers) for n in tried]
        assert max(float(worst) for _, worst in told) <= LAYERWISE_TOLERANCE
    return done


def built(process: Child, name: str, seed: int, path: Any) -> dict[str, Any]:
    """The answer to build, with the outputs and gradients at the weights and samples of `seed` as `arrays`."""
    settings = {"batch": BATCH.get(name, 4), "threads": 1, "seed": seed, "learning_rate": LEARNING_RATE}
    answer = process.request("build", network=asdict(NETWORKS[name]), **settings)
    process.request("gradients", path=str(path))
    with np.load(path) as arrays:
        return {**answer, "arrays": dict(arrays)}


def distances(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """Norm of the difference over the norm, per tensor."""
    assert {name: array.shape for name, array in ours.items()} == {name: array.shape for name, array in theirs.items()}
    norms = {name: float(np.linalg.norm(array.astype(np.float64))) for name, array in theirs.items()}
    assert min(norms.values()) > 0
    gaps = {name: float(np.linalg.norm(ours[name] - array.astype(np.float64))) for name, array in theirs.items()}
    return {name: gap / norms[name] for name, gap in gaps.items()}


class Checks:
    """`setting`: a key of SETTINGS; `version`: the framework's; `blas`: a word of what multiplies its matrices."""

    setting: str
    version: str
    blas: str
    unsupported: ClassVar[dict[str, str]] = {}
    """The networks that it cannot express, with words of the reason that it gives."""
    instruments = True
    """Whether its layers can be timed inside a whole step."""

    @pytest.fixture(scope="class")
    @classmethod
    def processes(cls) -> Iterator[tuple[Child, Child]]:
        """(torch, the old framework)."""
        cls.skip_unless_installed()
        with Child("torch") as torch, Child(cls.setting) as other:
            yield torch, other

    @classmethod
    def skip_unless_installed(cls) -> None:
        if installed_version(cls.setting) is None:
            pytest.skip(f"{cls.setting} is not installed: steptime env create {SETTINGS[cls.setting].environment}")

    def test_it_says_what_it_is(self, processes):
        versions = processes[1].request("hello")["versions"]
        assert versions["framework"] == self.version
        assert self.blas in versions["blas"]

    @pytest.mark.parametrize("name", NETWORKS)
    def test_it_is_the_same_network_and_learns(self, processes, tmp_path, name):
        """Parameters, shapes, outputs, loss, gradients are torch's; the loss falls; phases and layers are timed."""
        if name in self.unsupported:
            with pytest.raises(ChildError, match=self.unsupported[name]) as error:
                built(processes[1], name, SEEDS[0], tmp_path / "arrays.npz")
            assert error.value.kind == "unsupported"
            return
        network, worst = NETWORKS[name], {}
        parameters = {parameter.name for layer in network.layers for parameter in layer.parameters}
        for seed in SEEDS:
            theirs, ours = (built(process, name, seed, tmp_path / "arrays.npz") for process in processes)
            assert ours["parameters"] == network.parameter_count
            assert ours["shapes"] == {layer.name: list(layer.out_shape) for layer in network.layers}
            assert set(ours["arrays"]) == parameters | {"outputs", "loss"}
            found = distances(ours["arrays"], theirs["arrays"])
            assert max(found["outputs"], found["loss"]) <= TOLERANCE
            worst[seed] = max((distance, key) for key, distance in found.items())
            if worst[seed][0] <= TOLERANCE:
                break
        else:
            pytest.fail(f"the worst tensor at every seed: {worst}")
        losses = processes[1].request("steps", count=STEPS)
        assert losses["loss_last"] < losses["loss_first"]
        phases = processes[1].request("phases", count=6)["samples"]
        for sample in phases:
            assert set(sample) == {"io", "h2d", "forward", "backward", "update"}
            assert min(sample.values()) >= 0
        # A phase that is the difference of two calls is 0 where noise makes it negative, but not every time.
        assert min(max(sample[phase] for sample in phases) for phase in ("forward", "backward", "update")) > 0
        for repetition in processes[1].request("layers", count=2)["samples"]:
            assert [row["layer"] for row in repetition] == [layer.name for layer in network.layers]
            assert all(row["forward_s"] >= 0 and row["backward_s"] >= 0 for row in repetition)
            assert min(sum(row[key] for row in repetition) for key in ("forward_s", "backward_s")) > 0

    @pytest.mark.parametrize("name", ["patchwork", "lstm", "transformer"])
    def test_layers_run_one_by_one_are_the_same_backward(self, name):
        self.skip_unless_installed()
        done = check_layer_by_layer(self.setting, [NETWORKS[name]])
        if name in self.unsupported:
            assert "NotImplementedError" in done.stderr
            return
        assert done.returncode == 0, done.stderr

    def test_a_profiled_step_is_the_step(self, processes, tmp_path):
        if self.instruments:
            profiled.check(processes[1], tmp_path)
        else:
            processes[1].request("build", network=asdict(NETWORKS["lenet"]), **profiled.BUILD)
            with pytest.raises(ChildError, match="no instruments") as error:
                processes[1].request("profile", count=1)
            assert error.value.kind == "unsupported"

    def test_one_thread_keeps_to_one_core(self, processes, tmp_path):
        """Python hands over the next operation while one is computed: hence a fifth more than a core."""
        built(processes[1], "vgg16", SEEDS[0], tmp_path / "arrays.npz")
        samples = processes[1].request("steps", count=STEPS)["samples"]
        assert sum(sample["cpu_s"] for sample in samples) <= 1.2 * sum(sample["time_s"] for sample in samples)

    def test_an_idle_child_leaves_the_cores_alone(self, processes):
        processes[1].request("hello")
        time.sleep(0.2)  # threads that wait may look around a little before they sleep
        times = psutil.Process(processes[1].pid).cpu_times
        before, start = times(), time.monotonic()
        time.sleep(0.5)
        assert sum(times()[:2]) - sum(before[:2]) <= 0.1 * (time.monotonic() - start)

    def test_a_layer_that_it_does_not_know_is_an_answer(self, processes):
        network = json.loads(NETWORKS["lenet"].to_json())
        network["layers"][1]["kind"] = "capsule"
        with pytest.raises(ChildError, match="capsule") as error:
            processes[1].request("build", network=network, batch=2, threads=1, seed=1, learning_rate=0.1)
        assert error.value.kind == "unsupported"
