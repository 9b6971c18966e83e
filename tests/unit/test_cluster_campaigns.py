"""A campaign of many workers: which cells, what is kept, what a step is, and one that really runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import gone

from steptime.cluster import campaigns, torch_gloo
from steptime.cluster.campaigns import WorkersPlan, cells_of, measure_workers, step_rows
from steptime.cluster.launcher import RunFailed
from steptime.cluster.links import NEEDED_CAPABILITIES, check_able, list_links
from steptime.cluster.schedules import Learnable
from steptime.core.campaign import read_table
from steptime.core.errors import InputError
from steptime.core.files import validated
from steptime.core.step import LayerProfile
from steptime.core.workers import EMULATED, TIMELINES, WORKERS, profile_table, read_profile
from steptime.measure import lock

PROFILE = LayerProfile(
    "planted",
    "planted.csv",
    8,
    ("a", "view", "b"),
    np.array([0.002, 0.001, 0.003]),
    np.array([0.004, 0.001, 0.005]),
    np.array([40_000.0, 0.0, 80_000.0]),
    np.zeros(3),
)
PLAN = WorkersPlan(
    network="planted",
    batch=8,
    workers=(1, 2),
    schedules=("end_of_backward", "wait_free"),
    emulate="planted.csv",
    rounds=2,
    warmups=1,
    steps=3,
)
STEP = {
    **{"cpu_s": 0.001, "run_delay_s": 0.0, "steal_s": 0.0, "involuntary_switches": 1, "load_1min": 0.5},
    **{"forward_s": 0.3, "backward_s": 0.5, "averaged_s": 0.8, "updated_s": 0.9},
}


@pytest.fixture(autouse=True)
def own_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever else is measured on this machine at this moment."""
    monkeypatch.setattr(lock, "LOCK", tmp_path / "lock")


def answer(count: int, step_s: float = 1.0) -> dict[str, Any]:
    steps = [
        {
            name: value + step_s * number if name.endswith("ed_s") or name in ("forward_s", "backward_s") else value
            for name, value in STEP.items()
        }
        | {"start_s": step_s * number, "end_s": step_s * (number + 0.95)}
        for number in range(count)
    ]
    return {
        **{"build_s": 0.1, "steps": steps, "sent_bytes": None, "exchanges": [[0, 0.4, 0.8]], "losses": []},
        **{"parameters": 30_000, "versions": {"framework": "2", "python": "3"}, "peak_memory_bytes": 100},
    }


class Engine:
    """In place of torch: counts the runs, fails where it is told to."""

    def __init__(self, failing: str = "", interrupt_at: int = 10_000) -> None:
        self.failing, self.interrupt_at = failing, interrupt_at
        self.started: list[str] = []

    def __call__(self, jobs: Any, layers: Any, places: Any, **_: Any) -> list[torch_gloo.Answers]:
        ((job, sync),) = jobs
        self.started.append(sync.label)
        if len(self.started) == self.interrupt_at:
            raise KeyboardInterrupt
        if sync.label == self.failing and sync.workers > 1:
            raise RunFailed("rank 1 was ended by SIGKILL; it said last: /usr/lib/thing", 1)
        time.sleep(0.05)
        found = tuple(answer(job.warmups + job.steps, 0.001) for _ in range(sync.workers))
        return [torch_gloo.Answers(found, None)]


def planned(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, plan: WorkersPlan = PLAN) -> Any:
    monkeypatch.setattr(torch_gloo, "train", engine)
    return measure_workers(plan, tmp_path / "out", PROFILE, report=lambda line: None)


def test_a_lone_worker_is_one_cell() -> None:
    cells = cells_of(PLAN.model_copy(update={"rates": (None, 1e9)}), [Learnable("a", 40_000)])
    assert sorted((cell.sync.workers, cell.sync.label, cell.rate_bits_per_s or 0) for cell in cells) == [
        (1, "end_of_backward", 0),
        (2, "end_of_backward", 0),
        (2, "end_of_backward", 1e9),
        (2, "wait_free", 0),
        (2, "wait_free", 1e9),
    ]
    assert len({cell.case_id for cell in cells}) == len(cells)


def test_a_step_lasts_from_the_last_workers_beginning_to_the_last_ones_end() -> None:
    moments = [[(0, 10), (10, 20), (25, 33), (33, 41)], [(1, 12), (12, 21), (26, 35), (35, 40)]]
    workers = [
        {"steps": [{**STEP, "start_s": start, "end_s": end, "run_delay_s": 0.5} for start, end in each]}
        for each in moments
    ]
    rows = step_rows(workers, 2, own_delays=False)
    assert [row["time_s"] for row in rows] == [11, 9, 9, 6]
    assert [row["is_warmup"] for row in rows] == [True, True, False, False]
    assert [row["cpu_s"] for row in rows] == [0.002] * 4
    assert [row["is_disturbed"] for row in rows] == [False, False, True, True]
    assert not any(row["is_disturbed"] for row in step_rows(workers, 2, own_delays=True))


def test_every_cell_is_run_once_a_round_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    campaign = planned(tmp_path, engine, monkeypatch, PLAN.model_copy(update={"rounds": 6}))
    assert len(campaign.runs) == 6 * 3
    rounds = [tuple(engine.started[first : first + 3]) for first in range(0, 18, 3)]
    assert len(set(rounds)) > 1
    workers = read_table(tmp_path / "out/workers.csv", WORKERS)
    assert set(workers["run_id"]) == set(campaign.runs["run_id"])
    assert set(workers["compute"]) == {EMULATED}
    one = workers[workers["run_id"].str.contains("w2-wait_free")].iloc[0]
    assert one["ends"] == "1 2"
    assert one["expected_bytes"] == 120_000
    timelines = read_table(tmp_path / "out/timelines.csv", TIMELINES)
    assert set(timelines["task"]) == {"forward", "backward", "exchange", "update"}
    assert set(timelines["run_id"].str[-3:]) == {"r00"}
    assert not (tmp_path / "out.partial").exists()


def test_the_replayed_profile_is_kept_and_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(tmp_path, Engine(), monkeypatch)
    again = read_profile(tmp_path / "out/profile.csv", "planted", 8)
    assert profile_table(again).equals(profile_table(PROFILE))


def test_a_cell_whose_ranks_die_is_a_row_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(failing="wait_free")
    campaign = planned(tmp_path, engine, monkeypatch, PLAN.model_copy(update={"rounds": 4}))
    failed = campaign.runs[campaign.runs["status"] == "failed"]
    assert len(failed) == campaigns.FAILURES_ALLOWED
    assert set(failed["reason"]) == {"rank 1 was ended by SIGKILL; it said last: thing"}
    assert (campaign.runs["status"] == "finished").sum() == 4 * 2


def test_an_interruption_costs_only_the_run_that_it_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        planned(tmp_path, Engine(interrupt_at=5), monkeypatch)
    assert not (tmp_path / "out").exists()
    engine = Engine()
    campaign = planned(tmp_path, engine, monkeypatch)
    assert len(engine.started) == 6 - 4
    assert len(campaign.runs) == 6


def test_other_steps_or_another_profile_keep_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        planned(tmp_path, Engine(interrupt_at=5), monkeypatch)
    engine = Engine()
    planned(tmp_path, engine, monkeypatch, PLAN.model_copy(update={"steps": 4}))
    assert len(engine.started) == 6


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schedules": ("wait_free", "fastest")}, "schedule = 'fastest': unknown; known are end_of_backward"),
        ({"schedules": ("hierarchical=3",)}, "2 workers do not make whole nodes of 3"),
        ({"emulate": None}, "emulate: names a profile if and only if one is given"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(
    changed: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    with pytest.raises(InputError) as found:
        planned(tmp_path, engine, monkeypatch, PLAN.model_copy(update=changed))
    assert said in str(found.value)
    assert engine.started == []


def test_links_without_root_are_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steptime.cluster.links.NEEDED_CAPABILITIES", NEEDED_CAPABILITIES | 1 << 63)
    with pytest.raises(InputError, match="making them needs root; run as root, or without --rate"):
        planned(tmp_path, Engine(), monkeypatch, PLAN.model_copy(update={"rates": (1e9,)}))


def test_two_do_not_measure_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lock.measuring_lock(), pytest.raises(InputError, match=f"process {os.getpid()} is measuring"):
        planned(tmp_path, Engine(), monkeypatch)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layer,forward_s,backward_s\na,1,1\n", "line 1: column 'parameter_bytes' is missing"),
        ("layer,forward_s,backward_s,parameter_bytes\na,-1,1,4\n", "line 2: forward_s = '-1': must be at least 0"),
        ("layer,forward_s,backward_s,parameter_bytes\na,1,1,4\na,1,1,4\n", "line 3: layer = 'a': must not come twice"),
        ("layer,forward_s,backward_s,parameter_bytes\na,1,1,0\n", "parameter_bytes: no layer has any"),
        ("layer,forward_s,backward_s,parameter_bytes\na,1,x,4\n", "line 2: backward_s = 'x': must be a number"),
    ],
)
def test_a_profile_that_is_none_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "profile.csv").write_text(text)
    with pytest.raises(InputError) as found:
        read_profile(tmp_path / "profile.csv", "planted", 8)
    assert said in str(found.value)


@pytest.mark.parametrize("wrong", [{"workers": (0,)}, {"workers": (2, 2)}, {"rates": (-1.0,)}, {"rounds": 0}])
def test_a_plan_that_is_none_is_one_line(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"^workers run: (workers|rates|rounds)"):
        validated(WorkersPlan, {"network": "mlp", **wrong}, "workers run")


# ------------------------------------------------------------------------------------------------------ the real thing

COMMAND = [str(Path(sys.executable).with_name("steptime")), "workers", "run"]


def test_the_command_measures_a_campaign(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "profile.csv").write_text(profile_table(PROFILE).to_csv(index=False))
    options = ["--network", "mlp", "--workers", "2", "--schedule", "wait_free", "--schedule", "ps_sharded"]
    options += ["--emulate", str(tmp_path / "profile.csv"), "--rounds", "1", "--steps", "3", "--warmups", "1"]
    done = subprocess.run([*COMMAND, *options, "--out", str(out)], cwd=root, capture_output=True, text=True)
    if "is measuring on this machine" in done.stderr:
        pytest.skip("needs two cores")
    assert done.returncode == 0, done.stderr
    assert "2 runs, emulated compute, real communication" in done.stdout
    workers = read_table(out / "workers.csv", WORKERS)
    assert sorted(workers["ranks"]) == [2, 4]
    assert (workers["forward_s"] + workers["backward_s"] >= 0.016 - 1e-6).all()
    assert json.loads((out / "plan.json").read_text())["emulate"] == "profile.csv"


def test_a_killed_command_leaves_no_process_and_its_links_are_swept(root: Path, tmp_path: Path) -> None:
    try:
        check_able()
    except InputError as error:
        pytest.skip(str(error))
    options = ["--network", "mlp", "--workers", "2", "--schedule", "wait_free", "--rate", "1gbit", "--steps", "100000"]
    parent = subprocess.Popen([*COMMAND, *options, "--out", str(tmp_path / "out")], cwd=root, stderr=subprocess.PIPE)
    children: list[str] = []
    end = time.monotonic() + 60
    while time.monotonic() < end and parent.poll() is None:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        names = [Path(f"/proc/{child}/cmdline").read_text() for child in children]
        if sum("torch_gloo.py" in name for name in names) == 2:
            break
        time.sleep(0.02)
    if parent.poll() is not None:
        assert parent.stderr is not None
        assert b"is measuring on this machine" in parent.stderr.read()
        pytest.skip("needs two cores")
    time.sleep(2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone([int(child) for child in children])
    assert [found.is_alive for found in list_links() if found.owner == parent.pid] == [False]
    swept = subprocess.run([COMMAND[0], "links", "down"], capture_output=True, text=True, check=True)
    assert f"steptime-{parent.pid}-" in swept.stdout
    assert [found for found in list_links() if found.owner == parent.pid] == []


def test_where_a_steps_time_went_is_of_the_timed_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [
        {"steps": [{**STEP, "start_s": 0.1, "end_s": 1.0}] * 3},
        {"steps": [{**STEP, "start_s": 0.2, "end_s": 1.2}] * 3},
    ]
    slow = {**STEP, "start_s": -50.0, "end_s": 60.0}
    for each in workers:
        each["steps"] = [slow, slow, *each["steps"]]
    parts = campaigns._phases(workers, 2)
    assert parts == pytest.approx({"forward_s": 0.15, "backward_s": 0.2, "exposed_s": 0.3 + 0.2, "update_s": 0.1})
