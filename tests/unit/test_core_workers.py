"""Campaigns of many workers in the study: read, checked, added whole, and not seen by studies of single devices."""

import re
from pathlib import Path

import pandas as pd
import planted_workers as planted
import pytest
from click.testing import CliRunner

from steptime.cli import cli
from steptime.core.campaign import campaign_folders, recorded_folders
from steptime.core.errors import InputError
from steptime.core.workers import COMPUTED, FILES, ends_of, read_workers, workers_folders
from steptime.measure.add import add_campaign

NAMES = ("workers.csv", "timelines.csv")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return planted.write(tmp_path / "data/campaigns")


def changed(folder: Path, name: str, column: str, value: object, row: int = 3) -> None:
    """The table with another value in one cell."""
    table = pd.read_csv(folder / name, dtype=str, keep_default_na=False)
    table.loc[row, column] = value
    table.to_csv(folder / name, index=False)


def test_what_was_written_is_read(folder: Path) -> None:
    found = read_workers(folder)
    assert found.profile is not None
    assert found.profile.network == planted.NETWORK
    assert found.profile.parameter_bytes.sum() == planted.profile().parameter_bytes.sum()
    steps = found.steps()
    assert len(steps) == planted.STEPS * planted.ROUNDS * (1 + 5 * 3 * 2)
    assert set(steps["workers"]) == {1, 2, 4, 8}
    assert steps["schedule"].nunique() == 5


def test_computing_workers_need_no_profile(tmp_path: Path) -> None:
    folder = planted.write(tmp_path, compute=COMPUTED)
    (folder / "profile.csv").unlink()
    assert read_workers(folder).profile is None


@pytest.mark.parametrize(
    ("name", "column", "value", "said"),
    [
        ("workers.csv", "run_id", "nobody", "workers.csv: line 5: run_id = 'nobody': is no finished run"),
        ("workers.csv", "ranks", "1", "workers.csv: line 5: ranks = 1: must be at least the 2 workers"),
        ("workers.csv", "beta_s_per_byte", "", "workers.csv: line 5: beta_s_per_byte = empty: a link with a rate"),
        ("workers.csv", "ends", "1 3", "workers.csv: line 5: ends = '1 3': must be rising whole numbers up to"),
        ("workers.csv", "ends", "3 1 8", "workers.csv: line 5: ends = '3 1 8': must be rising"),
        ("workers.csv", "ends", "x", "workers.csv: line 5: ends = 'x': must be rising"),
        ("workers.csv", "compute", "guessed", "workers.csv: line 5: compute = 'guessed': must be one of"),
        ("workers.csv", "alpha_s", "-1", "workers.csv: line 5: alpha_s = '-1': must be at least 0"),
        ("timelines.csv", "run_id", "nobody", "timelines.csv: line 5: run_id = 'nobody': is not in runs.csv"),
        ("timelines.csv", "worker", "8", "timelines.csv: line 5: worker = 8: the run has no such worker"),
        ("timelines.csv", "end_s", "0", "timelines.csv: line 5: end_s = 0.0: must not be below start_s"),
        ("profile.csv", "backward_s", "-1", "profile.csv: line 5: backward_s = '-1': must be at least 0"),
    ],
)
def test_a_fault_is_one_line_with_its_place(folder: Path, name: str, column: str, value: str, said: str) -> None:
    row = 4 if (name, column) == ("timelines.csv", "end_s") else 3
    changed(folder, name, column, value, row)
    with pytest.raises(InputError, match=re.escape(said.replace("line 5", f"line {row + 2}"))):
        read_workers(folder)
    done = CliRunner().invoke(cli, ["campaign", "check", str(folder)])
    assert done.exit_code != 0


def test_a_finished_run_needs_its_row(folder: Path) -> None:
    table = pd.read_csv(folder / "workers.csv", dtype=str, keep_default_na=False)
    table.drop(index=2).to_csv(folder / "workers.csv", index=False)
    with pytest.raises(InputError, match=r"runs\.csv: line \d+: run_id = '.*': is finished but not in workers\.csv"):
        read_workers(folder)


def test_emulated_compute_needs_its_profile(folder: Path) -> None:
    (folder / "profile.csv").unlink()
    with pytest.raises(InputError, match=r"profile\.csv"):
        read_workers(folder)


def test_added_it_is_whole(tmp_path: Path) -> None:
    source = planted.write(tmp_path / "measured")
    target = add_campaign(source, "lab-workers", tmp_path)
    for name in (*FILES, "runs.csv", "samples.csv"):
        assert (target / name).read_text() == (source / name).read_text(), name
    assert workers_folders(tmp_path) == {"lab-workers": target}


@pytest.mark.parametrize("name", NAMES)
def test_one_that_is_not_valid_or_names_a_path_is_not_added(tmp_path: Path, name: str) -> None:
    source = planted.write(tmp_path / "measured")
    text = (source / name).read_text()
    (source / name).write_text(text + "half a row\n")
    with pytest.raises(InputError, match=f"{name}: line .*: 1 fields"):
        add_campaign(source, "lab", tmp_path)
    (source / name).write_text(text)
    changed(
        source, name, {"workers.csv": "schedule", "timelines.csv": "layer"}[name], "merged=/home/somebody/plan.json"
    )
    with pytest.raises(InputError, match=f"{name}: line 5: .*holds an absolute path"):
        add_campaign(source, "lab", tmp_path)
    assert not (tmp_path / "data").exists()


def test_studies_of_single_devices_do_not_see_it(folder: Path, tmp_path: Path) -> None:
    assert campaign_folders(tmp_path) == {}
    assert recorded_folders(tmp_path) == workers_folders(tmp_path) == {folder.name: folder}


@pytest.mark.parametrize(("text", "ends"), [("8", (8,)), ("1 3 8", (1, 3, 8)), ("", ()), ("1 -3", ()), ("1.5", ())])
def test_ends(text: str, ends: tuple[int, ...]) -> None:
    assert ends_of(text) == ends
