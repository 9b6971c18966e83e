"""Cells of planted campaigns of many workers: what is read off them, and what is predicted of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import planted_workers as planted
import pytest
from scipy import stats

from steptime.core.errors import InputError
from steptime.core.workers import COMPUTED, WorkersCampaign, read_workers
from steptime.model.worker_cells import (
    COLUMNS,
    PREDICTIONS,
    Fitted,
    cell_of,
    cell_table,
    message_cost,
    predictions,
    replayed_of,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> WorkersCampaign:
    return read_workers(planted.write(tmp_path_factory.mktemp("campaigns")))


def test_a_row_a_cell(found: WorkersCampaign) -> None:
    cells = cell_table(found)
    assert list(cells.columns) == COLUMNS
    assert len(cells) == 1 + 5 * 3 * 2
    lone_s = float(cells.loc[cells["workers"] == 1, "median_s"].iloc[0])
    row = cells[(cells["schedule"] == "ps_central") & (cells["workers"] == 8)].iloc[0]
    assert row["speed_up"] == pytest.approx(8 * lone_s / row["median_s"])
    assert row["speed_up_lo"] < row["speed_up"] < row["speed_up_hi"]
    assert row["ranks"] == 9


def test_without_a_lone_worker_there_is_no_speed_up(found: WorkersCampaign) -> None:
    runs = found.campaign.runs[found.campaign.runs["workers"] > 1]
    campaign = replace(
        found.campaign, runs=runs, samples=found.campaign.samples[found.campaign.samples["run_id"].isin(runs["run_id"])]
    )
    crowd = replace(found, campaign=campaign, workers=found.workers[found.workers["run_id"].isin(runs["run_id"])])
    cells = cell_table(crowd)
    assert cells["speed_up"].isna().all()
    with pytest.raises(InputError, match="campaign planted-workers: needs a profile and the step of a lone worker"):
        replayed_of(crowd, cells)
    assert predictions([crowd])[0].empty


def test_a_row_is_the_cell_that_was_planted(found: WorkersCampaign) -> None:
    assert found.profile is not None
    for _, row in cell_table(found).iterrows():
        cell = cell_of(row, found.profile)
        assert cell.workers == row["workers"]
        if row["workers"] > 1:
            assert cell.ends == planted.ENDS[row["schedule"]]
            assert cell.link is not None
            assert cell.link.beta_s_per_byte == pytest.approx(planted.link(row["rate_bits_per_s"]).beta_s_per_byte)
            assert cell.link.burst_bytes == planted.link(row["rate_bits_per_s"]).burst_bytes


def test_only_dense_layers_have_factors(found: WorkersCampaign) -> None:
    assert found.profile is not None
    row = cell_table(found).query("workers == 8").iloc[0].copy()
    row["schedule"] = "sufficient_factors"
    factors = np.array(cell_of(row, found.profile).factor_bytes)
    assert len(factors) == (found.profile.parameter_bytes > 0).sum()
    # AlexNet ends in three dense layers, which are sent first
    assert np.isfinite(factors[:3]).all()
    assert np.isinf(factors[3:]).all()


def test_processor_times_are_found_in_what_the_ranks_used(found: WorkersCampaign) -> None:
    cells = cell_table(found)
    assert message_cost(cells[cells["workers"] <= 2]) == pytest.approx(planted.HOST.message_cpu_s, rel=0.01)
    assert message_cost(cells[cells["workers"] == 1]) == 0.0


def test_what_was_not_fitted_is_predicted(found: WorkersCampaign) -> None:
    table, fits = predictions([found])
    assert list(table.columns) == PREDICTIONS
    assert len(table) == 5 * 3 * 2
    (fit,) = fits.values()
    assert (fit.most, fit.cells) == (2, 10)
    far = table[~table["is_fitted"]]
    assert far["error"].abs().median() < 0.01
    assert ((far["lo_s"] < far["predicted_s"]) & (far["predicted_s"] < far["hi_s"])).all()
    inside = (far["lo_s"] <= far["measured_s"]) & (far["measured_s"] <= far["hi_s"])
    assert (inside == far["is_covered"]).all()


def test_campaigns_of_one_machine_share_a_fit(found: WorkersCampaign) -> None:
    twice = predictions([found, replace(found, campaign=replace(found.campaign, name="again"))])
    assert len(twice[1]) == 1
    assert len(twice[0]) == 2 * 5 * 3 * 2
    assert set(twice[0]["campaign"]) == {"planted-workers", "again"}


def test_computing_workers_are_left_out(tmp_path: Path) -> None:
    table, fits = predictions([read_workers(planted.write(tmp_path, compute=COMPUTED))])
    assert table.empty
    assert fits == {}


@pytest.mark.parametrize(("workers", "times"), [(2, 1.0), (4, 2.0), (8, 3.0)])
def test_every_doubling_adds_the_error_once_more(workers: int, times: float) -> None:
    fitted = Fitted(planted.HOST, error=0.02, cells=13, most=2)  # nine beyond the four fitted
    assert fitted.half_width(workers) == pytest.approx(stats.t.ppf(0.95, 9) * 0.02 * np.sqrt(times))
