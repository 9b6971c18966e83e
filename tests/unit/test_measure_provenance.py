"""What a run says of its machine and code, the fingerprints, the lock, and what may be published."""

import json
import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from steptime.core.campaign import (
    RUNS,
    SAMPLES,
    Campaign,
    as_table,
    campaign_folders,
    read_campaign,
    write_campaign,
)
from steptime.core.errors import InputError
from steptime.core.files import write_json
from steptime.frameworks import SETTINGS
from steptime.measure import (
    Plan,
    add_campaign,
    check_names,
    fingerprints,
    lock,
    peaks,
    provenance,
    read_plan_file,
    write_fingerprints,
)
from steptime.measure.plan import DECIDE_CASES
from steptime.measure.run import Visit, base_row


def cgroup(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("files", "membership", "cores"),
    [
        ({}, "0::/\n", 4),
        ({"cpu.max": "max 100000\n"}, "0::/\n", 4),
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "50000 100000\n"}, "0::/\n", 1),
        ({"cpu.max": "900000 100000\n"}, "0::/\n", 4),
        ({"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, "0::/a/b\n", 2),
        ({"cpu.max": "300000 100000\n"}, "0::/not/visible/here\n", 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "3:cpu,cpuacct:/\n", 4),
        ({"cpu/a/cpu.cfs_quota_us": "120000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, "3:cpu:/a\n2:cpuset:/\n", 2),
        (
            {"cpu,cpuacct/cpu.cfs_quota_us": "90000\n", "cpu,cpuacct/cpu.cfs_period_us": "90000\n"},
            "3:cpu,cpuacct:/\n",
            1,
        ),
    ],
)
def test_cores_are_those_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], membership: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    (tmp_path / "membership").write_text(membership)
    assert provenance.cores_allowed(cgroup(tmp_path / "cgroup", files), tmp_path / "membership") == cores


def test_affinity_bounds_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7})
    assert provenance.cores_allowed() == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no such file: /opt/conda/lib/libx.so.6", "no such file: libx.so.6"),
        ("in '/home/ann/x.py', line 3", "in 'x.py', line 3"),
        ("~/data/a.csv is missing", "a.csv is missing"),
        ("C:\\Users\\ann\\x.dll failed", "x.dll failed"),
        ("forward and/or backward, 1/2 N/A, a / b", "forward and/or backward, 1/2 N/A, a / b"),
        ("lib/steptime/core/files.py", "lib/steptime/core/files.py"),
    ],
)
def test_absolute_paths_are_reduced(text: str, expected: str) -> None:
    assert provenance.without_paths(text) == expected
    assert bool(provenance.ABSOLUTE_PATH.search(text)) == (text != expected)


def test_what_a_run_says_of_itself_names_nobody() -> None:
    plan = Plan()
    row = base_row(Visit(plan.cases()[0], 0, 0, "f"), plan)
    assert set(row) <= set(RUNS.columns)
    for value in row.values():
        if isinstance(value, str):
            assert not provenance.ABSOLUTE_PATH.search(value)
            assert socket.gethostname() not in value.split()
    assert 1 <= row["cores_allowed"] <= row["cores_present"]
    assert isinstance(row["is_virtual"], bool)


def git(folder: Path, *arguments: str) -> None:
    name = ["-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "-C", folder, *name, *arguments], check=True, capture_output=True)


def test_a_changed_lock_file_is_not_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "lib")
    (tmp_path / "lib").mkdir()
    assert provenance._git("rev-parse", "HEAD") is None
    assert provenance._is_dirty() is None
    git(tmp_path, "init")
    for name in ("dvc.lock", "lib/code.py"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    (tmp_path / "dvc.lock").write_text("2")
    assert provenance._is_dirty() is False
    (tmp_path / "new.py").write_text("2")
    assert provenance._is_dirty() is True


def test_code_hash_follows_the_measuring_code_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path)
    for folder in ("measure", "report"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("1")
    first = provenance.code_hash()
    (tmp_path / "report" / "a.py").write_text("2")
    assert provenance.code_hash() == first
    (tmp_path / "measure" / "a.py").write_text("2")
    assert provenance.code_hash() != first


def test_fingerprints_are_stable_and_import_no_framework(tmp_path: Path) -> None:
    write_fingerprints(tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(first) == {"machine.json", *(f"{name}.json" for name in SETTINGS)}
    program = (
        "import sys, json; from steptime.measure import fingerprints; found = fingerprints();"
        "assert not {'torch', 'tensorflow'} & set(sys.modules); print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == fingerprints()
    write_fingerprints(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    assert socket.gethostname() not in json.loads(done.stdout)["machine"].values()


HOLDER = """
import sys
from pathlib import Path
from steptime.measure import lock
lock.LOCK = Path(sys.argv[1])
with lock.measuring_lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_measuring_process_is_refused_naming_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    monkeypatch.setattr(lock, "LOCK", path)
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"process {holder.pid} is measuring") as raised, lock.measuring_lock():
            pass
        assert "\n" not in str(raised.value)
        holder.kill()
    with lock.measuring_lock():
        assert path.read_text() == f"{os.getpid()}\n"
    assert path.stat().st_mode & 0o777 == 0o666


def test_the_lock_is_free_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOCK", tmp_path / "lock")
    with pytest.raises(ZeroDivisionError), lock.measuring_lock():
        raise ZeroDivisionError
    with lock.measuring_lock():
        pass


def test_peaks_are_of_the_right_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a slip of a factor (bytes for values, milliseconds for seconds) would leave."""
    monkeypatch.setattr(lock, "LOCK", tmp_path / "lock")
    found = peaks(threads=1, seconds=0.01)
    assert found["rounds"] >= 5
    assert 1e8 < found["peak_flops_per_s"] < 1e13
    assert 1e7 < found["memory_bytes_per_s"] < 1e12
    assert 0 < found["timer_resolution_s"] < 1e-3


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return record(tmp_path / "local", {})


def record(folder: Path, changes: dict[str, str]) -> Path:
    plan = Plan()
    row = base_row(Visit(plan.cases()[0], 0, 0, "f"), plan) | {"status": "failed", "reason": "it fell"} | changes
    write_campaign(Campaign("local", as_table([row], RUNS), as_table([], SAMPLES)), folder)
    return folder


def test_a_campaign_is_copied_and_never_overwritten(recorded: Path, tmp_path: Path) -> None:
    target = add_campaign(recorded, "lab-1", tmp_path)
    assert target == tmp_path / "data" / "campaigns" / "lab-1"
    assert (target / "runs.csv").read_bytes() == (recorded / "runs.csv").read_bytes()
    assert read_campaign(target).name == "lab-1"
    with pytest.raises(InputError, match="exists already"):
        add_campaign(recorded, "lab-1", tmp_path)


@pytest.mark.parametrize("name", ["", "Lab", "-a", "a/b", "..", "a b", "a_b"])
def test_a_campaign_name_is_plain(recorded: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="campaign name"):
        add_campaign(recorded, name, tmp_path)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (f"on {socket.gethostname()}: no", "the host's name"),
        (f"asked by {pwd.getpwuid(os.getuid()).pw_name}.", "the user's name"),
        (f"in {Path.home()}: no", "the user's home folder"),
        ("see /var/lib/x.so", "an absolute path"),
    ],
)
def test_a_campaign_that_names_somebody_is_refused(tmp_path: Path, value: str, what: str) -> None:
    folder = record(tmp_path / "local", {"reason": value})
    with pytest.raises(InputError, match="line 2: reason = ") as raised:
        add_campaign(folder, "lab", tmp_path)
    assert what in str(raised.value) or "user's name" in str(raised.value), "a home folder can be the user's name"
    assert not (tmp_path / "data").exists()


def test_an_invalid_campaign_is_not_added(recorded: Path, tmp_path: Path) -> None:
    with (recorded / "runs.csv").open("a") as file:
        file.write("half a row\n")
    with pytest.raises(InputError, match="line 3: 1 fields"):
        add_campaign(recorded, "lab", tmp_path)
    assert not (tmp_path / "data").exists()


def test_a_campaign_s_plan_goes_with_it_and_measures_the_same_again(recorded: Path, tmp_path: Path) -> None:
    plan = Plan(networks=("mlp",), batch={"mlp": (8, 16)}, rounds=2)
    write_json(recorded / "plan.json", plan.model_dump(mode="json"))
    target = add_campaign(recorded, "lab-plan", tmp_path)
    assert read_plan_file(target / "plan.json") == plan
    write_json(recorded / "plan.json", plan.model_dump(mode="json") | {"rounds": "many"})
    with pytest.raises(InputError, match=r"plan\.json: rounds = 'many'"):
        add_campaign(recorded, "lab-other", tmp_path)
    assert not (tmp_path / "data/campaigns/lab-other").exists()


@pytest.mark.parametrize("key", DECIDE_CASES)
def test_a_plan_that_does_not_say_its_cases_is_one_line(tmp_path: Path, key: str) -> None:
    whole = Plan(networks=("mlp",), batch={"mlp": 8}).model_dump(mode="json")
    write_json(tmp_path / "plan.json", {name: value for name, value in whole.items() if name != key})
    with pytest.raises(InputError, match=rf"plan\.json: key '{key}' is missing; add it"):
        read_plan_file(tmp_path / "plan.json")
    write_json(tmp_path / "plan.json", {name: value for name, value in whole.items() if name != "memory_limit_gib"})
    assert read_plan_file(tmp_path / "plan.json").networks == ("mlp",), "a plan from before there was a limit"


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"frameworks": ["torch"]}'])
def test_a_file_that_is_no_plan_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(InputError, match=r"^[^\n]*plan\.json: (key '\w+' is missing|expected a mapping)[^\n]*$"):
        read_plan_file(tmp_path / "plan.json")


def test_an_unknown_framework_is_told_and_an_unknown_network_refused(tmp_path: Path) -> None:
    folder = record(tmp_path / "theirs", {"framework": "darknet", "case_id": "theirs"})
    (told,) = check_names(read_campaign(folder), folder)
    assert told.startswith(f"{folder}/runs.csv: line 2: framework = 'darknet': is none of this version's; ")
    assert add_campaign(folder, "theirs", tmp_path).is_dir()
    folder = record(tmp_path / "other", {"network": "vgg17", "case_id": "other"})
    with pytest.raises(InputError, match=r"runs\.csv: line 2: network = 'vgg17': is not described here; .*zoo\.py"):
        add_campaign(folder, "other", tmp_path)
    assert not (tmp_path / "data/campaigns/other").exists()
    known = record(tmp_path / "ours", {})
    assert check_names(read_campaign(known), known) == []


def test_an_end_while_a_campaign_is_added_leaves_none(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither folder nor name: added again, it is whole."""
    write_json(recorded / "plan.json", Plan().model_dump(mode="json"))
    move = os.replace
    for last in ("plan.json", "samples.csv", "runs.csv"):

        def end_after(source: str, target: Path, last: str = last) -> None:
            move(source, target)
            if Path(target).name == last:
                raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", end_after)
        with pytest.raises(KeyboardInterrupt):
            add_campaign(recorded, "lab", tmp_path)
        monkeypatch.setattr(os, "replace", move)
        assert not (tmp_path / "data/campaigns").exists()
    target = add_campaign(recorded, "lab", tmp_path)
    assert sorted(path.name for path in target.iterdir()) == ["plan.json", "runs.csv", "samples.csv"]
    assert campaign_folders(tmp_path) == {"lab": target}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("[Errno 17] File exists: '/home/jane doe/a project/data'", "[Errno 17] File exists: 'data'"),
        ('open("/srv/x y/z.so") failed', 'open("z.so") failed'),
        ("in /home/jane/code.py, line 3", "in code.py, line 3"),
        ("it's 3/4 of 'a / b'", "it's 3/4 of 'a / b'"),
    ],
)
def test_paths_lose_their_folders_also_where_these_have_spaces(text: str, kept: str) -> None:
    assert provenance.without_paths(text) == kept
