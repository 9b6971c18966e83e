"""Campaign tables: what is wrong with a file is said in one line naming file, line, column, value and mend."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from steptime.core.campaign import (
    RUN_COLUMNS,
    RUNS,
    SAMPLE_COLUMNS,
    SAMPLES,
    Campaign,
    as_table,
    campaign_folders,
    read_campaign,
    repetitions,
    write_campaign,
)
from steptime.core.errors import InputError

RUN = {
    "case_id": "torch-mlp",
    "schema_version": 2,
    "framework": "torch",
    "network": "mlp",
    "size": "quick",
    "batch": 16,
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "workers": 1,
    "input": "sequential",
    "round": 0,
    "position": 0,
    "seed": 1,
    "status": "finished",
    "duration_s": 1.5,
    "warmups": 1,
    "parameters": 12345678901,
    "loss_first": -0.25,
    "git_dirty": True,
    "code_hash": "0123",
    "fingerprint": "4567",
    "command": "steptime measure",
    "steptime_version": "0.1.0",
    "framework_version": "2.10",
    "platform": 'Linux, "glibc"',
    "cpu_model": "CPU",
    "cores_present": 2,
    "cores_allowed": 2,
    "memory_bytes": 8 * 2**30,
    "is_virtual": True,
    "timer": "perf_counter",
    "timer_resolution_s": 1e-9,
}
SAMPLE = {"phase": "step", "repeat": 0, "is_warmup": False, "is_disturbed": False, "time_s": 0.0123456789123}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs = as_table(
        [RUN | {"run_id": "r0"}, RUN | {"run_id": "r1", "status": "failed", "reason": "NA", "git_dirty": None}], RUNS
    )
    samples = as_table(
        [
            SAMPLE | {"run_id": "r0", "repeat": 1, "involuntary_switches": 3, "run_delay_s": 1e-7},
            SAMPLE | {"run_id": "r0"},
            SAMPLE | {"run_id": "r0", "phase": "forward", "layer": "conv1"},
        ],
        SAMPLES,
    )
    write_campaign(Campaign("c", runs, samples), tmp_path / "c")
    return tmp_path / "c"


def test_reading_and_writing_again_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    campaign = read_campaign(folder)
    write_campaign(campaign, tmp_path / "again")
    for name in ("runs.csv", "samples.csv"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    first = campaign.runs.iloc[0]
    assert first["parameters"] == RUN["parameters"]
    assert (first["framework_version"], first["platform"]) == ("2.10", 'Linux, "glibc"')
    assert campaign.runs["reason"][1] == "NA", "only an empty cell is missing"
    assert campaign.samples["time_s"][0] == pytest.approx(SAMPLE["time_s"], rel=1e-8)


def test_a_campaign_without_samples_round_trips(tmp_path: Path) -> None:
    runs = as_table([RUN | {"run_id": "r0", "status": "not_run", "reason": "no GPU"}], RUNS)
    write_campaign(Campaign("c", runs, as_table([], SAMPLES)), tmp_path)
    assert len(read_campaign(tmp_path).samples) == 0


def test_a_warm_up_may_have_been_made_in_time_that_two_children_share(folder: Path) -> None:
    cell("samples.csv", 3, "time_s", "1.6")(folder)
    cell("samples.csv", 3, "is_warmup", "True")(folder)
    assert read_campaign(folder).samples["time_s"].max() == 1.6


def test_a_campaign_is_the_old_one_the_new_one_or_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended between any two of the moves that write it: the runs of one are never beside the samples of the other."""
    old = read_campaign(folder)
    new = Campaign("c", old.runs.assign(seed=2), old.samples.assign(time_s=old.samples["time_s"] * 2))
    moves, move = 0, os.replace
    for last in (0, 1, 2, 3):
        write_campaign(old, folder, {"plan.json": "old"})
        moves = 0

        def end_at(source: str, target: str, last: int = last) -> None:
            nonlocal moves
            if moves == last:
                raise KeyboardInterrupt
            moves += 1
            move(source, target)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(os, "replace", end_at)
            write_campaign(new, folder, {"plan.json": "new"})
        assert moves == last
        if last < 3:
            assert campaign_folders(folder.parent) == {}
            with pytest.raises(InputError, match=r"runs\.csv: cannot be read"):
                read_campaign(folder)
    found = read_campaign(folder)
    assert found.runs["seed"].tolist() == [2, 2]
    assert found.samples["time_s"].tolist() == new.samples["time_s"].tolist()
    assert (folder / "plan.json").read_text() == "new"
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "runs.csv", "samples.csv"]


def test_the_campaigns_of_a_checkout_are_listed_by_what_makes_them_whole(folder: Path, tmp_path: Path) -> None:
    for name in ("data/campaigns/b", "data/campaigns/a", "data/raw/local"):
        shutil.copytree(folder, tmp_path / name)
    (tmp_path / "data/campaigns/half").mkdir()
    (tmp_path / "data/campaigns/half/samples.csv").touch()
    assert list(campaign_folders(tmp_path)) == ["local", "a", "b"]
    assert campaign_folders(tmp_path)["local"] == tmp_path / "data/raw/local"


def cell(table: str, line: int, column: str, value: str) -> Callable[[Path], None]:
    """Write `value` into one cell."""
    columns = RUN_COLUMNS if table == "runs.csv" else SAMPLE_COLUMNS

    def edit(folder: Path) -> None:
        lines = (folder / table).read_text().splitlines()
        # the platform holds a quoted comma; it stands right of every cell edited here in runs.csv but those below
        fields = lines[line - 1].replace('"Linux, ""glibc"""', "PLATFORM").split(",")
        fields[columns.index(column)] = value
        lines[line - 1] = ",".join(fields)
        (folder / table).write_text("\n".join(lines) + "\n")

    return edit


def text(table: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / table).write_text(change((folder / table).read_text()))

    return edit


def on_line(number: int, change: Callable[[str], str]) -> Callable[[str], str]:
    def edit(content: str) -> str:
        lines = content.splitlines()
        lines[number - 1] = change(lines[number - 1])
        return "\n".join(lines) + "\n"

    return edit


FAULTS = {
    "empty file": (text("runs.csv", lambda _: ""), ["runs.csv: line 1: is empty"]),
    "extra column": (
        text("samples.csv", lambda content: content.replace("\n", ",1\n").replace("load_1min,1", "load_1min,extra")),
        ["samples.csv: line 1: column 'extra' is not known; remove it"],
    ),
    "missing column": (
        text("samples.csv", lambda content: content.replace("time_s", "time", 1)),
        ["samples.csv: line 1: column 'time_s' is missing"],
    ),
    "double column": (
        text("samples.csv", lambda content: content.replace("load_1min\n", "load_1min,repeat\n", 1)),
        ["samples.csv: line 1: column 'repeat' comes twice"],
    ),
    "wrong order": (
        text("samples.csv", lambda content: content.replace("run_id,phase", "phase,run_id", 1)),
        ["samples.csv: line 1: column 'phase' stands where 'run_id' belongs"],
    ),
    "too many fields": (
        text("samples.csv", on_line(3, lambda line: line + ",1")),
        ["samples.csv: line 3: 13 fields where the header has 12; mend or remove the row"],
    ),
    "too few fields": (
        text("runs.csv", on_line(2, lambda line: line.rsplit(",", 2)[0])),
        ["runs.csv: line 2:", "fields where the header has"],
    ),
    "blank line": (text("samples.csv", on_line(3, lambda _: "")), ["samples.csv: line 3: 0 fields"]),
    "open quote": (text("samples.csv", on_line(3, lambda line: '"' + line)), ["samples.csv: line", "is not CSV"]),
    "not a boolean": (
        cell("samples.csv", 3, "is_warmup", "maybe"),
        ["samples.csv: line 3: is_warmup = 'maybe': must be True or False; correct it"],
    ),
    "empty boolean": (cell("samples.csv", 3, "is_disturbed", ""), ["line 3: is_disturbed = empty: must be True or"]),
    "not a number": (cell("samples.csv", 4, "time_s", "fast"), ["samples.csv: line 4: time_s = 'fast': must be a num"]),
    "not finite": (cell("samples.csv", 4, "time_s", "inf"), ["line 4: time_s = 'inf': must be a number"]),
    "not whole": (cell("samples.csv", 2, "repeat", "1.5"), ["line 2: repeat = '1.5': must be a whole number"]),
    "nothing": (cell("samples.csv", 2, "repeat", ""), ["line 2: repeat = empty: must be a whole number"]),
    "negative time": (cell("samples.csv", 3, "time_s", "-0.1"), ["line 3: time_s = '-0.1': must be at least 0"]),
    "negative covariate": (cell("samples.csv", 3, "steal_s", "-1"), ["line 3: steal_s = '-1': must be at least 0"]),
    "unknown phase": (cell("samples.csv", 3, "phase", "nap"), ["line 3: phase = 'nap': must be one of step, io"]),
    "negative batch": (cell("runs.csv", 2, "batch", "-16"), ["runs.csv: line 2: batch = '-16': must be at least 1"]),
    "unknown version": (
        cell("runs.csv", 3, "schema_version", "9"),
        ["line 3: schema_version = '9': must be one of 2"],
    ),
    "same run twice": (cell("runs.csv", 3, "run_id", "r0"), ["runs.csv: line 3: run_id = 'r0': must not come twice"]),
    "no name": (cell("runs.csv", 3, "network", ""), ["runs.csv: line 3: network = empty: must be a text"]),
    "orphan": (cell("samples.csv", 2, "run_id", "r9"), ["samples.csv: line 2: run_id = 'r9': is not in runs.csv"]),
    "finished but empty": (
        cell("runs.csv", 3, "status", "finished"),
        ["runs.csv: line 3: run_id = 'r1': is finished but has no samples"],
    ),
    "no reason": (
        lambda folder: (
            cell("runs.csv", 3, "reason", "")(folder) or cell("runs.csv", 3, "status", "out_of_memory")(folder)
        ),
        ["runs.csv: line 3: reason = empty: a run that is out_of_memory has one; add it"],
    ),
    "no time": (cell("samples.csv", 3, "time_s", "0"), ["samples.csv: line 3: time_s = 0: a step takes time; correct"]),
    "minutes for seconds": (
        cell("samples.csv", 3, "time_s", "1e9"),
        ["samples.csv: line 3: time_s = '1e9': must be at most 86400"],
    ),
    "longer than its run": (
        cell("samples.csv", 4, "time_s", "1.6"),
        ["samples.csv: line 4: time_s = 1.6: the repetitions of run 'r0' would take 1.625 s, its duration_s is 1.5"],
    ),
    "two cases of one name": (
        cell("runs.csv", 3, "batch", "32"),
        ["runs.csv: line 3: batch = 32: is 16 on line 2, which has the same case_id; correct one of them"],
    ),
    "another case than its name says": (
        cell("runs.csv", 2, "case_id", "torch-mlp-quick-b32-float32-cpu-t1-sequential"),
        ["runs.csv: line 2: batch = 16: case_id 'torch-mlp-quick-b32-", "says 32; correct one of them"],
    ),
    "unknown type": (cell("runs.csv", 2, "dtype", "float23"), ["runs.csv: line 2: dtype = 'float23': must be one of"]),
    "unknown device": (cell("runs.csv", 2, "device", "tpu"), ["runs.csv: line 2: device = 'tpu': must be one of cpu"]),
    "repeated sample": (cell("samples.csv", 4, "repeat", "0"), ["samples.csv: line 4: repeats an earlier sample"]),
    "not text": (lambda folder: (folder / "runs.csv").write_bytes(b"\xff\xfe") and None, ["runs.csv: is not UTF-8"]),
    "no file": (lambda folder: (folder / "runs.csv").unlink(), ["runs.csv: cannot be read"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_file_is_one_line(folder: Path, fault: str) -> None:
    edit, parts = FAULTS[fault]
    edit(folder)
    with pytest.raises(InputError) as raised:
        read_campaign(folder)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(str(folder))
    for part in parts:
        assert part in message


def test_a_repetition_has_the_plan_of_another(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("local", "b", "a", "c", "d")}
    for name, text in (("local", "one"), ("b", "one"), ("a", "one"), ("c", "two")):
        folders[name].mkdir()
        (folders[name] / "plan.json").write_text(text)
    assert repetitions(folders) == {"b": "a"}
