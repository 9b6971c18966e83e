"""H2O 3.46, really run: inference only, multi-layer perceptrons only."""

from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import psutil
import pytest
import vintage

from steptime.frameworks import SETTINGS, Child, ChildError, installed_version

SETTINGS_OF_BUILD = {"batch": 4, "threads": 1, "seed": 5, "learning_rate": 0.01}


@pytest.fixture
def process() -> Iterator[Child]:
    if installed_version("h2o") is None:
        pytest.skip(f"h2o is not installed: steptime env create {SETTINGS['h2o'].environment}")
    with Child("h2o") as child:
        yield child


def test_it_scores_the_same_perceptron_and_trains_none(process, tmp_path):
    network = vintage.NETWORKS["mlp"]
    assert process.request("hello")["inference_only"]
    with Child("torch") as torch:
        theirs = vintage.built(torch, "mlp", 5, tmp_path / "torch.npz")["arrays"]
    answer = process.request("build", network=asdict(network), **SETTINGS_OF_BUILD)
    assert answer["parameters"] == network.parameter_count
    assert answer["shapes"] == {layer.name: list(layer.out_shape) for layer in network.layers}
    process.request("gradients", path=str(tmp_path / "h2o.npz"))
    with np.load(tmp_path / "h2o.npz") as ours:
        assert set(ours) == {"outputs", "loss"}
        found = vintage.distances(dict(ours), {name: theirs[name] for name in ours})
    assert max(found.values()) <= vintage.TOLERANCE
    (sample,) = process.request("phases", count=1)["samples"]
    assert set(sample) == {"io", "h2d", "forward"}
    assert min(sample["h2d"], sample["forward"]) > 0
    with pytest.raises(ChildError, match="inference only") as error:
        process.request("steps", count=1)
    assert error.value.kind == "unsupported"
    (server,) = psutil.Process(process.pid).children()
    process.close()
    psutil.wait_procs([server], timeout=10)
    assert not server.is_running()


@pytest.mark.parametrize(("name", "reason"), [("fcn5", "sigmoid"), ("lenet", "no conv")])
def test_what_it_cannot_express_is_an_answer(process, name, reason):
    with pytest.raises(ChildError, match=reason) as error:
        process.request("build", network=asdict(vintage.NETWORKS[name]), **SETTINGS_OF_BUILD)
    assert error.value.kind == "unsupported"
