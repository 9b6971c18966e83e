"""The gap between a step and its layers, on planted campaigns whose parts are known."""

import numpy as np
import pandas as pd
import pytest

from steptime.core.campaign import SAMPLES, Campaign, as_table
from steptime.core.gap import gap_table, gaps

STEP_S = 0.010


def rows(phase: str, times_s: list[float], layer: str | None = None, run: str = "a-r0") -> list[dict]:
    """The repetitions of one phase or part; the first one is a warm-up a thousand times as long."""
    return [
        {"run_id": run, "phase": phase, "layer": layer, "repeat": repeat, "is_warmup": repeat == 0, "time_s": time_s}
        for repeat, time_s in enumerate([1000 * times_s[0], *times_s])
    ]


def campaign(samples: list[dict]) -> Campaign:
    filled = as_table([{"is_disturbed": False} | sample for sample in samples], SAMPLES)
    runs = sorted({sample["run_id"] for sample in samples})
    return Campaign("planted", pd.DataFrame({"run_id": runs, "case_id": [run.split("-")[0] for run in runs]}), filled)


def profiled(factors: list[float], plain_s: float, run: str = "a-r0") -> list[dict]:
    """Profiled steps of 11 ms: two layers of 4 and 3 ms, 2 ms of dispatch, 1 of update, and half of copy and loss."""
    parts = {"dispatch": 0.002, "update": 0.001, "h2d": 0.0005, "loss": 0.0005}
    found = rows("profiled", [plain_s] * len(factors), "plain", run)
    for name, seconds in parts.items():
        found += rows("profiled", [factor * seconds for factor in factors], name, run)
    for name, forward_s, backward_s in (("conv1", 0.001, 0.003), ("ip1", 0.001, 0.002)):
        found += rows("forward", [factor * forward_s for factor in factors], name, run)
        found += rows("backward", [factor * backward_s for factor in factors], name, run)
    return found


def steps(run: str = "a-r0") -> list[dict]:
    return rows("step", [STEP_S] * 5, run=run) + rows("io", [0.0005] * 5, run=run)


def test_parts_of_a_profiled_step() -> None:
    """11 ms under instruments, 10.5 without, 0.5 to read the input: a step of 11, 7 of layers, 4 + 0.5 named."""
    (row,) = gaps(campaign([*steps(), *profiled([1.0] * 4, 0.0105)])).to_dict("records")
    assert row["profile"] == "in the step"
    assert (row["step_s"], row["layers_s"], row["gap_s"]) == pytest.approx((0.011, 0.007, 0.004))
    assert [row[f"{name}_s"] for name in ("input", "copy", "loss", "update", "dispatch", "other")] == pytest.approx(
        [0.0005, 0.0005, 0.0005, 0.001, 0.002, 0.0]
    )
    assert row["unexplained_s"] == pytest.approx(-0.0005), "what the instruments add"
    assert row["attributed_share"] == pytest.approx(1 - 0.5 / 4)


def test_what_the_instruments_miss_is_unexplained() -> None:
    (row,) = gaps(campaign([*steps(), *profiled([1.0] * 4, 0.012)])).to_dict("records")
    assert row["unexplained_s"] == pytest.approx(0.001)
    assert row["attributed_share"] == pytest.approx(1 - 1 / 5.5)


def test_a_drift_that_hits_both_kinds_of_step_is_in_neither() -> None:
    """The second half of the repetitions is twice as slow, plain and profiled alike."""
    slow = profiled([1.0] * 3 + [2.0] * 3, 0.011)
    drifting = [{**row, "time_s": 0.022} if row["layer"] == "plain" and row["repeat"] > 3 else row for row in slow]
    (row,) = gaps(campaign([*steps(), *drifting])).to_dict("records")
    assert row["unexplained_s"] == pytest.approx(0, abs=1e-9)


def test_a_repetition_that_something_hit_does_not_count() -> None:
    calm, hit = profiled([1.0] * 8, 0.011), profiled([1.0] * 7 + [30.0], 0.011)
    assert gaps(campaign(steps() + calm)).equals(gaps(campaign(steps() + hit)))


def test_layers_run_one_by_one_leave_the_rest_unexplained() -> None:
    layers = [row for row in profiled([1.0] * 4, 0.01) if row["phase"] != "profiled"]
    phases = rows("h2d", [0.0002] * 3) + rows("update", [0.0008] * 3) + rows("forward", [0.002] * 3)
    (row,) = gaps(campaign([*steps(), *layers, *phases])).to_dict("records")
    assert row["profile"] == "one by one"
    assert row["layers_s"] == pytest.approx(0.007)
    assert (row["copy_s"], row["update_s"], row["dispatch_s"]) == pytest.approx((0.0002, 0.0008, 0.0))
    assert row["unexplained_s"] == pytest.approx(0.003 - 0.0005 - 0.0002 - 0.0008)


def test_the_table_adds_up_to_the_gap() -> None:
    both = [*steps(), *profiled([1.0, 1.1, 0.9], 0.0105), *steps("b-r0"), *profiled([2.0] * 3, 0.02, "b-r0")]
    table = gap_table(campaign(both))
    assert table["case_id"].unique().tolist() == ["a", "b"]
    assert table.groupby("case_id")["share"].sum().tolist() == pytest.approx([1.0, 1.0])
    wholes = gaps(campaign(both))
    assert table.groupby("case_id")["time_s"].sum().tolist() == pytest.approx(wholes["gap_s"].tolist())
    assert (table.groupby("case_id")["part"].last() == "unexplained").all()


def test_a_setting_that_fuses_layers_has_no_row() -> None:
    assert gaps(campaign(steps())).empty
    assert gap_table(campaign(steps())).empty
    assert not np.isnan(gaps(campaign(steps() + profiled([1.0] * 3, 0.01)))["gap_s"]).any()
