"""What the interference check makes of planted steps and windows, and the hog's own log."""

import os
import subprocess
import sys
import time

import pytest

from steptime.core.errors import InputError
from steptime.measure.interference import HOG, judge_interference, overlap

STEP_S = 0.010
WINDOWS = [(1.0, 2.0), (3.0, 3.5)]


def steps(missed: int = 0, false_alarms: int = 0, slow_down: float = 2.0) -> list[dict[str, float]]:
    """Four seconds of steps of 10 ms that take `slow_down` times as long beside the hog, and wait the difference.

    The first `missed` of those beside the hog show no delay; the first `false_alarms` of the others show one.
    """
    samples, ticks = [], 0  # of a tenth of a millisecond: sums stay exact
    while ticks < 40_000:
        now = ticks / 10_000
        hit = any(begin <= now < end for begin, end in WINDOWS)
        time_s = STEP_S * (slow_down if hit else 1)
        seen = (missed := missed - 1) < 0 if hit else (false_alarms := false_alarms - 1) >= 0
        samples.append({"start_s": now, "time_s": time_s, "run_delay_s": STEP_S if seen else 1e-5, "steal_s": 0.0})
        ticks += round(10_000 * time_s)
    return samples


def judged(*recorded: list[dict[str, float]]) -> tuple[dict, str]:
    lines: list[str] = []
    return judge_interference(recorded, [WINDOWS] * len(recorded), lines.append), "\n".join(lines)


def test_overlap_by_hand() -> None:
    samples = [{"start_s": start, "time_s": 1.0} for start in (0.0, 0.75, 1.5, 3.0, 4.0)]
    assert overlap(samples, [(1.0, 2.0), (3.0, 3.25), (3.5, 3.75)]).tolist() == pytest.approx([0, 0.75, 0.5, 0.5, 0])


def test_a_rule_that_sees_all_meets_its_goals() -> None:
    found, text = judged(steps(), steps())
    assert (found["found"], found["false_alarms"], found["met"]) == (1.0, 0.0, True)
    assert found["moved"] == pytest.approx(0, abs=1e-9)
    assert found["overlapped"] == 2 * 75
    assert text.count(": met") == 3


def test_missed_steps_are_counted_and_move_the_estimate() -> None:
    found, text = judged(steps(missed=30), steps(missed=30))
    assert found["found"] == pytest.approx(45 / 75)
    assert not found["met"]
    assert "not met" in text.splitlines()[0]
    far, text = judged(*[[{**step, "run_delay_s": 0.0} for step in steps(slow_down=1.1)]] * 2)
    assert far["found"] == 0
    everything, _ = judged(*[[{**step, "run_delay_s": 0.0} for step in steps(slow_down=1.1)][80:220]] * 2)
    assert everything["moved"] > 0.03, "most steps are beside the hog and none is left out"


def test_false_alarms_are_counted_and_steal_excuses() -> None:
    found, text = judged(steps(false_alarms=25), steps())
    assert found["false_alarms"] == pytest.approx(25 / found["calm"])
    assert "not met" in text.splitlines()[1]
    stolen = [{**step, "steal_s": 0.01 if step["start_s"] < 0.25 else 0.0} for step in steps()]
    found, _ = judged(stolen, steps())
    assert found["false_alarms"] == 0
    assert found["calm"] == 2 * 250 - 25


def test_a_hog_that_was_never_met_is_refused() -> None:
    with pytest.raises(InputError, match="0 met the hog"):
        judge_interference([steps()], [[]])


def test_the_hog_logs_windows_of_its_own() -> None:
    start = time.perf_counter()
    arguments = [sys.executable, str(HOG), str(max(os.sched_getaffinity(0))), "7", str(os.getpid())]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as hog:
        assert hog.stdout is not None
        assert hog.stdout.readline() == "ready\n"
        first = [float(field) for field in hog.stdout.readline().split()]
        hog.terminate()
    assert start < first[0] < first[1] < time.perf_counter()
    assert first[1] - first[0] >= 0.4
