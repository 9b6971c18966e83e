"""Step times at scales that were not measured: planted groups, few points, bad rows."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.model.extrapolation import calibrated_fits, extrapolate
from steptime.model.extrapolation_benchmark import extrapolation_speed
from steptime.model.observations import STEPS, read_observed, read_points

HOLDOUT = Path(__file__).parents[3] / "shared" / "holdout"
SCALES = [(1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (8, 4), (12, 3), (16, 4)]
LARGER = [(24, 6), (32, 8), (64, 16)]


def planted(group: str, placements, compute_s: float, out_s: float, noise: float = 0.0, seed: int = 0) -> pd.DataFrame:
    """Half of the compute hides communication, a ring over all workers, batches 16, 32 and 64; no latency."""
    random = np.random.default_rng(seed)
    rows = []
    for workers, nodes in placements:
        for batch in (16, 32, 64):
            compute = compute_s * (0.25 + 0.75 * batch / 32)
            ring = 2 * (workers - 1) / workers * (out_s if nodes > 1 else out_s / 4)
            time = (compute + max(ring - 0.5 * compute, 0.0)) * np.exp(noise * random.standard_normal())
            rows.append((group, workers, nodes, batch, time, noise * time))
    return pd.DataFrame(rows, columns=[*STEPS.key, STEPS.time, STEPS.std])


def points(table: pd.DataFrame) -> pd.DataFrame:
    return table[list(STEPS.key)]


def test_planted_ring_is_recovered_at_four_times_the_scale():
    truth = planted("net", LARGER, 0.2, 0.5)
    found = extrapolate(planted("net", SCALES, 0.2, 0.5), points(truth))
    assert np.abs(found["step_time_s"] / truth["step_time_s"] - 1).max() < 0.06
    assert (found["lo_s"] < found["step_time_s"]).all()
    assert (found["step_time_s"] < found["hi_s"]).all()


def test_planted_parameters_are_recovered():
    fit = calibrated_fits(planted("net", SCALES, 0.2, 0.5), ["net"])[0]["net"]
    compute_s, out_s = np.exp(fit.theta[0]), np.exp(fit.theta[4])
    assert compute_s == pytest.approx(0.2, rel=0.1)
    assert out_s == pytest.approx(0.5, rel=0.15)


def test_intervals_cover_nine_in_ten_of_noisy_groups():
    groups = [(f"net{i}", 0.1 + 0.02 * i, 0.1 + 0.06 * i) for i in range(0, 6, 2)]
    seen = pd.concat([planted(g, SCALES, c, v, 0.04, i) for i, (g, c, v) in enumerate(groups)])
    truth = pd.concat([planted(g, LARGER, c, v, 0.04, 100 + i) for i, (g, c, v) in enumerate(groups)])
    found = extrapolate(seen, points(truth.reset_index(drop=True)))
    time = truth["step_time_s"].to_numpy()
    covered = ((found["lo_s"] <= time) & (time <= found["hi_s"])).mean()
    assert 0.8 <= covered <= 1.0
    assert ((found["hi_s"] - found["lo_s"]) / found["step_time_s"]).median() < 0.5


def test_one_point_gives_a_finite_wide_interval_and_says_so():
    seen = planted("net", [(1, 1)], 0.2, 0.5).query("local_batch == 32")
    found = extrapolate(seen, points(planted("net", [(1, 1), (16, 4)], 0.2, 0.5)).query("local_batch == 32"))
    same, far = found.iloc[0], found.iloc[1]
    assert same["step_time_s"] == pytest.approx(seen["step_time_s"].iloc[0], rel=0.02)
    assert np.isfinite([far["lo_s"], far["hi_s"]]).all()
    assert far["hi_s"] / far["lo_s"] > 2
    assert "only 1 observed" in far["model"]


def test_unobserved_group_takes_what_its_network_and_link_show():
    placements = [(1, 1), (4, 1), (8, 2)]
    speed = {"slow": 2.0, "fast": 0.5}  # slow enough on both that communication shows
    size = {"small": 0.2, "middle": 0.5, "large": 1.0}
    seen = [planted(f"{n}|{k}|MG-WFBP", placements, size[n], speed[k] * size[n]) for n in size for k in speed]
    missing = planted("large|slow|MG-WFBP", [(8, 2)], size["large"], speed["slow"] * size["large"])
    rest = pd.concat(seen).query("group != 'large|slow|MG-WFBP'").reset_index(drop=True)
    found = extrapolate(rest, points(missing))
    assert np.abs(np.log(found["step_time_s"] / missing["step_time_s"])).max() < 0.5
    assert ((found["lo_s"] < missing["step_time_s"]) & (missing["step_time_s"] < found["hi_s"])).all()
    assert (found["hi_s"] / found["lo_s"]).min() > 1.3
    assert found["model"].str.contains("only 0 observed").all()


def test_order_of_rows_does_not_matter():
    seen = planted("net", SCALES, 0.2, 0.5, noise=0.03)
    at = points(planted("net", LARGER, 0.2, 0.5))
    shuffled = seen.sample(frac=1, random_state=3)
    pd.testing.assert_frame_equal(extrapolate(seen, at), extrapolate(shuffled, at))
    backwards = extrapolate(seen, at.iloc[::-1].reset_index(drop=True)).iloc[::-1].reset_index(drop=True)
    pd.testing.assert_frame_equal(extrapolate(seen, at), backwards)


def test_more_samples_take_longer_and_farther_scales_are_less_certain():
    seen = planted("net", SCALES, 0.2, 0.5, noise=0.02)
    found = extrapolate(seen, points(planted("net", LARGER, 0.2, 0.5)))
    assert (found.groupby("workers")["step_time_s"].diff().dropna() > 0).all()
    width = np.log(found["hi_s"] / found["lo_s"]).groupby(found["workers"]).mean()
    assert width.is_monotonic_increasing


def test_a_method_name_decides_only_where_the_data_cannot():
    few = pd.concat([planted(f"net|link|{m}", [(1, 1), (4, 1), (8, 2)], 0.2, 0.5) for m in ("BSP-PS", "BSP-A2A")])
    fits, _ = calibrated_fits(few.reset_index(drop=True), ["net|link|BSP-PS", "net|link|BSP-A2A"])
    assert fits["net|link|BSP-PS"].form.is_server
    assert not fits["net|link|BSP-A2A"].form.is_server
    ring = planted("net|link|BSP-PS", SCALES, 0.2, 2.0)
    assert not calibrated_fits(ring, ["net|link|BSP-PS"])[0]["net|link|BSP-PS"].form.is_server


def test_a_node_count_of_each_scale_does_not_take_the_growth_for_its_own():
    """One worker a node: 2, 4 nodes differ as 2, 4 workers do, and 8 nodes must go on so."""
    groups = {"a": (0.2, 0.3), "b": (0.3, 0.2), "c": (0.25, 0.4)}
    placements = [(1, 1), (2, 2), (4, 4)]
    seen = pd.concat([planted(g, placements, c, v).query("local_batch == 32") for g, (c, v) in groups.items()])
    truth = pd.concat([planted(g, [(8, 8)], c, v).query("local_batch == 32") for g, (c, v) in groups.items()])
    truth = truth.reset_index(drop=True)
    found = extrapolate(seen.reset_index(drop=True), points(truth))
    assert np.abs(found["step_time_s"] / truth["step_time_s"] - 1).max() < 0.06
    fits, _ = calibrated_fits(seen.reset_index(drop=True), list(groups))
    assert not any(len(fit.nodes) for fit in fits.values())


def test_a_batch_far_from_the_observed_ones_has_a_wider_interval():
    seen = planted("net", [(1, 1)], 0.2, 0.5, noise=0.02)
    at = points(seen.query("local_batch == 64").assign(local_batch=[64]))
    at = pd.concat([at, at.assign(local_batch=256), at.assign(local_batch=2048)], ignore_index=True)
    found = extrapolate(seen, at)
    width = np.log(found["hi_s"] / found["lo_s"])
    assert width.is_monotonic_increasing
    assert width[2] > width[0] + 4 * 0.1 * 1.645


row = st.tuples(
    st.sampled_from(["a", "b|x", "b|y|BSP-PS"]),
    st.integers(1, 64),
    st.integers(1, 64),
    st.sampled_from([1, 8, 1000]),
    st.floats(1e-6, 1e4),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(row, min_size=1, max_size=12, unique_by=lambda r: (r[0], r[1], min(r[1], r[2]), r[3])))
def test_no_group_fails_whatever_was_observed(rows):
    table = pd.DataFrame(
        [(g, w, min(w, n), b, t, np.nan) for g, w, n, b, t in rows], columns=[*STEPS.key, STEPS.time, STEPS.std]
    )
    at = pd.DataFrame([(g, w, 2, 64) for g in ("a", "b|y|BSP-PS", "new") for w in (2, 128)], columns=list(STEPS.key))
    found = extrapolate(table, at)
    assert np.isfinite(found[["step_time_s", "lo_s", "hi_s"]].to_numpy()).all()
    assert (found["lo_s"] < found["step_time_s"]).all()
    assert (found["step_time_s"] < found["hi_s"]).all()


HEADER = "group,workers,nodes,local_batch,step_time_s,step_time_std_s\n"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (HEADER + "a,1,1,8,0.1,\na,0,1,8,0.1,\n", ["line 3", "workers = 0", "whole number from 1"]),
        (HEADER + "a,1,1,8,nan,\n", ["line 2", "step_time_s = nan", "above 0"]),
        (HEADER + "a,1,1,8,,\n", ["line 2", "step_time_s = empty"]),
        (HEADER + "a,1,1,8,-0.1,\n", ["line 2", "step_time_s = -0.1"]),
        (HEADER + "a,1,1,8,0.1,-1\n", ["line 2", "step_time_std_s = -1"]),
        (HEADER + "a,1.5,1,8,0.1,\n", ["line 2", "workers = 1.5"]),
        (HEADER + "a,1,2,8,0.1,\n", ["line 2", "nodes = 2", "number of workers"]),
        (HEADER + ",1,1,8,0.1,\n", ["line 2", "group = empty"]),
        (HEADER + "a,1,1,8,0.1,\nb,1,1,8,0.1,\na,1,1,8,0.2,\n", ["line 4", "repeats an earlier point"]),
        (HEADER + "a,1,1,8,0.1,,7\n", ["line 2"]),
        (HEADER + "a,1,1,8,0.1,\na,2,1,8,0.1,,7\n", ["line 3"]),
        (HEADER, ["no rows"]),
        (HEADER.replace("nodes", "hosts") + "a,1,1,8,0.1,\n", ["'nodes' is missing", "the columns are"]),
        (HEADER.strip() + ",extra\na,1,1,8,0.1,,2\n", ["'extra' is not known"]),
        (HEADER.replace("nodes", "workers") + "a,1,1,8,0.1,\n", ["'nodes' is missing"]),
        ("", ["not a table"]),
    ],
)
def test_bad_observations_are_one_line_with_the_place(tmp_path, text, parts):
    path = tmp_path / "obs.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as error:
        read_observed(path, STEPS)
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in [str(path), *parts]), message


def test_points_with_times_are_refused(tmp_path):
    path = tmp_path / "at.csv"
    path.write_text(HEADER + "a,1,1,8,0.1,\n", encoding="utf-8")
    with pytest.raises(InputError, match="'step_time_s' is not known"):
        read_points(path, STEPS)


@pytest.mark.skipif(not HOLDOUT.exists(), reason="public measurements are not beside this checkout")
def test_public_step_times_beat_the_last_point():
    seen = read_observed(HOLDOUT / "scaleout_hkbu_fit.csv", STEPS)
    truth = read_observed(HOLDOUT / "scaleout_hkbu_devtest.csv", STEPS)
    seen, truth = (table[table["group"].str.startswith("BERT-Base")] for table in (seen, truth))
    truth = truth.reset_index(drop=True)
    found = extrapolate(seen, points(truth))
    error = (found["step_time_s"] / truth["step_time_s"] - 1).abs()
    last = seen[seen["workers"] == 8].set_index("group")["step_time_s"].reindex(truth["group"]).to_numpy()
    assert error.median() < (last / truth["step_time_s"] - 1).abs().median()


def test_the_benchmark_times_both_on_the_same_steps():
    said = []
    result = extrapolation_speed(rows=120, points=24, report=said.append)
    assert result["extrapolate_s"] > 0
    assert result["simple_s"] > 0
    assert result["error"] < result["simple_error"]
    assert "120 rows" in said[0]
