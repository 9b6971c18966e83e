"""Are the adapters as fast as what the frameworks' users write? Example programs over adapters, in alternation."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from steptime import frameworks, networks
from steptime.measure.lock import measuring_lock

FOLDER = Path(frameworks.__file__).with_name("examples")
EXAMPLES = {"torch": "pytorch_lenet.py", "tensorflow": "tensorflow2_lenet.py", "jax": "jax_lenet.py"}
"""By setting."""
BATCH = 32
WARMUPS = 20
BLOCKS, STEPS = 8, 20
GOAL = 0.95


def example_ratios(pairs: int = 8, report: Callable[[str], None] = print) -> dict[str, dict[str, Any]]:
    """Example's step time over the adapter's for LeNet, by setting: ratio, its 95 % interval and whether that lies
    above GOAL.

    A pair is two fresh processes on one thread, one with the adapter and one with the example. They take turns in
    blocks of steps, who comes first alternates, and the pair's ratio is that of its median steps. The interval is
    Student's over the pairs' log ratios. Settings that are not installed are left out.
    """
    found = {}
    with measuring_lock():
        for setting, name in EXAMPLES.items():
            if frameworks.installed_version(setting) is None:
                report(f"{setting}: not installed")
                continue
            logs = np.log([_pair_ratio(setting, FOLDER / name) for _ in range(pairs)])
            half = stats.t.ppf(0.975, pairs - 1) * logs.std(ddof=1) / np.sqrt(pairs)
            ratio, lo, hi = (float(np.exp(logs.mean() + shift)) for shift in (0, -half, half))
            found[setting] = {"ratio": ratio, "lo": lo, "hi": hi, "pairs": pairs, "met": lo > GOAL}
            report(
                f"{setting}, LeNet, batch {BATCH}: example / adapter {ratio:.3f}, 95 % interval {lo:.3f} to {hi:.3f}, "
                f"{pairs} pairs (goal: above {GOAL}: {'met' if lo > GOAL else 'not met'})"
            )
    return found


def _pair_ratio(setting: str, example: Path) -> float:
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
            for side in ("adapter", "example") if block % 2 else ("example", "adapter"):
                samples = children[side].request("steps", count=STEPS)["samples"]
                children[side].request("settle")
                times_s[side] += [sample["time_s"] - sample["io_s"] for sample in samples]
    return float(np.median(times_s["example"]) / np.median(times_s["adapter"]))
