"""The campaign's rules, with a child that answers as the frameworks' do: order, stopping, keeping, failing."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from steptime import frameworks
from steptime.core.campaign import Campaign, read_campaign
from steptime.core.errors import InputError
from steptime.core.statistics import estimate, usable
from steptime.measure import Plan, fingerprint, lock, measure, partial, rounds, run
from steptime.measure.plan import read_plan

PLAN = Plan(
    frameworks=("torch", "tensorflow"),
    networks=("mlp", "lenet"),
    rounds=6,
    samples=8,
    warmups=2,
    phase_samples=3,
    layer_samples=2,
    budget_s=1e6,
)
CASES = 4


class FakeChild:
    """A child without a process: steps of 10 ms, times a factor drawn for each child."""

    alive: ClassVar[int] = 0
    visits: ClassVar[list[tuple[str, str]]] = []
    between: ClassVar[float] = 0.0
    failing: ClassVar[set[str]] = set()
    failing_kind: ClassVar[str] = "error"
    failing_beside_another: ClassVar[set[str]] = set()
    without: ClassVar[set[str]] = set()
    inference_only: ClassVar[set[str]] = set()
    interrupt_at: ClassVar[float] = math.inf
    hit: ClassVar[set[int]] = set()
    started: ClassVar[list[str]] = []
    limits: ClassVar[set[int | None]] = set()
    now: ClassVar[float] = 0.0
    """The clock of the runs, in seconds: every answer takes one, longer than any of the times that it tells."""

    def __init__(
        self,
        setting_name: str,
        device: str = "cpu",
        cores: list[int] | None = None,
        threads: int = 1,
        memory_limit_bytes: int | None = None,
        adapter: Path | None = None,
    ) -> None:
        self.framework = setting_name
        self.is_settled = False
        FakeChild.started.append(setting_name)
        FakeChild.limits.add(memory_limit_bytes)

    def __enter__(self) -> "FakeChild":
        assert FakeChild.alive < run.STARTED_TOGETHER, "no more children than are started together"
        FakeChild.alive += 1
        self.is_closed = False
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        FakeChild.alive -= not self.is_closed
        self.is_closed = True

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        if command in FakeChild.without:
            raise frameworks.ChildError(f"{command}: no such thing", "unsupported")
        FakeChild.now += 1.0
        return getattr(self, command)(**arguments)

    def settle(self) -> dict[str, Any]:
        self.is_settled = True
        return {"waited_s": 0.05}

    def hello(self) -> dict[str, Any]:
        versions = {"framework": "1.0", "python": "3.11", "blas": None}
        return {
            "versions": versions,
            "timer": "perf_counter",
            "timer_resolution_s": 1e-9,
            "gpu": None,
            "variables": {"OMP_NUM_THREADS": "1", "THEANO_FLAGS": "cxx=/usr/bin/g++,base_compiledir=/home/me/x"},
            "inference_only": self.framework in FakeChild.inference_only,
        }

    def build(self, network: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.network, self.time_s = network["name"], 0.0
        if self.framework in FakeChild.failing:
            raise frameworks.ChildError("no kernel image in /opt/secret/lib.so", FakeChild.failing_kind)
        if self.framework in FakeChild.failing_beside_another and FakeChild.alive > 1:
            raise frameworks.ChildError("the child was ended by SIGKILL", "out_of_memory")
        return {"parameters": 7, "shapes": {}, "build_s": 0.25}

    def visit(self) -> None:
        """The first request after the child was made ready: children are timed one after the other."""
        assert self.is_settled, "timed only when it was idle"
        FakeChild.visits.append((self.framework, self.network))
        if len(FakeChild.visits) > FakeChild.interrupt_at:
            raise KeyboardInterrupt
        rng = np.random.default_rng(len(FakeChild.visits))
        self.time_s = 0.01 * math.exp(FakeChild.between * rng.normal())

    def steps(self, count: int) -> dict[str, Any]:
        if self.is_settled and not self.time_s:
            self.visit()
        sample = {"time_s": self.time_s or 0.02, "io_s": 0.001, "cpu_s": 0.01, "run_delay_s": None, "steal_s": 0.0}
        sample |= {"involuntary_switches": 2, "load_1min": 0.5}
        if len(FakeChild.visits) in FakeChild.hit:
            sample |= {"time_s": 3 * sample["time_s"], "run_delay_s": 2 * self.time_s}
        answer = {"samples": [sample] * count, "loss_first": 2.0, "loss_last": math.nan}
        return answer | {"energy_j": 0.5 * count, "gpu_active_share": None}

    def phases(self, count: int) -> dict[str, Any]:
        if self.framework in FakeChild.inference_only:
            if self.is_settled and not self.time_s:
                self.visit()
            return {"samples": [{"io": 0.001, "forward": 0.004}] * count}
        return {"samples": [{"io": 0.001, "h2d": 0.0, "forward": 0.003, "backward": 0.006, "update": 0.001}] * count}

    def layers(self, count: int) -> dict[str, Any]:
        return {"samples": [[{"layer": "fc1", "forward_s": 0.001, "backward_s": None}]] * count}

    def profile(self, count: int) -> dict[str, Any]:
        raise frameworks.ChildError("no instruments inside a whole step", "unsupported")

    def memory(self) -> dict[str, Any]:
        return {"peak_bytes": 12345678901}


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[FakeChild]]:
    monkeypatch.setattr(frameworks, "Child", FakeChild)
    monkeypatch.setattr(frameworks, "installed_version", lambda name: "1.0")
    monkeypatch.setattr(lock, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: FakeChild.now))
    fresh = {"alive": 0, "visits": [], "between": 0.0, "failing": set(), "interrupt_at": math.inf, "hit": set()}
    fresh |= {"without": set(), "inference_only": set(), "failing_kind": "error", "failing_beside_another": set()}
    fresh |= {"started": [], "limits": set(), "now": 0.0}
    for name, value in fresh.items():
        monkeypatch.setattr(FakeChild, name, value)
    yield FakeChild
    assert FakeChild.alive == 0


@pytest.fixture
def lines() -> list[str]:
    return []


def measured(tmp_path: Path, lines: list[str], plan: Plan = PLAN, **options: Any) -> Campaign:
    return measure(plan, tmp_path / "out", tmp_path / "partial", report=lines.append, **options)


def test_a_quiet_campaign_stops_at_the_target(tmp_path: Path, lines: list[str]) -> None:
    campaign = measured(tmp_path, lines)
    assert set(campaign.runs["stop_reason"]) == {"target"}
    assert set(campaign.runs["round"]) == set(range(PLAN.min_rounds))
    assert len(campaign.runs) == CASES * PLAN.min_rounds
    assert set(campaign.runs["peak_memory_bytes"]) == {12345678901}
    assert campaign.runs["loss_last"].isna().all(), "a loss that is no number is a missing one"
    assert campaign.runs["command"].unique().tolist() == ["steptime measure"]
    assert set(campaign.runs["build_s"]) == {0.25}
    assert set(campaign.runs["energy_j"]) == {0.5 * PLAN.samples}, "of the timed steps, without the warm-ups"
    assert campaign.runs["gpu_active_share"].isna().all()
    told = "OMP_NUM_THREADS=1; THEANO_FLAGS=cxx=g++,base_compiledir=x"
    assert campaign.runs["variables"].unique().tolist() == [told], "without paths"
    one = campaign.samples[campaign.samples["run_id"] == campaign.runs["run_id"][0]]
    counts = one.groupby(["phase", "is_warmup"]).size().to_dict()
    assert counts[("step", True)] == counts[("io", True)] == 2
    assert counts[("step", False)] == counts[("io", False)] == 8
    assert counts[("update", False)] == 3
    assert counts[("forward", False)] == 3 + 2, "phases and one layer"
    assert counts[("backward", False)] == 3, "a layer without a backward time has no row"
    case = campaign.joined().query("case_id == @campaign.runs.case_id[0]")
    assert estimate(usable(case)).median_s == pytest.approx(0.01)
    assert "stopped by target" in lines[-1]


def test_only_the_first_rounds_are_profiled(tmp_path: Path, lines: list[str]) -> None:
    table = measured(tmp_path, lines, PLAN.model_copy(update={"profile_rounds": 2})).joined()
    assert set(table.loc[table["phase"] == "update", "round"]) == {0, 1}
    assert set(table.loc[table["layer"].notna(), "round"]) == {0, 1}
    assert set(table.loc[table["phase"] == "step", "round"]) == set(range(PLAN.min_rounds))


def test_noise_runs_to_the_last_round_and_a_spent_budget_ends_it(
    tmp_path: Path, lines: list[str], fake: type[FakeChild]
) -> None:
    fake.between = 0.5
    assert set(measured(tmp_path, lines).runs["stop_reason"]) == {"rounds"}
    short = PLAN.model_copy(update={"budget_s": 1e-9})
    campaign = measured(tmp_path, lines, short, fresh=True)
    assert set(campaign.runs["stop_reason"]) == {"budget"}
    assert campaign.runs.groupby("round").size().to_dict() == {0: CASES, 1: CASES}, "a started round is finished"


def test_disturbed_runs_are_kept_flagged_and_made_up_for(
    tmp_path: Path, lines: list[str], fake: type[FakeChild]
) -> None:
    """Two runs of a one-case campaign are hit: two more rounds are measured, and the estimate does not see the hits."""
    fake.hit = {2, 4}
    plan = PLAN.model_copy(update={"frameworks": ("torch",), "networks": ("mlp",), "rounds": 10})
    campaign = measured(tmp_path, lines, plan)
    assert len(campaign.runs) == plan.min_rounds + 2
    assert campaign.samples["is_disturbed"].sum() == 2 * 2 * plan.samples, "a hit step and its reading are flagged"
    found = estimate(usable(campaign.joined()))
    assert (found.processes, found.median_s) == (plan.min_rounds, pytest.approx(0.01))


def test_cases_are_interleaved_in_an_order_drawn_from_the_seed(
    tmp_path: Path, lines: list[str], fake: type[FakeChild]
) -> None:
    measured(tmp_path, lines)
    first = list(fake.visits)
    by_round = [first[start : start + CASES] for start in range(0, len(first), CASES)]
    assert all(sorted(order) == sorted(by_round[0]) for order in by_round), "every case once a round"
    assert len({tuple(order) for order in by_round}) > 1
    pairs = [order[place : place + 2] for order in by_round for place in (0, 2)]
    assert all(a[1] == b[1] for a, b in pairs), "a network's cases follow one another"
    assert len({order[0][1] for order in by_round}) == 2, "either network comes first"
    assert len({a[0] for a, _ in pairs}) == 2, "and either framework"
    fake.visits.clear()
    measured(tmp_path, lines, fresh=True)
    assert fake.visits == first
    fake.visits.clear()
    measured(tmp_path, lines, PLAN.model_copy(update={"seed": 2}))
    assert fake.visits != first


def test_an_interrupted_campaign_keeps_its_finished_runs(
    tmp_path: Path, lines: list[str], fake: type[FakeChild]
) -> None:
    fake.interrupt_at = 7
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, lines)
    assert not (tmp_path / "out").exists()
    assert "round 2/6 run 3/4 " in lines[-1]
    fake.interrupt_at = math.inf
    fake.visits.clear()
    campaign = measured(tmp_path, lines)
    assert any("kept 7 finished runs" in line for line in lines)
    assert any("round 2/6 run 1/1 " in line for line in lines), "what is still to do in the round is counted"
    assert len(fake.visits) == CASES * PLAN.min_rounds - 7
    assert len(campaign.runs) == CASES * PLAN.min_rounds
    assert campaign.runs["run_id"].is_unique


def test_half_a_run_left_by_a_kill_is_not_kept(tmp_path: Path, lines: list[str], fake: type[FakeChild]) -> None:
    fake.interrupt_at = 3
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, lines)
    (tmp_path / "partial" / ".run.abc").mkdir()
    (tmp_path / "partial" / ".run.abc" / "samples.csv").write_text("half")
    fake.interrupt_at = math.inf
    assert len(measured(tmp_path, lines).runs) == CASES * PLAN.min_rounds
    assert not (tmp_path / "partial" / ".run.abc").exists()


@pytest.mark.parametrize(
    ("junk", "message"),
    [
        (lambda run: (run / "samples.csv").write_text("half"), "samples.csv: line 1: column 'run_id' is missing"),
        (lambda run: (run / "runs.csv").unlink(), "runs.csv: cannot be read (No such file or directory)"),
        (lambda run: run.rename(run.with_name(f"other{run.suffix}")), "is not the run that its name says"),
        (lambda run: (run.parent / "thesis.txt").write_text("x"), "thesis.txt: is no run of an interrupted"),
        (lambda run: (run.parent / "photos").mkdir(), "photos: is no run of an interrupted measurement"),
        (lambda run: (run.parent / "complete.json").write_text("{"), "complete.json: line 1: not valid JSON"),
    ],
    ids=["cut", "without a table", "renamed", "a file", "a folder", "a cut marker"],
)
def test_junk_in_the_partial_folder_is_one_line_with_its_mend(
    tmp_path: Path, lines: list[str], fake: type[FakeChild], junk: Callable[[Path], object], message: str
) -> None:
    """And nothing in it is deleted."""
    fake.interrupt_at = 3
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, lines)
    junk(sorted((tmp_path / "partial").iterdir())[0])
    before = sorted(tmp_path.glob("partial/**/*"))
    fake.interrupt_at = math.inf
    with pytest.raises(InputError) as raised:
        measured(tmp_path, lines)
    said = str(raised.value)
    assert said.startswith(str(tmp_path / "partial"))
    assert message in said
    assert "\n" not in said
    assert any(mend in said for mend in ("remove", "move it", "delete it"))
    assert sorted(tmp_path.glob("partial/**/*")) == before


def test_a_file_where_finished_runs_are_kept_is_one_line(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "partial").write_text("kept")
    with pytest.raises(InputError, match="is a file where finished runs are kept; remove it"):
        measured(tmp_path, lines)
    assert (tmp_path / "partial").read_text() == "kept"


KILLED = """
import os, signal, sys
from pathlib import Path
import test_measure as t
from steptime import frameworks
from steptime.core import files
from steptime.measure import lock, partial, run

folder, kills_at = Path(sys.argv[1]), int(sys.argv[2])
frameworks.Child, frameworks.installed_version, lock.LOCK = t.FakeChild, lambda name: "1.0", folder / "lock"
partial.code_facts = lambda: {"code_hash": "same"}
run.time = t.SimpleNamespace(perf_counter=lambda: t.FakeChild.now)
made, opened, written = 0, os.fdopen, []

class Half:
    def __init__(self, file):
        self.file = file
    def __enter__(self):
        return self
    def __exit__(self, *_):
        self.file.close()
    def write(self, text):
        if text.startswith(b"run_id,phase"):
            written.append(1)
            if len(written) == kills_at:
                self.file.write(text[: len(text) // 2])
                self.file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        self.file.write(text)

files.os.fdopen = lambda *a, **k: Half(opened(*a, **k))
t.measure(t.PLAN, folder / "out", folder / "partial", report=print)
"""
"""Measures with the fake children, and is killed in the middle of writing its Nth table of samples."""


@pytest.mark.parametrize("kills_at", [1, 6, CASES * PLAN.min_rounds + 1], ids=["first run", "sixth run", "campaign"])
def test_killed_in_the_middle_of_writing_samples_it_goes_on(
    tmp_path: Path, lines: list[str], fake: type[FakeChild], kills_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # also where the code is being edited beside this test
    monkeypatch.setattr(partial, "code_facts", lambda: {"code_hash": "same"})
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(kills_at)]
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "out/runs.csv").exists()
    halves = [file for file in tmp_path.glob("**/.samples.csv.*.part") if file.stat().st_size]
    assert len(halves) == 1
    campaign = measured(tmp_path, lines)
    assert f"kept {kills_at - 1} finished runs" in lines[0]
    assert len(fake.visits) == CASES * PLAN.min_rounds - (kills_at - 1)
    assert len(campaign.runs) == CASES * PLAN.min_rounds
    assert set(campaign.runs["status"]) == {"finished"}
    whole = measure(PLAN, tmp_path / "whole", tmp_path / "other", report=lines.append)
    drawn = ["started_utc", "load_1min", "duration_s", "code_hash", "git_revision", "git_dirty"]
    assert campaign.runs.drop(columns=drawn).equals(whole.runs.drop(columns=drawn)), "as if it had not been killed"
    assert campaign.samples.equals(whole.samples)


def test_of_two_that_measure_at_once_one_is_refused_and_the_other_unharmed(
    tmp_path: Path, lines: list[str], fake: type[FakeChild]
) -> None:
    """The second is started by the first's own report, in the middle of its campaign, into the same folders."""
    refused: list[str] = []

    def second(line: str) -> None:
        lines.append(line)
        with pytest.raises(InputError, match=f"process {os.getpid()} is measuring on this machine") as raised:
            measure(PLAN, tmp_path / "out", tmp_path / "partial", fresh=True, report=lines.append)
        refused.append(str(raised.value))

    campaign = measure(PLAN, tmp_path / "out", tmp_path / "partial", report=second)
    assert len(refused) == len(lines) == CASES * PLAN.min_rounds + 2
    assert len(campaign.runs) == len(fake.visits) == CASES * PLAN.min_rounds
    assert set(campaign.runs["status"]) == {"finished"}


def test_a_campaign_has_its_plan_from_the_moment_it_is_one(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    replace = os.replace

    def seen(source: str, target: Path) -> None:
        order.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", seen)
    measured(tmp_path, lines)
    assert order[-4:] == ["plan.json", "samples.csv", "runs.csv", "complete.json"]


def test_a_complete_campaign_started_again_is_measured_anew(
    tmp_path: Path, lines: list[str], fake: type[FakeChild]
) -> None:
    measured(tmp_path, lines)
    fake.visits.clear()
    measured(tmp_path, lines)
    assert len(fake.visits) == CASES * PLAN.min_rounds
    fake.visits.clear()
    fake.interrupt_at = 2
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, lines)
    fake.interrupt_at = math.inf
    fake.visits.clear()
    measured(tmp_path, lines)
    assert len(fake.visits) == CASES * PLAN.min_rounds - 2, "resumed: the runs of the complete one did not come back"


def test_more_rounds_keep_the_earlier_ones(tmp_path: Path, lines: list[str], fake: type[FakeChild]) -> None:
    measured(tmp_path, lines, PLAN.model_copy(update={"rounds": 2, "min_rounds": 2}))
    fake.visits.clear()
    measured(tmp_path, lines)
    assert len(fake.visits) == CASES * (PLAN.min_rounds - 2)


def test_upgrading_one_framework_measures_that_one(
    tmp_path: Path, lines: list[str], fake: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(tmp_path, lines)
    before = read_campaign(tmp_path / "out").runs
    fake.visits.clear()
    monkeypatch.setattr(frameworks, "installed_version", lambda name: "2.0" if name == "torch" else "1.0")
    after = measured(tmp_path, lines).runs
    assert {framework for framework, _ in fake.visits} == {"torch"}
    assert len(fake.visits) == 2 * PLAN.min_rounds
    changed = before.merge(after, on="run_id").query("fingerprint_x != fingerprint_y")
    assert set(changed["framework_x"]) == {"torch"}


def test_another_machine_and_back_measures_three_times(
    tmp_path: Path, lines: list[str], fake: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = fingerprint.machine_facts()
    for model in ("A", "B", "A"):
        fake.visits.clear()
        monkeypatch.setattr(fingerprint, "machine_facts", lambda model=model: facts | {"cpu_model": model})
        measured(tmp_path, lines)
        assert len(fake.visits) == CASES * PLAN.min_rounds


def test_changed_code_measures_again(
    tmp_path: Path, lines: list[str], fake: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(tmp_path, lines)
    fake.visits.clear()
    monkeypatch.setattr(partial, "code_facts", lambda: {"code_hash": "other"})
    measured(tmp_path, lines)
    assert len(fake.visits) == CASES * PLAN.min_rounds


def test_a_failing_child_is_a_row_and_the_others_go_on(tmp_path: Path, lines: list[str], fake: type[FakeChild]) -> None:
    fake.failing = {"torch"}
    campaign = measured(tmp_path, lines)
    failed = campaign.runs[campaign.runs["status"] == "failed"]
    assert set(failed["reason"]) == {"no kernel image in lib.so"}, "a path is reduced to its last part"
    assert failed.groupby("case_id").size().tolist() == [2, 2], "given up after two failures"
    finished = campaign.runs[campaign.runs["status"] == "finished"]
    assert finished.groupby("case_id").size().tolist() == [PLAN.min_rounds] * 2
    assert "4 failed" in lines[-1]
    fake.failing, before = set(), len(fake.visits)
    again = measured(tmp_path, lines, PLAN.model_copy(update={"rounds": 7}))
    assert len(fake.visits) - before == 2 * PLAN.min_rounds, "what failed is tried again, what finished is kept"
    assert set(again.runs["status"]) == {"finished"}


def test_out_of_memory_is_an_outcome(tmp_path: Path, lines: list[str], fake: type[FakeChild]) -> None:
    fake.failing, fake.failing_kind = {"torch"}, "out_of_memory"
    campaign = measured(tmp_path, lines, PLAN.model_copy(update={"memory_limit_gib": 1.5}))
    spent = campaign.runs[campaign.runs["status"] == "out_of_memory"]
    assert set(spent["framework"]) == {"torch"}
    assert spent.groupby("case_id").size().tolist() == [2, 2], "given up after the second time"
    assert set(spent["variables"]) == {"memory limit=1.5 GiB"}
    assert fake.limits == {3 * 2**29}
    assert "0 failed, 4 out of memory" in lines[-1]
    assert any("-sequential: out of memory: no kernel image" in line for line in lines)


def test_what_ran_out_of_memory_beside_another_is_measured_alone(
    tmp_path: Path, lines: list[str], fake: type[FakeChild]
) -> None:
    fake.failing_beside_another = {"torch"}
    campaign = measured(tmp_path, lines)
    assert set(campaign.runs["status"]) == {"finished"}
    assert len(campaign.runs) == CASES * PLAN.min_rounds
    assert fake.started.count("torch") == 2 * fake.started.count("tensorflow")


def test_what_a_framework_cannot_do_is_asked_once(tmp_path: Path, lines: list[str], fake: type[FakeChild]) -> None:
    fake.failing, fake.failing_kind = {"torch"}, "unsupported"
    campaign = measured(tmp_path, lines)
    assert fake.started.count("torch") == 2, "once a network"
    waiting = campaign.runs[campaign.runs["status"] == "not_run"]
    assert waiting["network"].tolist() == ["lenet", "mlp"]
    assert set(waiting["reason"]) == {"no kernel image in lib.so"}
    assert set(campaign.runs["stop_reason"]) == {"target"}, "it holds up nothing"
    assert "0 failed, 0 out of memory, 2 cases not run here" in lines[-1]


def test_layers_timed_inside_the_step_bring_its_other_parts(
    fake: type[FakeChild], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [{"layer": "fc1", "forward_s": 0.002, "backward_s": 0.004}]
    profile = {"layers": layers, "parts": {"dispatch": 0.001, "plain": 0.009}}
    monkeypatch.setattr(fake, "profile", lambda self, count: {"samples": [profile] * count})
    fake.without = {"layers"}
    campaign = rounds.measure(PLAN, tmp_path / "out", tmp_path / "partial", report=lambda line: None)
    parts = campaign.samples[campaign.samples["phase"] == "profiled"]
    assert parts.groupby("layer")["time_s"].unique().map(list).to_dict() == {"dispatch": [0.001], "plain": [0.009]}
    assert (parts["is_warmup"] == (parts["repeat"] == 0)).all()
    forward = campaign.samples[(campaign.samples["phase"] == "forward") & campaign.samples["layer"].notna()]
    assert set(forward["time_s"]) == {0.002}


@pytest.mark.parametrize("command", ["phases", "layers"])
def test_a_setting_without_phases_or_layers_has_no_rows_of_them(
    tmp_path: Path, lines: list[str], fake: type[FakeChild], command: str
) -> None:
    fake.without = {command}
    campaign = measured(tmp_path, lines)
    assert set(campaign.runs["status"]) == {"finished"}
    assert campaign.samples["layer"].notna().any() == (command == "phases")
    assert ("update" in set(campaign.samples["phase"])) == (command == "layers")


def test_a_setting_that_only_infers_has_forward_passes(tmp_path: Path, lines: list[str], fake: type[FakeChild]) -> None:
    fake.inference_only, fake.without = {"torch"}, {"layers"}
    campaign = measured(tmp_path, lines, PLAN.model_copy(update={"profile_rounds": 0}))
    runs = campaign.runs[campaign.runs["framework"] == "torch"]
    assert len(runs) == 2 * PLAN.min_rounds
    assert set(runs["status"]) == {"finished"}
    assert set(runs["reason"]) == {"inference only"}
    assert runs[["loss_first", "loss_last", "energy_j"]].isna().all(axis=None)
    own = campaign.samples[campaign.samples["run_id"].isin(runs["run_id"])]
    assert set(own["phase"]) == {"forward"}
    counts = own.groupby(["run_id", "is_warmup"]).size().unstack()
    assert set(counts[True]) == {PLAN.warmups}
    assert set(counts[False]) == {PLAN.samples}
    assert any("torch-mlp-quick-b32-float32-cpu-t1-sequential: 4 ms" in line for line in lines)
    assert set(campaign.runs["stop_reason"]) == {"target"}, "and settle like others"


def test_only_dtypes_that_a_setting_has_are_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLAN.model_copy(update={"dtypes": ("float32", "bfloat16"), "networks": ("mlp",)})
    named = [(case.framework, case.dtype) for case in plan.cases()]
    assert named == [("torch", "float32"), ("torch", "bfloat16"), ("tensorflow", "float32")]
    with pytest.raises(InputError, match="'tensorflow' has none of them; it has float32: add one or leave"):
        read_plan({"frameworks": ["torch", "tensorflow"], "dtypes": ["bfloat16"]}, "measure")


def test_loaders_may_share_cores_and_it_is_said(
    tmp_path: Path, lines: list[str], fake: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cores: a step and one loader have one each; with two, waiting for a core is a part of what is measured."""
    for module in (rounds, run):
        monkeypatch.setattr(module, "cores_allowed", lambda: 2)
    fake.hit = set(range(100))
    inputs = ("jpeg-0", "jpeg-1", "jpeg-2")
    plan = PLAN.model_copy(update={"frameworks": ("torch",), "networks": ("lenet",), "inputs": inputs})
    table = measured(tmp_path, lines, plan).joined().query("phase == 'step' and not is_warmup")
    assert table.groupby("input")["is_disturbed"].mean().to_dict() == {"jpeg-0": 1, "jpeg-1": 1, "jpeg-2": 0}
    reasons = table.groupby("input")["reason"].first().dropna().to_dict()
    assert reasons == {"jpeg-2": "3 threads on 2 cores: their delays are the case's own"}


def test_cases_that_cannot_run_here_are_listed(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frameworks, "installed_version", lambda name: None if name == "tensorflow" else "1.0")
    monkeypatch.setattr(rounds, "cores_allowed", lambda: 1)
    monkeypatch.setattr(fingerprint, "gpus", list)
    devices, inputs = ("cpu", "cuda"), ("sequential", "prefetch")
    plan = PLAN.model_copy(update={"networks": ("mlp",), "devices": devices, "inputs": inputs})
    runs = measured(tmp_path, lines, plan).runs
    waiting = runs[runs["status"] == "not_run"].set_index("case_id")["reason"].to_dict()
    assert len(waiting) == 4 + 3
    assert waiting["torch-mlp-quick-b32-float32-cuda-t1-sequential"] == "no NVIDIA GPU on this machine"
    assert waiting["torch-mlp-quick-b32-float32-cpu-t1-prefetch"] == "needs 2 cores, 1 allowed here"
    assert "tensorflow" in waiting["tensorflow-mlp-quick-b32-float32-cpu-t1-sequential"]
    assert len(runs[runs["status"] == "finished"]) == PLAN.min_rounds


def test_a_framework_whose_programs_are_missing_is_listed_with_the_command(
    tmp_path: Path, lines: list[str], fake: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "system packages are missing: openjdk: apt-get install -y openjdk"
    monkeypatch.setattr(frameworks, "missing_packages", lambda name: said if name == "tensorflow" else None)
    runs = measured(tmp_path, lines).runs
    waiting = runs[runs["status"] == "not_run"]
    assert set(waiting["framework"]) == {"tensorflow"}
    assert set(waiting["reason"]) == {said}
    assert set(fake.started) == {"torch"}


def planted(delays_s: list[float | None], steals_s: list[float], time_s: float = 0.02) -> list[dict[str, Any]]:
    return [
        {"time_s": time_s, "run_delay_s": delay, "steal_s": steal, "involuntary_switches": 50, "load_1min": 9.0}
        for delay, steal in zip(delays_s, steals_s, strict=True)
    ]


def test_disturbance_is_decided_by_the_covariates() -> None:
    samples = planted([0.0, 0.0009, 0.001, 0.0005, None, None], [0.0, 0.0, 0.0, 0.0005, 0.01, 0.0])
    assert run.disturbed(samples) == [False, False, True, True, True, False]


def test_a_slow_sample_is_not_a_disturbed_one() -> None:
    samples = planted([0.0] * 9, [0.0] * 9)
    samples[4]["time_s"] = 2.0
    assert not any(run.disturbed(samples))
    assert run.disturbed(planted([0.01, 0.0], [0.0, 0.01]), own_delays=True) == [False, True]
    samples[5] |= {"run_delay_s": 0.015, "time_s": 0.001}
    assert run.disturbed(samples).index(True) == 5, "a fast one with a delay is"


def test_steps_are_cut_to_what_the_run_can_hold() -> None:
    assert run.affordable(40, [3.0, 0.01]) == 40
    assert run.affordable(40, [3.0, 3.0]) == 10
    assert run.affordable(40, [100.0]) == run.FEWEST_SAMPLES
    assert run.affordable(3, [100.0]) == 3


def test_a_cut_run_says_so(tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RUN_TIME_S", 0.06)
    assert set(measured(tmp_path, lines).runs["stop_reason"]) == {"target, steps cut to 6 by the run's time"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": {"mlp": -16}}, "batch.mlp.0 = -16: Input should be greater than 0"),
        ({"networks": ["vgg"]}, "'vgg' is not known; known here: mlp, lenet"),
        ({"frameworks": ["caffe3"]}, "'caffe3' is not known; known here:"),
        ({"networks": ["mlp", "mlp"]}, "a name comes twice"),
        ({"networks": []}, "networks = []"),
        ({"networks": ["mlp"], "batch": {"lenet": 8}}, "no batch for 'mlp'"),
        ({"batch": {"vgg": 8}}, "'vgg' is not known"),
        ({"batch": {"mlp": True}}, "batch.mlp.0 = True"),
        ({"seed": 2**40}, "seed = 1099511627776"),
        ({"memory_limit_gib": 1e300}, "memory_limit_gib = 1e+300"),
        ({"networks": ["mlp"], "batch": {"mlp": [8, 8]}}, "a batch of 'mlp' comes twice"),
        ({"dtypes": ["float12"]}, "'float12' is not known"),
        ({"devices": ["tpu"]}, "devices.0 = 'tpu'"),
        ({"inputs": ["jpeg-3"]}, "inputs.0 = 'jpeg-3'"),
        ({"memory_limit_gib": 0}, "memory_limit_gib = 0"),
        ({"samples": 0}, "samples = 0"),
        ({"rounds": 1}, "rounds = 1: at least 2; one process a case has no interval"),
        ({"min_rounds": -1}, "min_rounds = -1: at least 2"),
        ({"budget_s": -1}, "budget_s = -1"),
        ({"threads": []}, "threads = []"),
        ({"threads": [0]}, "threads.0 = 0"),
        ({"memory_limit_gib": -1}, "memory_limit_gib = -1"),
        ({"sample": 4}, "unknown key 'sample'"),
        ({"target_half_width": -0.1}, "target_half_width = -0.1"),
    ],
)
def test_a_bad_plan_is_one_line(change: dict[str, Any], message: str, fake: type[FakeChild]) -> None:
    with pytest.raises(InputError) as raised:
        read_plan(change, "params.yaml: quick.measure")
    assert str(raised.value).startswith("params.yaml: quick.measure: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not fake.visits
