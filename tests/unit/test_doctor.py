"""The doctor: what is missing is named, with the one command that mends it."""

import shutil
from pathlib import Path

import pytest
from conftest import ROOT, Checkout

from steptime import doctor
from steptime.core.packages import SystemPackage, system_packages
from steptime.frameworks import environments


def only(root: Path, what: str) -> doctor.Finding:
    (finding,) = [finding for finding in doctor.findings(root) if finding.what == what]
    return finding


def test_every_system_package_of_study_and_tests_is_looked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SystemPackage, "found", None)
    listed = system_packages(root)
    assert {"git", "make", "chromium", "libopenmpi-dev"} <= {package.name for package in listed}
    for package in listed:
        if package.needed_by == "vintage":
            continue
        finding = only(root, package.name)
        assert not finding.ok
        assert finding.mend.endswith(f"apt-get install -y {package.name}")
        assert package.purpose in finding.found
        assert finding.required == (package.needed_by == "study")


def test_a_package_is_found_by_its_program_or_by_a_file_with_wildcards(tmp_path: Path) -> None:
    (tmp_path / "x86_64").mkdir()
    (tmp_path / "x86_64/libthing.so").touch()
    assert SystemPackage("thing", f"{tmp_path}/*/libthing.so", "", "test").found == f"{tmp_path}/x86_64/libthing.so"
    assert SystemPackage("thing", f"{tmp_path}/*/libother.so", "", "test").found is None
    assert SystemPackage("shell", "sh", "", "test").found == shutil.which("sh")
    assert SystemPackage("none", "no-such-program", "", "test").found is None


def test_the_frameworks_own_environments_are_one_line_that_is_not_required(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    finding = only(root, "frameworks' own environments")
    assert finding.found.startswith("0 of 8 complete; not: caffe, cntk,")
    assert not finding.required
    assert finding.mend == "steptime env list"


def test_a_package_that_differs_from_the_lock_is_named_with_both_versions(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lib/locks", tmp_path / "lib/locks")
    lock = tmp_path / "lib/locks/cpu.txt"
    lock.write_text(lock.read_text().replace("click==", "click==1") + "no-such-package==1.0\n")
    finding = only(tmp_path, "Python packages")
    assert not finding.ok
    assert "(lock: 1" in finding.found
    assert "no-such-package missing (lock: 1.0)" in finding.found
    assert "make env" in finding.mend


def test_little_memory_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "FREE_MEMORY_GB", 10**6)
    assert not only(root, "free memory").ok


def test_something_required_missing_is_exit_status_1(tmp_path: Path) -> None:
    """With a PATH that holds nothing but the environment."""
    checkout = Checkout(ROOT)
    done = checkout.run("steptime", "doctor", PATH=checkout.environment["PATH"].split(":")[0])
    assert done.returncode == 1
    assert "MISSING  git: missing" in done.stdout
    assert "apt-get install -y git" in done.stdout
