"""The profiled step is the step: the same training, with its layers timed inside."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from steptime import networks
from steptime.frameworks import Child, installed_version

BUILD = {"batch": 4, "threads": 1, "seed": 3, "learning_rate": 0.05}


@pytest.mark.parametrize("framework", ["torch", "torch_channels_last", "tensorflow"])
def test_a_profiled_step_trains_as_a_plain_one_and_names_all_layers(framework: str, tmp_path: Path) -> None:
    assert installed_version(framework)
    network = networks.build("googlenet", width=0.06, image=64)
    plain, profiled = tmp_path / "plain.npz", tmp_path / "profiled.npz"
    described = asdict(networks.build("lenet", size="quick"))
    with Child(framework) as child:
        child.request("build", network=described, **BUILD)
        child.request("steps", count=2)
        child.request("gradients", path=str(plain))
        child.request("build", network=described, **BUILD)
        child.request("profile", count=1)
        child.request("gradients", path=str(profiled))
        child.request("build", network=asdict(network), **BUILD)
        (sample,) = child.request("profile", count=2)["samples"][1:]
    with np.load(plain) as one, np.load(profiled) as other:
        assert all(np.allclose(one[name], other[name], rtol=1e-5, atol=1e-7) for name in one)
    layers, parts = sample["layers"], sample["parts"]
    assert [layer["layer"] for layer in layers] == [layer.name for layer in network.layers]
    trained = [layer.name for layer in network.layers if layer.parameters]
    by_name = {layer["layer"]: layer for layer in layers}
    assert all(by_name[name]["forward_s"] > 0 and by_name[name]["backward_s"] > 0 for name in trained)
    assert all(parts[name] > 0 for name in ("plain", "h2d", "loss", "update", "dispatch"))
    assert all(layer["forward_s"] >= 0 and layer["backward_s"] >= 0 for layer in layers)
