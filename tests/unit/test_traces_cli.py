"""`steptime trace` and `steptime collectives read`: what they print and write, and bad files."""

import csv
import json

import planted_trace as planted
import pytest
from conftest import ROOT, Checkout


def steptime(*words):
    return Checkout(ROOT).run("steptime", *map(str, words))


@pytest.fixture
def ranks(tmp_path):
    return planted.two_ranks(tmp_path, skew_ms=7.0)


def test_show(ranks):
    done = steptime("trace", "show", *ranks, "--step", 3)
    assert done.returncode == 0, done.stderr
    assert "clock moved by -7 ms" in done.stdout
    assert "critical path of step 3, 19 ms" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["3", "0", "20", "12", "6", "0", "1", "1", "2"] in rows
    assert ["all_reduce", "4000000", "1", "2", "2"] in rows


def test_grow_to_a_table(ranks, tmp_path):
    out = tmp_path / "pred.csv"
    done = steptime("trace", "grow", *ranks, "--workers", 1, "--workers", 64, "--link", "1gbe", "--out", out)
    assert done.returncode == 0, done.stderr
    one, many = csv.DictReader(out.open())
    assert float(one["step_time_s"]) == pytest.approx(18e-3)
    assert float(many["step_time_s"]) > float(one["step_time_s"])
    assert {one["kind"], many["kind"]} == {"modelled"}
    assert "modelled" in done.stdout


def test_grow_to_a_timeline(ranks, tmp_path):
    out = tmp_path / "step.json"
    done = steptime("trace", "grow", *ranks, "--workers", 8, "--link", "10gbe", "--out", out)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["otherData"]["kind"] == "modelled"


def test_read_collectives_and_fit_them(tmp_path):
    for workers in (2, 4):
        rows = "".join(f"{size}  {10 * workers + size / 1000:.2f}\n" for size in (1024, 16384, 262144, 4194304))
        head = "# OSU MPI Allreduce Latency Test v7.4\n# Size       Avg Latency(us)\n"
        (tmp_path / f"osu{workers}.txt").write_text(head + rows)
        out = tmp_path / f"{workers}.csv"
        place = ("--group", "ours", "--workers", workers, "--nodes", workers)
        done = steptime("collectives", "read", tmp_path / f"osu{workers}.txt", *place, "--out", out)
        assert done.returncode == 0, done.stderr
    both = tmp_path / "both.csv"
    done = steptime("collectives", "read", tmp_path / "2.csv", tmp_path / "4.csv", "--out", both)
    assert done.returncode == 0, done.stderr
    (tmp_path / "at.csv").write_text("group,workers,nodes,n_bytes\nours,4,4,65536\n")
    out = tmp_path / "pred.csv"
    done = steptime("collectives", "fit", "--observed", both, "--at", tmp_path / "at.csv", "--out", out)
    assert done.returncode == 0, done.stderr
    (row,) = csv.DictReader(out.open())
    assert 40e-6 < float(row["time_s"]) < 400e-6


@pytest.mark.parametrize(
    ("command", "content", "said"),
    [
        ("show", b"", "is empty"),
        ("show", b"\x1f\x8b\x08\x00", "truncated gzip"),
        ("grow", b"\x80\x04\x95", "is no trace in JSON"),
        ("grow", b'[{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1,"dur":2}]', "two workers or more"),
        ("read", b"n_bytes,time_s\n10,nan\n", "line 2: time_s = 'nan'"),
    ],
)
def test_bad_files_are_one_line_and_leave_nothing(tmp_path, command, content, said):
    bad, out = tmp_path / "bad", tmp_path / "out.csv"
    bad.write_bytes(content)
    words = {
        "show": ("trace", "show", bad),
        "grow": ("trace", "grow", bad, "--workers", 8, "--link", "10gbe", "--out", out),
        "read": ("collectives", "read", bad, "--group", "a", "--workers", 2, "--nodes", 1, "--out", out),
    }[command]
    done = steptime(*words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr
    assert "bad" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--workers", 0, "--link", "10gbe"), "workers = 0"),
        (("--workers", 8, "--link", "string"), "link 'string'"),
        (("--workers", 8, "--workers", 9, "--link", "10gbe"), "do not fit one timeline"),
    ],
)
def test_growing_to_what_is_not_leaves_nothing(ranks, tmp_path, options, said):
    out = tmp_path / "out.json"
    done = steptime("trace", "grow", *ranks, *options, "--out", out)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr
    assert not out.exists()
