"""Which of a campaign's cases may be compared: parity before speed, and no more cores than were given."""

from pathlib import Path

import pandas as pd
import pytest
from test_campaign import RUN

from steptime.core.campaign import RUNS, SAMPLES, Campaign, as_table
from steptime.core.errors import InputError
from steptime.core.parity import PARITY, busy_cores, comparable, overfull, read_parity

SETTINGS = {"torch": 1.0, "cntk": 2.0, "mxnet": 1.1, "caffe": 1.0}
"""Busy cores of each, one thread given."""


def planted(threads: int = 1) -> Campaign:
    runs = [RUN | {"run_id": name, "case_id": name, "framework": name, "threads": threads} for name in SETTINGS]
    samples = [
        {"run_id": name, "phase": "step", "repeat": repeat, "is_warmup": repeat == 0, "is_disturbed": False}
        | {"time_s": 0.01, "cpu_s": 0.08 if repeat == 0 else 0.01 * busy}
        for name, busy in SETTINGS.items()
        for repeat in range(4)
    ]
    return Campaign("planted", as_table(runs, RUNS), as_table(samples, SAMPLES))


def row(framework: str, verdict: str, dtype: str = "float32") -> dict[str, object]:
    return {"framework": framework, "network": "mlp", "dtype": dtype, "verdict": verdict}


def test_more_cores_than_given_are_seen_and_warm_ups_do_not_count() -> None:
    assert busy_cores(planted()).to_dict() == pytest.approx(SETTINGS)
    assert overfull(planted()) == {"cntk"}
    assert overfull(planted(threads=2)) == set()


def test_busy_cores_are_of_the_steps_that_count() -> None:
    """Processes that something held up count no more than in the step's time; see `core.statistics.counted`."""
    campaign = planted()
    held_up = (campaign.samples["run_id"] == "torch") & (campaign.samples["repeat"] > 0)
    second = campaign.samples[held_up].assign(run_id="torch-2", is_disturbed=True, cpu_s=0.001)
    third = campaign.samples[held_up].assign(run_id="torch-3")
    runs = campaign.runs[campaign.runs["run_id"] == "torch"]
    more = Campaign(
        "planted",
        pd.concat([campaign.runs, runs.assign(run_id="torch-2"), runs.assign(run_id="torch-3")]),
        pd.concat([campaign.samples, second, third]),
    )
    assert busy_cores(more)["torch"] == pytest.approx(1.0)
    alone = Campaign("planted", more.runs, more.samples[more.samples["run_id"] == "torch-2"])
    assert busy_cores(alone)["torch"] == pytest.approx(0.1), "all that there is"


def test_what_fails_parity_or_takes_more_cores_is_not_compared(tmp_path: Path) -> None:
    assert set(comparable(planted(), tmp_path).runs["framework"]) == {"torch", "mxnet", "caffe"}
    rows = [row("mxnet", "differs"), row("caffe", "failed", "bfloat16"), row("torch", "agrees")]
    as_table(rows, PARITY).to_csv(tmp_path / "parity.csv", index=False)
    left = comparable(planted(), tmp_path)
    assert set(left.runs["framework"]) == set(left.samples["run_id"]) == {"torch", "caffe"}


def test_a_bad_parity_file_is_one_line(tmp_path: Path) -> None:
    assert read_parity(tmp_path).empty
    as_table([row("mxnet", "maybe")], PARITY).to_csv(tmp_path / "parity.csv", index=False)
    with pytest.raises(InputError, match=r"parity\.csv: line 2: verdict = 'maybe': must be one of"):
        read_parity(tmp_path)
