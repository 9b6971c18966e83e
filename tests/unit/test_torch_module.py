"""A torch module measured as it is: what is found in it, where planted times land, and what is said of the rest."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner

from steptime import frameworks
from steptime.cli import cli
from steptime.core.campaign import read_campaign
from steptime.core.errors import InputError
from steptime.core.workers import read_profile
from steptime.measure import Plan, lock, module_network
from steptime.measure.plan import Case
from steptime.measure.run import build
from steptime.measure.torch_module import ADAPTER, ROOT_NAME
from steptime.report.markup import faults

EXAMPLES = Path(frameworks.__file__).with_name("examples") / "own_modules.py"
INPUTS = {"transformer": ("16,64", "16,64"), "unet": ("3,32,32",), "tied": ("12:500",)}
PARAMETERS = {"transformer": 167_680, "unet": 57_205, "tied": 500 * 64 + 2 * 4 * 64 * 64 + 2 * 4 * 64}
"""Values that are trained, counted by hand."""

STRANGE = """
import time
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        time.sleep(0.03)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(0.06)
        return gradient


class Slowly(nn.Module):
    def forward(self, x):
        return Slow.apply(x)


class Between(nn.Module):
    '''What is slow stands between the modules that it calls, once, and in one of them, twice.'''

    def __init__(self):
        super().__init__()
        self.first, self.slow, self.last = nn.Linear(4, 4), Slowly(), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.slow(self.slow(Slow.apply(self.first(x)))))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.relu(self.first(x)))


class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).argmax(1)


def between(): return Between()
def in_place(): return InPlace()
def again(): return Again()
def whole(): return Whole()
def untrained(): return nn.ReLU()
def small(): return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
def no_module(): return 3
"""


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("strange") / "strange.py"
    path.write_text(STRANGE)
    return path


@pytest.fixture(scope="module")
def child() -> Iterator[frameworks.Child]:
    with frameworks.Child("torch", adapter=ADAPTER) as child:
        yield child


def built(child: frameworks.Child, target: str, inputs: tuple[str, ...], batch: int = 2) -> dict[str, Any]:
    network = module_network(target, inputs, Path("/"))
    case = Case("torch", network.name, "full", batch, "float32", "cpu", 1, "sequential")
    return build(child, case, Plan(), network)


@pytest.mark.parametrize("name", INPUTS)
def test_modules_that_nobody_prepared_are_described_and_profiled(child: frameworks.Child, name: str) -> None:
    answer = built(child, f"{EXAMPLES}:{name}", INPUTS[name])
    found = child.request("describe")
    names = [layer["name"] for layer in found["layers"]]
    assert len(set(names)) == len(names)
    assert set(answer["shapes"]) == set(names)
    sizes = {layer["name"]: sum(map(_size, layer["parameters"])) for layer in found["layers"]}
    unused = 7 if name == "tied" else 0
    assert sum(sizes.values()) == PARAMETERS[name] == answer["parameters"] - unused
    profile = child.request("profile", count=2)["samples"][1]
    timed = {layer["layer"]: layer for layer in profile["layers"]}
    assert set(timed) <= set(names)
    for layer, size in sizes.items():
        if size:
            assert timed[layer]["forward_s"] > 0, layer
            assert timed[layer]["backward_s"] > 0, layer
    whole_s = sum(layer["forward_s"] + layer["backward_s"] for layer in profile["layers"])
    assert whole_s < 10 * profile["parts"]["plain"]
    assert child.request("steps", count=3)["loss_last"] > 0
    assert set(child.request("phases", count=1)["samples"][0]) == {"h2d", "forward", "backward", "update", "io"}


def _size(parameter: dict[str, Any]) -> int:
    product = 1
    for length in parameter["shape"]:
        product *= length
    return product


def test_shared_and_forgotten_parameters_are_told(child: frameworks.Child) -> None:
    built(child, f"{EXAMPLES}:tied", INPUTS["tied"])
    found = child.request("describe")
    assert found["unused"] == ["forgotten"]
    assert found["tied"] == [["embedding.weight", "embedding", "head"]]
    own = {layer["name"]: [one["name"] for one in layer["parameters"]] for layer in found["layers"]}
    assert own["embedding"] == ["embedding.weight"], "its gradient is complete when backward has passed the embedding"
    assert own["head"] == []


def test_attention_owns_the_weights_that_it_reads_without_calling(child: frameworks.Child) -> None:
    built(child, f"{EXAMPLES}:transformer", INPUTS["transformer"])
    own = {layer["name"]: {one["name"] for one in layer["parameters"]} for layer in child.request("describe")["layers"]}
    attention = "encoder.layers.0.self_attn"
    assert f"{attention}.out_proj.weight" in own[attention]
    assert f"{attention}.out_proj" not in own


def test_planted_times_land_in_their_layers(child: frameworks.Child, strange: Path) -> None:
    """A sleep of 30 ms forward and 60 ms backward: once in the module's own code, twice in a layer that it calls twice.

    Lower bounds are the sleeps'; a layer that has none stays below one, in the calmest of some repetitions: whatever
    else runs on the machine only adds.
    """
    built(child, f"{strange}:between", ("4",))
    samples = child.request("profile", count=6)["samples"]
    rows = pd.DataFrame([layer for sample in samples for layer in sample["layers"]])
    layers = rows.groupby("layer").min().to_dict("index")
    assert layers["slow"]["forward_s"] >= 0.06
    assert layers["slow"]["backward_s"] >= 0.119
    assert 0.03 <= layers[ROOT_NAME]["forward_s"] < 0.06
    assert 0.059 <= layers[ROOT_NAME]["backward_s"] < 0.119
    for name in ("first", "last"):
        assert layers[name]["forward_s"] < 0.03
        assert layers[name]["backward_s"] < 0.06


def test_an_operation_in_place_is_a_layer_of_its_own(child: frameworks.Child, strange: Path) -> None:
    built(child, f"{strange}:in_place", ("4",))
    layers = {layer["layer"]: layer for layer in child.request("profile", count=3)["samples"][2]["layers"]}
    assert layers["relu"]["backward_s"] > 0
    assert layers["first"]["backward_s"] > 0


@pytest.mark.parametrize(
    ("name", "inputs", "reason"),
    [
        ("no_module", ("4",), r"no_module\(\) makes a int, not a torch.nn.Module"),
        ("missing", ("4",), "has no function 'missing'"),
        ("untrained", ("4",), "it has no trainable parameter: nothing to train"),
        ("small", ("5",), "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_what_cannot_be_built_is_one_line(
    child: frameworks.Child, strange: Path, name: str, inputs: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(frameworks.ChildError, match=reason) as caught:
        built(child, f"{strange}:{name}", inputs)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_trained_or_told_apart_is_one_line(child: frameworks.Child, strange: Path) -> None:
    built(child, f"{strange}:whole", ("4",))
    with pytest.raises(frameworks.ChildError, match="no tensor of floating-point numbers: nothing to train"):
        child.request("describe")
    built(child, f"{strange}:again", ("4",))
    assert child.request("steps", count=1)["loss_first"] > 0
    with pytest.raises(frameworks.ChildError, match="checkpointing") as caught:
        child.request("profile", count=1)
    assert caught.value.kind == "unsupported"


@pytest.mark.parametrize(
    ("target", "inputs", "words"),
    [
        ("nothing", ("3",), "must be module:function"),
        ("a:b", (), "--input: is missing"),
        ("a:b", ("3x4",), "must be the shape of one sample"),
        ("a:b", ("0,4",), "must be the shape of one sample"),
    ],
)
def test_bad_words_are_refused_before_anything_runs(target: str, inputs: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        module_network(target, inputs, Path())


def test_the_command_leaves_a_campaign_a_profile_a_prediction_and_a_page(
    strange: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.setattr(lock, "LOCK", tmp_path / "lock")
    monkeypatch.chdir(root)
    relative = os.path.relpath(strange, root)
    out = tmp_path / "out"

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli, ["measure", "--torch", *arguments], standalone_mode=False)

    done = run(f"{relative}:small", "--input", "4", "--batch", "8", "--rounds", "2", "--out", str(out))
    assert done.exception is None, done.output
    assert "a step takes" in done.output
    assert "modelled" in done.output
    campaign = read_campaign(out)
    assert list(campaign.runs["status"]) == ["finished"] * 2
    assert set(campaign.runs["network"]) == {"strange.small"}
    profile = read_profile(out / "profile.csv", "small", 8)
    assert profile.layers == (ROOT_NAME, "0", "1", "2")
    assert list(profile.parameter_bytes) == [0, 4 * 40, 0, 4 * 18]
    predictions = pd.read_csv(out / "predictions.csv")
    assert predictions.loc[predictions["workers"] == 1, "speed_up"].tolist() == [1.0] * 3
    assert faults(out, [out / "index.html"]) == []
    assert json.loads((out / "module.json").read_text())["target"].endswith("strange.py:small")
    for bad in (("--network", "lenet"), ("--batch", "4"), ("--dtype", "float32", "--dtype", "bfloat16")):
        found = run(f"{relative}:small", "--input", "4", "--batch", "8", *bad)
        assert isinstance(found.exception, InputError), bad
    assert isinstance(run(f"{relative}:missing", "--input", "4", "--batch", "8").exception, InputError)
