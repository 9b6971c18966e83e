"""What a profiled step has to be: the step, with its layers timed inside."""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from steptime import networks
from steptime.frameworks import Child

BUILD = {"batch": 4, "threads": 1, "seed": 3, "learning_rate": 0.001}


def check(child: Child, folder: Path) -> None:
    """It trains as a plain step does, and names all layers, what lies between them and the plain step's time."""
    plain, profiled = folder / "plain.npz", folder / "profiled.npz"
    described = asdict(networks.build("lenet", size="quick"))
    child.request("build", network=described, **BUILD)
    child.request("steps", count=3)
    child.request("gradients", path=str(plain))
    child.request("build", network=described, **BUILD)
    child.request("profile", count=1)
    child.request("steps", count=1)
    child.request("gradients", path=str(profiled))
    with np.load(plain) as one, np.load(profiled) as other:
        assert all(np.allclose(one[name], other[name], rtol=1e-5, atol=1e-7) for name in one)
    network = networks.build("alexnet", width=0.06, image=67)
    child.request("build", network=asdict(network), **BUILD)
    samples = child.request("profile", count=3)["samples"][1:]
    names = [layer.name for layer in network.layers]
    trained = [layer.name for layer in network.layers if layer.parameters]
    for sample in samples:
        layers, parts = sample["layers"], sample["parts"]
        assert [layer["layer"] for layer in layers] == names
        assert all(layer["forward_s"] >= 0 and layer["backward_s"] >= 0 for layer in layers)
        by_name = {layer["layer"]: layer for layer in layers}
        assert all(by_name[name]["forward_s"] > 0 and by_name[name]["backward_s"] > 0 for name in trained)
        assert {"plain", "h2d", "loss", "update", "dispatch"} <= set(parts)
        assert min(parts.values()) >= 0
        assert min(parts[name] for name in ("plain", "loss", "update")) > 0
