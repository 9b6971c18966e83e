"""The notebooks that compare settings, run on campaigns whose rules are known: what they derive is what was planted."""

import json
import shutil
from pathlib import Path

import pandas as pd
import planted_campaign as planted
import pytest
from conftest import ROOT

from steptime import notebook
from steptime.core.campaign import Campaign, as_table, write_campaign
from steptime.core.claims import read_claims
from steptime.core.files import write_json, write_text
from steptime.core.parity import PARITY
from steptime.measure.parity import write_parity
from steptime.model.fitting import profile_cases
from steptime.networks import build

STAGES = ("single_device", "dlbench", "cpu_vs_gpu", "choosing")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with two planted campaigns, one with a GPU, and the four notebooks run in it."""
    root = tmp_path_factory.mktemp("study")
    (root / "lib/steptime").mkdir(parents=True)
    write_text(root / "dvc.yaml", "stages: {}\n")
    shutil.copy(ROOT / "params.yaml", root)
    shutil.copytree(ROOT / "notebooks", root / "notebooks")
    for name in ("published", "machines"):
        shutil.copytree(ROOT / "data" / name, root / "data" / name)
    campaigns = [planted.campaign("planted"), planted.campaign("planted-gpu", ("cpu", "cuda"))]
    for campaign in campaigns:
        folder = root / "data/campaigns" / campaign.name
        write_campaign(campaign, folder)
        write_json(folder / "machine.json", planted.MACHINE | {"name": campaign.name})
    write_parity(as_table(PARITY_ROWS, PARITY), root / "data/campaigns/planted/parity.csv")
    write_text(root / "data/derived/fit/layers.csv", pd.concat(map(layers, campaigns)).to_csv(index=False))
    for name in STAGES:
        notebook.run(root, name, lambda line: None)
    return root


PARITY_ROWS = [
    {"framework": "torch", "network": "lenet", "dtype": "float32", "verdict": "agrees", "worst_gradient": 0.0},
    {"framework": "jax", "network": "lenet", "dtype": "float32", "verdict": "agrees", "worst_gradient": 3e-7},
    {"framework": "tensorflow", "network": "googlenet", "dtype": "float32", "verdict": "differs", "reason": "1e-2 off"},
]


def layers(campaign: Campaign) -> pd.DataFrame:
    """What the fit stage makes of the planted layer times: every layer has an equal share."""
    steps = campaign.samples.query("phase == 'step' and not is_warmup").groupby("run_id")["time_s"].median()
    times = campaign.runs.set_index("run_id")["case_id"].to_frame().join(steps).groupby("case_id")["time_s"].mean()
    rows = []
    for case in profile_cases(campaign).itertuples():
        names = [layer.name for layer in build(case.network).layers]
        step_s = times[case.case_id]
        table = pd.DataFrame({"campaign": campaign.name, "case_id": case.case_id, "layer": names})
        rows.append(table.assign(forward_s=0.3 * step_s / len(names), backward_s=0.55 * step_s / len(names)))
    return pd.concat(rows)


def table(study: Path, stage: str, name: str, campaign: str = "planted") -> pd.DataFrame:
    found = pd.read_csv(study / f"data/derived/{stage}/{name}.csv")
    return found[found["campaign"] == campaign]


def shown(study: Path, name: str) -> str:
    """All that an executed notebook shows, as text."""
    node = json.loads((study / f"data/reports/notebooks/{name}.ipynb").read_text())
    outputs = [output for cell in node["cells"] for output in cell.get("outputs", [])]
    parts = [output.get("data", {}).get(kind, "") for output in outputs for kind in ("text/markdown", "text/html")]
    return "\n".join("".join(part) for part in parts)


def test_the_planted_winners_win_and_ties_are_ties(study: Path) -> None:
    answers = table(study, "choosing", "answers").set_index("network")
    assert answers.loc["lenet", "fastest"] == "caffe"
    for network in ("alexnet", "googlenet"):
        row = answers.loc[network]
        assert {row["fastest"], row["tied"]} == {"torch_compile", "tensorflow_xla"}
        assert row["next"] == "torch_channels_last"
        assert row["next_ratio"] == pytest.approx(0.8 / 0.7, rel=0.03)
        shares = row[[f"{part}_share" for part in ("input", "arithmetic", "memory", "rest")]]
        assert shares.sum() == pytest.approx(1)


def test_the_matrix_says_why_a_cell_did_not_run_and_what_lacks_parity(study: Path) -> None:
    text = shown(study, "50_single_device")
    assert planted.NO_DROPOUT in text
    assert "2 agrees; 1 differs" in text
    assert text.count("✗") == 2, "in the table of times and in that of parity"
    ranked = table(study, "single_device", "standings").query("network == 'googlenet'")["setting"]
    assert len(ranked)
    assert "tensorflow" not in set(ranked)
    assert "Without layer times (fused or run in one piece): jax, tensorflow_xla, torch_compile" in text


def test_the_gap_between_step_and_layers_adds_up(study: Path) -> None:
    gap = table(study, "single_device", "gaps")
    parts = [name for name in gap.columns if name.endswith("_s") and name not in ("step_s", "layers_s", "gap_s")]
    assert (gap["step_s"] - gap["layers_s"]).to_numpy() == pytest.approx(gap["gap_s"].to_numpy(), rel=1e-3)
    assert gap[parts].sum(axis=1).to_numpy() == pytest.approx(gap["gap_s"].to_numpy(), rel=1e-3)
    # planted: layers 0.85 of a step, reading 0.05, update 0.1
    assert (gap["update_s"] / gap["step_s"]).to_numpy() == pytest.approx(0.1, rel=0.05)
    assert (gap["layers_s"] / gap["step_s"]).to_numpy() == pytest.approx(0.85, rel=0.05)


def test_the_memory_model_finds_the_planted_line(study: Path) -> None:
    fits = table(study, "single_device", "memory_fits")
    assert fits["base_bytes"].to_numpy() == pytest.approx(planted.BASE_BYTES, rel=1e-3)
    assert fits["factor"].to_numpy() == pytest.approx(planted.MEMORY_FACTOR, rel=1e-2)
    assert fits["worst_error"].max() < 1e-3
    largest = table(study, "single_device", "largest_batch")
    assert (largest["largest_batch"] > largest["largest_measured"]).all()


def test_the_roofline_holds_each_layer_against_the_planted_peaks(study: Path) -> None:
    rows = table(study, "single_device", "roofline")
    assert set(rows["framework"]) == {"torch", "torch_channels_last", "tensorflow", "tensorflow_eager", "caffe"}
    roof = (rows["intensity"] * planted.MACHINE["memory_bytes_per_s"]).clip(upper=planted.MACHINE["peak_flops_per_s"])
    assert rows["attainable_flops_per_s"].to_numpy() == pytest.approx(roof.to_numpy(), rel=1e-4)
    assert ((rows["bound"] == "memory") == (rows["intensity"] < 5)).all()


def test_the_script_s_levers_have_the_planted_factors_and_flip_the_planted_rankings(study: Path) -> None:
    levers = table(study, "dlbench", "levers")
    factor = levers.groupby(["lever", "slow", "fast"])["factor"].mean()
    assert factor["layout", "torch", "torch_channels_last"] == pytest.approx(1 / 0.8, rel=0.03)
    assert factor["compiling", "tensorflow_eager", "tensorflow_xla"] == pytest.approx(2 / 0.702, rel=0.03)
    assert factor["feeding", "torch, sequential", "torch, prefetch"] == pytest.approx(1 / 0.95, rel=0.03)
    assert factor["threads", "torch, 1", "torch, 2"] == pytest.approx(1 / 0.6, rel=0.03)
    assert factor["timing", "jax, mean of all", "jax, median"] == pytest.approx(34 / 15, rel=0.03)
    flips = table(study, "dlbench", "flips")
    layout = flips[flips["lever"] == "layout"]
    assert set(layout["passes"]) == {"jax"}  # 0.9 lies between 0.8 and 1.0, and nothing else does
    assert set(flips["lever"]) == {"layout", "compiling", "timing"}


def test_threads_and_batches_scale_as_planted(study: Path) -> None:
    threads = table(study, "dlbench", "threads")
    assert threads["speed_up"].to_numpy() == pytest.approx(1 / 0.6, rel=0.03)
    rates = table(study, "dlbench", "batches").groupby("batch")["samples_per_s"].mean()
    assert rates[16] / rates[8] == pytest.approx(2 / 1.5, rel=0.02)


def test_a_gpu_campaign_fills_its_page(study: Path) -> None:
    speed_ups = table(study, "cpu_vs_gpu", "speed_up", "planted-gpu")
    assert set(speed_ups["network"]) == set(planted.SAMPLE_S)
    assert speed_ups["speed_up"].to_numpy() == pytest.approx(1 / planted.GPU_FACTOR, rel=0.05)
    assert (speed_ups["lo"] < speed_ups["speed_up"]).all()
    assert table(study, "cpu_vs_gpu", "speed_up").empty
    verdicts = {claim.id: claim.verdict for claim in read_claims(study / "data/derived/claims/cpu_vs_gpu.json")}
    # the planted GPU gains the same everywhere: the claims that it depends on the work are refuted
    assert verdicts["gpu-speed-up-differs"] == "does not hold here"
    assert verdicts["gpu-faster"] == "unverified source"


def test_claims_of_frameworks_are_decided_by_the_planted_rules(study: Path) -> None:
    claims = {
        claim.id: claim
        for name in ("single_device", "dlbench")
        for claim in read_claims(study / f"data/derived/claims/{name}.json")
    }
    assert claims["script-alexnet"].ours == pytest.approx(2 / 0.702, rel=0.03)
    assert claims["script-alexnet"].verdict == "holds in shape"  # 2.8 times, less than the published 3.8; it flips
    assert claims["mean-of-all-steps"].verdict == "holds"
    assert claims["differ-by-network"].verdict == "holds"  # caffe wins lenet only, the others never lenet
    assert claims["script-fcn5"].verdict == "inconclusive"
    assert claims["k40m-alexnet-caffe"].verdict == "needs a GPU"
    assert claims["large-kernels-differ-less"].verdict == "unverified source"


def test_without_a_gpu_its_claims_need_one(study: Path) -> None:
    path = study / "data/derived/single_device/cases.csv"
    every = pd.read_csv(path)
    every[every["campaign"] == "planted"].to_csv(path, index=False)
    notebook.run(study, "cpu_vs_gpu", lambda line: None)
    assert "No campaign has the same case on a processor and on a GPU" in shown(study, "52_cpu_vs_gpu")
    claims = read_claims(study / "data/derived/claims/cpu_vs_gpu.json")
    assert {claim.verdict for claim in claims} == {"needs a GPU"}
    assert {claim.ours for claim in claims} == {None}
