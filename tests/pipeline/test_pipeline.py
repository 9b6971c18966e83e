"""The whole pipeline, really run by DVC, in a copy of the checkout with a tiny study: one network, one framework."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from conftest import DERIVED, MEASURED, Checkout

from steptime.core.campaign import read_campaign

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores, to take one away")


def hashes(checkout: Checkout) -> dict[str, str]:
    """Every file of the copy but for DVC's and Git's own, and the runs' raw copies, which keep times."""
    ignored = {".git", ".dvc", ".runs", ".scratch", ".partial", "__pycache__"}
    files = [path for path in checkout.root.rglob("*") if path.is_file() and not ignored & set(path.parts)]
    return {
        str(path.relative_to(checkout.root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)
    }


def started(checkout: Checkout) -> pd.Series:
    return read_campaign(checkout.root / "data/raw/local").runs["started_utc"]


def test_a_built_study_changes_no_tracked_file_but_the_lock(built: Checkout) -> None:
    assert (built.root / "data/reports/index.html").is_file()
    assert built.git("status", "--porcelain").split() in ([], ["M", "dvc.lock"], ["??", "dvc.lock"])


def test_a_second_start_runs_the_fingerprint_only_and_changes_nothing(built: Checkout) -> None:
    before, status = hashes(built), built.git("status", "--porcelain")
    assert built.repro() == ["fingerprint"]
    assert hashes(built) == before
    assert built.git("status", "--porcelain") == status


def test_forced_derived_stages_come_out_the_same_to_the_byte(built: Checkout) -> None:
    before = hashes(built)
    assert built.repro("--force", "--single-item", *DERIVED) == DERIVED
    assert hashes(built) == before


def test_the_report_s_code_re_measures_nothing(built: Checkout) -> None:
    with edited(built.root / "lib/steptime/report/site.py"):
        status = built.run("dvc", "status").stdout
    stale = re.findall(r"^(\w+):", status, re.MULTILINE)
    assert "site" in stale
    assert not set(stale) & set(MEASURED)


@pytest.mark.parametrize("package", ["core", "measure", "networks"])
def test_the_measuring_code_re_measures_everything(built: Checkout, package: str) -> None:
    with edited(built.root / f"lib/steptime/{package}/__init__.py"):
        stale = re.findall(r"^(\w+):", built.run("dvc", "status").stdout, re.MULTILINE)
    assert set(MEASURED) <= set(stale)


class edited:
    """A comment at the end of a file while the block runs."""

    def __init__(self, path: Path) -> None:
        self._path, self._text = path, path.read_text()

    def __enter__(self) -> None:
        self._path.write_text(self._text + "\n# edited\n")

    def __exit__(self, *_: object) -> None:
        self._path.write_text(self._text)


def test_another_machine_and_the_first_one_again_are_both_measured(built: Checkout) -> None:
    """A -> B -> A, by taking a core away: no timing comes back from a cache."""
    published = {
        name: digest for name, digest in hashes(built).items() if name.startswith(("data/published", "data/c"))
    }
    runs = [started(built)]
    one_core = ("taskset", "--cpu-list", str(min(os.sched_getaffinity(0))))
    for prefix in (one_core, ()):
        assert built.repro("measure", prefix=prefix) == ["fingerprint", *MEASURED]
        runs.append(started(built))
    assert runs[0].max() < runs[1].min()
    assert runs[1].max() < runs[2].min()
    assert published == {
        name: digest for name, digest in hashes(built).items() if name.startswith(("data/published", "data/c"))
    }


def test_a_killed_measurement_keeps_every_finished_run(built: Checkout) -> None:
    built.edit_params(**{"quick.measure.rounds": 4, "quick.measure.min_rounds": 4, "quick.measure.seed": 2})
    dvc = [str(Path(sys.executable).parent / "dvc"), "repro", "--force", "--single-item", "measure"]
    log = built.root.parent / "killed.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            dvc, cwd=built.root, env=built.environment, stdout=file, stderr=file, start_new_session=True
        )
        deadline = time.monotonic() + 120
        while "round 2/4" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    kept = finished(built)
    assert 2 <= len(kept) < 4, log.read_text()

    done = built.run("dvc", "repro", "measure")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"kept {len(kept)} finished runs" in done.stderr
    assert kept.items() <= finished(built).items()
    assert (read_campaign(built.root / "data/raw/local").runs["status"] == "finished").sum() == 4


def finished(checkout: Checkout) -> dict[str, float]:
    """The finished runs in the partial folder, each with the time at which it was written."""
    folders = (checkout.root / "data/.partial/measure").glob("*-r0*")
    return {folder.name: (folder / "samples.csv").stat().st_mtime for folder in folders}
