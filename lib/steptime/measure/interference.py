"""Does the rule for disturbed steps see a disturbance? A hog beside the measured process says when it was there."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steptime import frameworks, networks
from steptime.core.errors import InputError
from steptime.core.statistics import counted
from steptime.measure.lock import measuring_lock
from steptime.measure.plan import Plan
from steptime.measure.run import build, disturbed

HOG = Path(__file__).with_name("hog.py")
OVERLAPPED = 0.10
"""A step that shares so much of its time with the hog counts as disturbed in truth."""
FOUND_GOAL, FALSE_ALARM_GOAL, MOVED_GOAL = 0.95, 0.02, 0.03
# Steps of some 10 ms: the scheduler takes turns of a few, so that whatever the hog overlaps it also delays.
_PLAN = Plan(frameworks=("torch",), networks=("lenet",), batch={"lenet": (64,)}, layer_samples=0, phase_samples=0)
Samples = Sequence[Mapping[str, Any]]


def interference(
    children: int = 5, steps: int = 400, seed: int = 1, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Times `children` fresh children beside a hog pinned to their core, and judges the rule by the hog's own log.

    The hog's windows are drawn from `seed`. Returns the figures of `judge_interference`. Raises InputError when another
    process is measuring.
    """
    if children < 2:
        raise InputError(f"children = {children}: an estimate needs processes; ask for at least 2")
    case, network = _PLAN.cases()[0], networks.build("lenet", size=_PLAN.size)
    core = max(os.sched_getaffinity(0))
    report(f"load before: {os.getloadavg()[0]:.2f}; other processes on the measured core count as false alarms")
    recorded, windows = [], []
    with measuring_lock():
        for number in range(children):
            with frameworks.Child(case.framework, device=case.device, cores=[core], threads=case.threads) as child:
                build(child, case, _PLAN, network)
                child.request("steps", count=_PLAN.warmups)
                hog = subprocess.Popen(
                    [sys.executable, str(HOG), str(core), str(1000 * seed + number), str(os.getpid())],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                assert hog.stdout is not None
                try:
                    # Its start takes the core, too, and is in no window.
                    hog.stdout.readline()
                    recorded.append(child.request("steps", count=steps)["samples"])
                    # A window is logged when it is over.
                    time.sleep(1.3)
                finally:
                    hog.terminate()
                    log, _ = hog.communicate()
            windows.append([tuple(map(float, line.split())) for line in log.splitlines()])
            report(f"{number + 1} of {children} children timed, {len(windows[-1])} windows of the hog")
    return judge_interference(recorded, windows, report)


def judge_interference(
    recorded: Sequence[Samples], windows: Sequence[Sequence[tuple[float, ...]]], report: Callable[[str], None] = print
) -> dict[str, Any]:
    """How the rule did on the steps of each child (`recorded`, with `start_s`) and the hog's (start, end) beside each.

    `found`: of the steps that the hog overlapped by OVERLAPPED or more, the share that the rule flags. `false_alarms`:
    of the steps without any hog and without steal, the share flagged; whatever else took the core then is among them.
    `moved`: the estimate over the same from the steps without hog alone, flagged among themselves, less 1.
    """
    hit: list[np.ndarray] = []
    free: list[np.ndarray] = []
    flags: list[np.ndarray] = []
    quiet: list[Samples] = []
    for samples, on in zip(recorded, windows, strict=True):
        shared = overlap(samples, on)
        stolen = np.array([sample.get("steal_s") or 0.0 for sample in samples]) > 0
        quiet.append([sample for sample, share in zip(samples, shared, strict=True) if share == 0])
        hit.append(shared >= OVERLAPPED)
        free.append((shared == 0) & ~stolen)
        flags.append(np.array(disturbed(samples)))
    overlapped, calm, flagged = (np.concatenate(masks) for masks in (hit, free, flags))
    if not overlapped.any() or not calm.any():
        raise InputError(
            f"steps = {len(overlapped)}: {overlapped.sum()} met the hog, {calm.sum()} neither hog nor steal; time more"
        )
    found, false_alarms = float(flagged[overlapped].mean()), float(flagged[calm].mean())
    moved = _estimate(recorded) / _estimate(quiet) - 1
    met = {"found": found >= FOUND_GOAL, "false_alarms": false_alarms <= FALSE_ALARM_GOAL}
    met["moved"] = abs(moved) < MOVED_GOAL
    words = {key: "met" if value else "not met" for key, value in met.items()}
    report(
        f"steps that the hog overlapped by {OVERLAPPED:.0%} or more: {found:.1%} of {overlapped.sum()} flagged "
        f"(goal: at least {FOUND_GOAL:.0%}: {words['found']})"
    )
    report(
        f"steps without hog or steal: {false_alarms:.1%} of {calm.sum()} flagged "
        f"(goal: at most {FALSE_ALARM_GOAL:.0%}: {words['false_alarms']})"
    )
    report(
        f"estimate beside the hog against its free windows: {moved:+.2%} (goal: within {MOVED_GOAL:.0%}: "
        f"{words['moved']})"
    )
    return {
        "found": found,
        "overlapped": int(overlapped.sum()),
        "false_alarms": false_alarms,
        "calm": int(calm.sum()),
        "moved": moved,
        "met": all(met.values()),
    }


def overlap(samples: Samples, windows: Sequence[tuple[float, ...]]) -> np.ndarray:
    """The share of each step's time that lies in windows (start, end), which do not overlap each other."""
    start = np.array([sample["start_s"] for sample in samples])
    length = np.array([sample["time_s"] for sample in samples])
    shared = np.zeros(len(start))
    for begin, end in windows:
        shared += np.clip(np.minimum(start + length, end) - np.maximum(start, begin), 0, None)
    return shared / length


def _estimate(recorded: Sequence[Samples]) -> float:
    """What a campaign makes of these children: the geometric mean of their median steps that count."""
    rows = [
        {"case_id": "", "run_id": number, "is_disturbed": flag, "s": sample["time_s"]}
        for number, samples in enumerate(recorded)
        for sample, flag in zip(samples, disturbed(samples), strict=True)
    ]
    steps = pd.DataFrame(rows)
    return float(np.exp(np.log(steps[counted(steps)].groupby("run_id")["s"].median()).mean()))
