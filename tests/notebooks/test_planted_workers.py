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
STAGES = ("workers", "links", "predicted_measured")


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
    """A checkout with a planted campaign and the three notebooks run in it."""
    root = checkout(tmp_path_factory.mktemp("study"))
    planted.write(root / "data/campaigns")
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


def test_every_page_says_how_its_numbers_came_about(study: Path) -> None:
    for name in ("80_workers", "81_links", "82_predicted_measured"):
        text = (study / f"data/reports/notebooks/{name}.ipynb").read_text()
        assert "emulated compute, real communication" in text


def test_without_a_campaign_the_pages_say_so(tmp_path: Path) -> None:
    root = checkout(tmp_path / "empty")
    for name in STAGES:
        notebook.run(root, name, lambda line: None)
    for name in ("80_workers", "81_links", "82_predicted_measured"):
        assert "No campaign of many workers is recorded yet" in shown(root, name)
    assert read_claims(root / "data/derived/claims/workers.json") == []
    assert table(root, "predicted_measured", "asked").empty
