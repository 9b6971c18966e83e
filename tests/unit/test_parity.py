"""Parity before speed: every framework computes the described network, from the same weights and images."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import psutil
import pytest

from steptime import networks
from steptime.core.network import Network
from steptime.frameworks import SETTINGS, Child, ChildError, child, installed_version
from steptime.networks import INPUT, Builder

TOLERANCE = 1e-4
"""Of the norm of a float32 tensor's difference over its norm."""

BATCH = 8

SEEDS = (5, 6, 7)
"""Gradients have to agree at one of them, outputs at every one that is tried.

Two values of a max-pooling window, or a ReLU's input and 0, can lie within a rounding of each other (about one seed in
ten has such a pair among GoogLeNet's windows). There the gradient jumps: it goes to one value or to the other, the two
programs are both right, and no tolerance says anything. A wrong gradient is wrong at every seed.
"""


def patchwork() -> Network:
    """What the five networks leave out: uneven padding, padded averages, pooling of negative values, joins."""
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


NETWORKS = {**{name: networks.build(name) for name in networks.NAMES}, "patchwork": patchwork()}


class Answers:
    """What one framework said about every network, asked for once."""

    def __init__(self, process: Child, folder) -> None:
        self.process, self._folder, self._kept = process, folder, {}

    def __call__(self, name: str) -> dict:
        if name not in self._kept:
            answer = self.built(name, SEEDS[0])
            request = self.process.request
            answer["flops"] = request("flops")
            answer["losses"] = request("steps", count=24)
            answer["phases"] = request("phases", count=2)["samples"]
            answer["layers"] = request("layers", count=2)["samples"]
            self._kept[name] = answer
        return self._kept[name]

    def built(self, name: str, seed: int) -> dict:
        """The answer to build, and the outputs and gradients at the weights and images of `seed`."""
        path = self._folder / f"{name}.npz"
        settings = {"batch": BATCH, "threads": 1, "seed": seed, "learning_rate": 0.01}
        answer = self.process.request("build", network=asdict(NETWORKS[name]), **settings)
        self.process.request("gradients", path=str(path))
        with np.load(path) as arrays:
            return {**answer, "arrays": dict(arrays)}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> Iterator[dict[str, Answers]]:
    missing = [name for name in SETTINGS if installed_version(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    with Child("torch") as torch, Child("tensorflow") as tensorflow:
        processes = {"torch": torch, "tensorflow": tensorflow}
        yield {name: Answers(process, tmp_path_factory.mktemp(name)) for name, process in processes.items()}


def distances(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """Norm of the difference over the norm, per tensor."""
    assert {name: array.shape for name, array in ours.items()} == {name: array.shape for name, array in theirs.items()}
    norms = {name: np.linalg.norm(array.astype(np.float64)) for name, array in theirs.items()}
    assert min(norms.values()) > 0
    return {name: np.linalg.norm(ours[name] - array.astype(np.float64)) / norms[name] for name, array in theirs.items()}


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_and_gradients_agree(answers, name):
    parameters = {parameter.name for layer in NETWORKS[name].layers for parameter in layer.parameters}
    worst = {}
    for seed in SEEDS:
        torch, tensorflow = (
            (answer(name) if seed == SEEDS[0] else answer.built(name, seed))["arrays"] for answer in answers.values()
        )
        assert set(torch) == set(tensorflow) == parameters | {"outputs", "loss"}
        found = distances(torch, tensorflow)
        assert max(found["outputs"], found["loss"]) <= TOLERANCE
        worst[seed] = max((distance, key) for key, distance in found.items())
        if worst[seed][0] <= TOLERANCE:
            return
    pytest.fail(f"the worst tensor at every seed: {worst}")


@pytest.mark.parametrize("framework", SETTINGS)
@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_and_shapes_are_the_descriptions(answers, name, framework):
    answer = answers[framework](name)
    assert answer["parameters"] == NETWORKS[name].parameter_count
    assert answer["shapes"] == {layer.name: list(layer.out_shape) for layer in NETWORKS[name].layers}
    assert answer["arrays"]["outputs"].shape == (BATCH, NETWORKS[name].classes)


@pytest.mark.parametrize("framework", SETTINGS)
@pytest.mark.parametrize("name", NETWORKS)
def test_operations_are_the_frameworks_own_count(answers, name, framework):
    counted = answers[framework](name)["flops"]
    matrix = [layer for layer in NETWORKS[name].layers if layer.kind in ("conv", "dense")]
    assert counted["forward"] == sum(layer.forward_flops for layer in matrix)
    if framework == "torch" and all(layer.settings.get("groups", 1) == 1 for layer in matrix):
        assert counted["backward"] == sum(layer.backward_flops for layer in matrix)
    else:
        assert counted["backward"] is None


@pytest.mark.parametrize("framework", SETTINGS)
@pytest.mark.parametrize("name", NETWORKS)
def test_training_lowers_the_loss(answers, name, framework):
    losses = answers[framework](name)["losses"]
    assert losses["loss_last"] < losses["loss_first"]


@pytest.mark.parametrize("framework", SETTINGS)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_phase_and_layer_is_timed(answers, name, framework):
    answer = answers[framework](name)
    for sample in answer["phases"]:
        assert set(sample) == {"io", "h2d", "forward", "backward", "update"}
        assert min(sample.values()) >= 0
        assert sample["forward"] > 0
    for repetition in answer["layers"]:
        assert [row["layer"] for row in repetition] == [layer.name for layer in NETWORKS[name].layers]
        assert all(row["forward_s"] >= 0 and row["backward_s"] >= 0 for row in repetition)
        # a small layer may take no longer than the empty call that is taken off; all together do
        assert min(sum(row[key] for row in repetition) for key in ("forward_s", "backward_s")) > 0


# Runs an adapter layer by layer, as it is timed, and compares the gradients with those of the whole network.
LAYERWISE = """
import importlib.util, json, sys
import numpy as np
def load(path):
    spec = importlib.util.spec_from_file_location("loaded", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
worker, adapter = load(sys.argv[1]), load(sys.argv[2])
network = json.load(sys.stdin)
images = worker.Images(network["input_shape"], network["classes"], 4, 1, adapter.CHANNELS_LAST)
weights = worker.initial_weights(network, 1)
trainer = adapter.build(network, weights, 4, 1, 0.1, 1, "cpu")
whole = trainer.gradients(*images.first())
times, tensors = trainer.layer_by_layer(*images.first())
for name, values in trainer.arrays(tensors).items():
    assert np.linalg.norm(values - whole[name]) <= 1e-5 * np.linalg.norm(whole[name]), name
print(len(tensors))
"""


@pytest.mark.parametrize("framework", SETTINGS)
def test_layers_run_one_by_one_are_the_same_backward(framework):
    if installed_version(framework) is None:
        pytest.skip(f"not installed: {framework}")
    environment = child._environment("cpu", 1)
    command = [sys.executable, "-c", LAYERWISE, str(child.WORKER), str(SETTINGS[framework].adapter)]
    network = NETWORKS["patchwork"]
    done = subprocess.run(command, input=network.to_json(), text=True, capture_output=True, env=environment, check=True)
    assert int(done.stdout) == sum(len(layer.parameters) for layer in network.layers)


@pytest.mark.parametrize("framework", SETTINGS)
def test_an_idle_child_leaves_the_cores_alone(answers, framework):
    process = answers[framework].process
    process.request("hello")
    time.sleep(0.2)  # threads that wait may look around a little before they sleep
    times = psutil.Process(process.pid).cpu_times
    before, start = times(), time.monotonic()
    time.sleep(0.5)
    used = sum(times()[:2]) - sum(before[:2])
    assert used <= 0.1 * (time.monotonic() - start)


@pytest.mark.parametrize("framework", SETTINGS)
def test_a_layer_that_no_one_knows_is_one_line(answers, framework):
    network = json.loads(networks.build("lenet").to_json())
    network["layers"][1]["kind"] = "capsule"
    with pytest.raises(ChildError, match="capsule"):
        answers[framework].process.request("build", network=network, batch=2, threads=1, seed=1, learning_rate=0.1)
