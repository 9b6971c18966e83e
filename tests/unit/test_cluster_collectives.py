"""The benchmark of collectives: what it writes is what the fit reads, and a fault is one line."""

from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from steptime.cli import cli
from steptime.cluster import collectives
from steptime.cluster.collectives import OPERATIONS, CollectivesPlan, rate_name, run_collectives, write_collectives
from steptime.cluster.launcher import RunFailed
from steptime.cluster.links import check_able, rate_of
from steptime.core.errors import InputError
from steptime.core.files import validated
from steptime.model.observations import COLLECTIVES, read_observed

PLAN = CollectivesPlan(operations=OPERATIONS, bytes=(1000, 300_000), workers=(2, 3), rounds=1, repeats=4, budget_s=0.5)


def quiet(line: str) -> None:
    """Says nothing."""


def test_every_operation_is_measured_and_the_fit_reads_the_table(tmp_path: Path) -> None:
    found = run_collectives(PLAN, quiet)
    write_collectives(found, PLAN, tmp_path)
    table = read_observed(tmp_path / "collectives.csv", COLLECTIVES)
    assert set(table["group"]) == {f"{name} gloo loopback" for name in OPERATIONS}
    assert set(zip(table["workers"], table["n_bytes"], strict=True)) == {
        *((2, 1000), (2, 300_000)),
        *((3, 1008), (3, 300_000)),
    }
    assert (table["time_s"] > 0).all()
    assert (table["nodes"] == 1).all()
    samples = pd.read_csv(tmp_path / "samples.csv")
    assert (samples.groupby(["operation", "workers", "n_bytes"]).size() >= 3).all()
    assert "machine" in (tmp_path / "plan.json").read_text()


def test_over_links_each_worker_is_a_node_and_no_message_beats_the_rate() -> None:
    try:
        check_able()
    except InputError as error:
        pytest.skip(str(error))
    rate = 100e6
    plan = CollectivesPlan(bytes=(1_500_000,), workers=(3,), rates=(rate,), rounds=1, repeats=3)
    found = run_collectives(plan, quiet)
    (point,) = found.points.to_dict("records")
    assert point["nodes"] == 3
    assert point["group"] == "all_reduce gloo 100mbit"
    # A ring sends 2 (N - 1) / N n; a burst may leave at once.
    assert point["time_s"] > 0.9 * (4 / 3 * 1_500_000 - 131_072) * 8 / rate
    (link,) = found.links.to_dict("records")
    assert link["beta_s_per_byte"] > 0.97 * 8 / rate


@pytest.mark.parametrize("rate", ["1gbit", "250mbit", "2.5gbit", "500kbit"])
def test_a_rate_is_named_as_it_is_written(rate: str) -> None:
    assert rate_name(rate_of(rate)) == rate


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"operations": ("gather",)}, "'gather' is not known; known are all_reduce"),
        ({"workers": (1,)}, "workers.0 = 1"),
        ({"bytes": (0,)}, "bytes.0 = 0"),
        ({"bytes": (1 << 40,)}, "at most 1073741824"),
    ],
)
def test_a_plan_that_is_none_is_one_line(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as found:
        validated(CollectivesPlan, wrong, "collectives run")
    assert said in str(found.value)


def test_a_rank_that_dies_is_one_line_and_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def dies(*_: object, **__: object) -> None:
        raise RunFailed("rank 1 was ended by SIGKILL", 1)

    monkeypatch.setattr(collectives, "run_gloo", dies)
    done = CliRunner().invoke(cli, ["collectives", "run", "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == "steptime: collectives run: rank 1 was ended by SIGKILL"
    assert not (tmp_path / "out").exists()


def test_mpi_is_refused_and_says_why(tmp_path: Path) -> None:
    command = ["collectives", "run", "--library", "mpi", "--out", str(tmp_path / "out")]
    with pytest.raises(InputError, match="mpi4py is not in the lock of this environment"):
        CliRunner().invoke(cli, command, catch_exceptions=False)
    locks = Path(collectives.__file__).parents[2] / "locks"
    assert "mpi4py" not in (locks / "cpu.txt").read_text(), "then it can be measured"
