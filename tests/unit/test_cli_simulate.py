"""`steptime simulate` on the committed campaign."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from steptime.cli import cli
from steptime.core.errors import InputError
from steptime.traces.perfetto import read_timeline


def run(*options: str) -> str:
    done = CliRunner().invoke(cli, ["simulate", "fcn5", *options], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_simulate_says_what_limits_the_step_and_writes_a_timeline(tmp_path: Path) -> None:
    out = tmp_path / "timeline.json"
    text = run("--workers", "8", "--late", "3", "0.05", "--out", str(out))
    assert "simulated" in text
    assert "if device took no time" in text
    line = read_timeline(out)
    assert line.kind == "simulated"
    (host,) = [task for task in line.tasks if task.kind == "host"]
    assert host.worker == 3
    assert host.end_s - host.start_s == pytest.approx(0.05)
    assert line.dependencies


def test_a_slow_link_is_folded(tmp_path: Path) -> None:
    text = run("--workers", "100000", "--slow-link", "5", "3")
    assert "lag" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--schedule", "ring"], "schedule = 'ring': unknown"),
        (["--late", "16", "1"], "worker 16"),
        (["--late", "1", "-1"], "duration_s = -1"),
        (["--slow-link", "1", "0.5"], "factor = 0.5"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_written(options, said, tmp_path: Path) -> None:
    out = tmp_path / "timeline.json"
    with pytest.raises(InputError, match=said):
        run(*options, "--out", str(out))
    assert not out.exists()
