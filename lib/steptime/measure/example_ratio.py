"""Are the adapters as fast as what the frameworks' users write? Example programs over adapters, in alternation."""

import os
import re
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from steptime import frameworks, networks
from steptime.frameworks import ChildError
from steptime.frameworks.environments import ENVIRONMENTS, environment_folder
from steptime.measure.lock import measuring_lock

FOLDER = Path(frameworks.__file__).with_name("examples")
EXAMPLES = {
    "torch": "pytorch_lenet.py",
    "tensorflow": "tensorflow2_lenet.py",
    "jax": "jax_lenet.py",
    "caffe": "caffe_lenet.prototxt",
}
"""By setting. Caffe's is timed by its own `caffe time`, which knows forward and backward only."""
BATCH = 32
WARMUPS = 20
BLOCKS, STEPS = 8, 20
GOAL = 0.95


def example_ratios(pairs: int = 8, report: Callable[[str], None] = print) -> dict[str, dict[str, Any]]:
    """Example's step time over the adapter's for LeNet, by setting: ratio, its 95 % interval and whether that lies
    above GOAL.

    A pair is two fresh processes on one thread, one with the adapter and one with the example. They take turns in
    blocks of steps, who comes first alternates, and the pair's ratio is that of its median steps; Caffe's is forward
    and backward by `caffe time` over the adapter's phases. The interval is Student's over the pairs' log ratios.
    Settings that are not installed are left out.
    """
    found = {}
    with measuring_lock():
        for setting, name in EXAMPLES.items():
            if frameworks.installed_version(setting) is None:
                report(f"{setting}: not installed")
                continue
            pair_ratio = _caffe_time_ratio if setting == "caffe" else _pair_ratio
            logs = np.log([pair_ratio(setting, FOLDER / name, number % 2) for number in range(pairs)])
            half = stats.t.ppf(0.975, pairs - 1) * logs.std(ddof=1) / np.sqrt(pairs)
            ratio, lo, hi = (float(np.exp(logs.mean() + shift)) for shift in (0, -half, half))
            found[setting] = {"ratio": ratio, "lo": lo, "hi": hi, "pairs": pairs, "met": lo > GOAL}
            report(
                f"{setting}, LeNet, batch {BATCH}: example / adapter {ratio:.3f}, 95 % interval {lo:.3f} to {hi:.3f}, "
                f"{pairs} pairs (goal: above {GOAL}: {'met' if lo > GOAL else 'not met'})"
            )
    return found


def _pair_ratio(setting: str, example: Path, example_first: int) -> float:
    network = asdict(networks.build("lenet"))
    times_s: dict[str, list[float]] = {"adapter": [], "example": []}
    with ExitStack() as stack:
        children = {
            "adapter": stack.enter_context(frameworks.Child(setting)),
            "example": stack.enter_context(frameworks.Child(setting, adapter=example)),
        }
        for child in children.values():
            child.request("build", network=network, batch=BATCH, threads=1, seed=1, learning_rate=0.01)
            child.request("steps", count=WARMUPS)
            child.request("settle")
        for block in range(BLOCKS):
            for side in ("adapter", "example") if (block + example_first) % 2 else ("example", "adapter"):
                samples = children[side].request("steps", count=STEPS)["samples"]
                children[side].request("settle")
                times_s[side] += [sample["time_s"] - sample["io_s"] for sample in samples]
    return float(np.median(times_s["example"]) / np.median(times_s["adapter"]))


def _caffe_time_ratio(setting: str, example: Path, example_first: int) -> float:
    """Mean forward + backward of `caffe time` over the mean of the adapter's, in processes one after the other.

    Means on both sides, since that is what `caffe time` prints; its first iterations are not left out, so both sides
    run many.
    """
    seconds = {}
    for side in ("example", "adapter") if example_first else ("adapter", "example"):
        seconds[side] = _caffe_time_s(example) if side == "example" else _caffe_adapter_s(setting)
    return seconds["example"] / seconds["adapter"]


def _caffe_time_s(example: Path) -> float:
    caffe = str(environment_folder("caffe") / "bin/caffe")
    command = [caffe, "time", f"-model={example}", f"-iterations={BLOCKS * STEPS}"]
    variables = {"OPENBLAS_NUM_THREADS": "1", "GLOG_minloglevel": "0", "GLOG_logtostderr": "1"}
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENTS["caffe"].variables() | variables, capture_output=True, text=True
    )
    found = re.search(r"Average Forward-Backward: ([\d.e+-]+) ms", done.stderr)
    if not found:
        raise ChildError(f"caffe time: no time in what it said; it ended with {done.returncode}")
    return float(found[1]) * 1e-3


def _caffe_adapter_s(setting: str) -> float:
    with frameworks.Child(setting) as child:
        network = asdict(networks.build("lenet"))
        child.request("build", network=network, batch=BATCH, threads=1, seed=1, learning_rate=0.01)
        phases = child.request("phases", count=BLOCKS * STEPS)["samples"]
    return float(np.mean([phase["forward"] + phase["backward"] for phase in phases]))
