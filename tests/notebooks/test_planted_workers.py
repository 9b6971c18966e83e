"""The studies of many workers on a campaign whose step times follow stated rules, and without any campaign."""

import json
import shutil
from pathlib import Path

import pandas as pd
import planted_workers as planted
import pytest

from steptime import notebook
from steptime.core.claims import read_claims
from steptime.core.files import write_text

ROOT = Path(__file__).parents[2]
STAGES = ("workers", "links", "predicted_measured", "frameworks")
PAGES = ("80_workers", "81_links", "82_predicted_measured", "83_frameworks")


def checkout(root: Path) -> Path:
    (root / "lib/steptime").mkdir(parents=True)
    write_text(root / "dvc.yaml", "stages: {}\n")
    shutil.copy(ROOT / "params.yaml", root)
    shutil.copytree(ROOT / "notebooks", root / "notebooks")
    for name in ("published", "machines"):
        shutil.copytree(ROOT / "data" / name, root / "data" / name)
    return root


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with planted campaigns and the notebooks run in it."""
    root = checkout(tmp_path_factory.mktemp("study"))
    planted.write(root / "data/campaigns")
    planted.write_engines(root / "data/campaigns")
    planted.write_engines(root / "data/campaigns", "planted-engines-fast", planted.FAST)
    for name in STAGES:
        notebook.run(root, name, lambda line: None)
    return root


def table(root: Path, stage: str, name: str) -> pd.DataFrame:
    return pd.read_csv(root / f"data/derived/{stage}/{name}.csv")


def shown(root: Path, name: str) -> str:
    """All that the notebook's cells displayed, as text."""
    cells = json.loads((root / f"data/reports/notebooks/{name}.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    texts = [part for output in outputs for part in output.get("data", {}).get("text/markdown", [])]
    return "".join(texts)


def test_speed_ups_are_those_that_were_planted(study: Path) -> None:
    cells = table(study, "workers", "cells")
    assert len(cells) == 1 + 5 * 3 * 2
    lone_s = planted.step("end_of_backward", 1, None).step_s
    for row in cells[cells["workers"] > 1].itertuples():
        step_s = planted.step(row.schedule, row.workers, row.rate_bits_per_s).step_s
        assert row.median_s == pytest.approx(step_s, rel=0.02)
        assert row.speed_up == pytest.approx(row.workers * lone_s / step_s, rel=0.03)


def test_the_predictions_meet_what_is_asked_for_where_the_model_is_the_truth(study: Path) -> None:
    asked = table(study, "predicted_measured", "asked").set_index("what")
    assert asked["is_met"].iloc[:2].all()
    cells = table(study, "predicted_measured", "cells")
    assert set(cells["workers"]) == {2, 4, 8}
    assert list(cells["is_fitted"]) == list(cells["workers"] == 2)


def test_a_server_loses_against_rings_as_planted(study: Path) -> None:
    claims = {claim.id: claim for claim in read_claims(study / "data/derived/claims/workers.json")}
    assert claims["ring-over-server-emulated"].verdict == "holds"
    assert claims["ring-over-server-emulated"].kind == "emulated"
    scaling = table(study, "links", "scaling").set_index(["schedule", "gbit"])
    assert scaling.loc[("ps_central", 0.5), "pays_to"] == 1
    merged = table(study, "workers", "merged")
    after = merged[merged["against"] == "end_of_backward"]
    assert (after["ratio"] < 1).all()


def test_what_backward_hides_is_found_as_planted(study: Path) -> None:
    """Engines that wait for backward hide nothing of it, a wait-free one does, and the planted order comes out."""
    hidden = table(study, "frameworks", "hidden").set_index("key")
    assert set(hidden.index) == set(planted.ENGINES)
    for key, schedule in planted.ENGINES.items():
        row = hidden.loc[key]
        steps = [planted.step(schedule, 4, planted.RATES[1], fast).step_s for fast in (1.0, planted.FAST)]
        alone = [planted.step("end_of_backward", 1, None, fast).step_s for fast in (1.0, planted.FAST)]
        communication_s, exposed_s = steps[1] - alone[1], steps[0] - alone[0]
        assert row["communication_s"] == pytest.approx(communication_s, rel=0.03)
        most_s = min(communication_s, planted.profile().t_b_s)
        assert row["share"] == pytest.approx((communication_s - exposed_s) / most_s, abs=0.05)
    assert hidden.loc["caffe_mpi/wait_free", "lo"] > 0
    assert hidden.loc["cntk_mpi/bits=32", "lo"] <= 0 <= hidden.loc["cntk_mpi/bits=32", "hi"]
    order = table(study, "frameworks", "order").set_index("key")
    ratio = order["predicted_speed_up"] / order["measured_speed_up"]
    assert ratio.to_numpy() == pytest.approx(1.0, abs=0.06)


def test_claims_about_frameworks_follow_what_was_planted(study: Path) -> None:
    claims = {claim.id: claim for claim in read_claims(study / "data/derived/claims/frameworks.json")}
    # The planted server's replies fall behind by more than backward hides, so that nothing must have been hidden.
    assert claims["mxnet-overlap-emulated"].why.startswith("not so here: ")
    for name in ("cntk-no-overlap", "caffe-overlap", "schedules-order", "faster-devices"):
        claim = claims[f"{name}-emulated"]
        assert claim.verdict == "unverified source", "what is recalled decides nothing"
        assert claim.why.startswith("so here: "), (name, claim.why)
    assert claims["additive-step-emulated"].verdict == "holds"
    assert claims["frameworks-differ-emulated"].verdict == "holds"


def test_every_page_says_how_its_numbers_came_about(study: Path) -> None:
    for name in PAGES:
        text = (study / f"data/reports/notebooks/{name}.ipynb").read_text()
        assert "emulated compute, real communication" in text


def test_without_a_campaign_the_pages_say_so(tmp_path: Path) -> None:
    root = checkout(tmp_path / "empty")
    for name in STAGES:
        notebook.run(root, name, lambda line: None)
    for name in PAGES[:3]:
        assert "No campaign of many workers is recorded yet" in shown(root, name)
    assert "No campaign of the frameworks' own engines is recorded yet" in shown(root, PAGES[3])
    assert read_claims(root / "data/derived/claims/frameworks.json") == []
    assert read_claims(root / "data/derived/claims/workers.json") == []
    assert table(root, "predicted_measured", "asked").empty
