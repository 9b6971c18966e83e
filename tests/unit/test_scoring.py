"""Scores of predictions, their floors, and the baselines: planted tables with known answers, and the public sets."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from steptime.core.errors import InputError
from steptime.model import baselines
from steptime.model.extrapolation import extrapolate
from steptime.model.observations import COLLECTIVES, STEPS, Kind, read_observed
from steptime.model.platforms import predict_collectives
from steptime.model.scoring import (
    compared,
    grid_floor,
    neighbour_floor,
    noise_floor,
    score,
    scores,
    smooth_floor,
)

HOLDOUT = Path(__file__).parents[3] / "shared" / "holdout"
needs_public = pytest.mark.skipif(not HOLDOUT.exists(), reason="public measurements are not beside this checkout")


def steps(rows: list[tuple[str, int, int, int, float]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=[*STEPS.key, STEPS.time]).assign(step_time_std_s=np.nan)


def sizes(times: np.ndarray, n_bytes: np.ndarray, workers: int = 4) -> pd.DataFrame:
    place = {"group": "p", "workers": workers, "nodes": 1, "n_bytes": n_bytes}
    return pd.DataFrame({**place, "time_s": times, "time_std_s": np.nan})


SEEN = steps([("a", 1, 1, 8, 1.0), ("a", 4, 1, 8, 1.6), ("b", 2, 2, 8, 2.0)])
TRUTH = steps([("a", 8, 2, 8, 2.0), ("a", 16, 4, 8, 2.0), ("b", 2, 2, 8, 4.0), ("c", 2, 1, 8, 1.0)])
FOUND = TRUTH[list(STEPS.key)].assign(
    step_time_s=[2.2, 1.8, 4.4, 1.5], lo_s=[1.9, 1.0, 4.2, 0.5], hi_s=[2.5, 1.9, 4.6, 2.5]
)


def test_a_point_is_scored_by_hand():
    table = compared(SEEN, TRUTH, FOUND, STEPS)
    np.testing.assert_allclose(table["error"], [0.1, -0.1, 0.1, 0.5])
    assert table["is_covered"].tolist() == [True, False, False, True]
    np.testing.assert_allclose(table["width"], [0.6 / 2.2, 0.9 / 1.8, 0.4 / 4.4, 2 / 1.5])
    np.testing.assert_allclose(table["scale_ratio"], [2, 4, 1, np.nan])
    assert table["is_seen"].tolist() == [False, False, True, False]


def test_scores_are_those_of_the_points():
    found = score(compared(SEEN, TRUTH, FOUND, STEPS))
    assert (found.points, found.groups) == (4, 3)
    assert found.median == pytest.approx(0.1)
    assert found.p90 == pytest.approx(0.1 + 0.7 * 0.4)
    assert found.coverage == 0.5
    assert found.coverage_lo < 0.5 < found.coverage_hi
    by = scores(compared(SEEN, TRUTH, FOUND, STEPS), ["group"])
    assert by["group"].tolist() == ["a", "b", "c"]
    assert by["points"].tolist() == [2, 1, 1]


def test_points_without_a_prediction_are_not_counted_and_without_intervals_there_is_no_coverage():
    found = score(
        compared(SEEN, TRUTH, FOUND.drop(columns=["lo_s", "hi_s"]).assign(step_time_s=[2.2, 2, 4, None]), STEPS)
    )
    assert found.points == 3
    assert np.isnan([found.coverage, found.coverage_lo, found.width]).all()
    assert score(compared(SEEN, TRUTH, FOUND.assign(step_time_s=np.nan), STEPS)).points == 0


def test_other_points_are_refused():
    with pytest.raises(InputError, match="not those that were measured"):
        compared(SEEN, TRUTH, FOUND.iloc[::-1], STEPS)


def test_coverage_is_as_uncertain_as_its_groups_differ():
    """Two groups of which one is covered throughout and one not at all say less than twenty of half each."""

    def interval(covered: list[bool], groups: list[int]) -> float:
        table = pd.DataFrame({"group": groups, "is_covered": covered, "error": 0.1, "width": 0.2})
        found = score(table)
        assert found.coverage == 0.5
        return found.coverage_hi - found.coverage_lo

    half = [True, False] * 20
    assert interval(half, [int(value) for value in half]) == 1.0
    assert interval(half, list(np.repeat(range(20), 2))) < 0.01
    assert interval(half, [0] * 40) == 1.0


def test_noise_floor_of_normal_noise():
    table = pd.DataFrame({STEPS.time: [1.0, 2.0, 4.0], STEPS.std: [0.1, 0.2, np.nan]})
    floor = noise_floor(table, STEPS)
    assert floor["median"] == pytest.approx(0.0674, rel=0.02)
    assert floor["p90"] == pytest.approx(0.1645, rel=0.02)
    assert floor["width"] == pytest.approx(0.329, rel=0.01)
    assert floor["share"] == pytest.approx(2 / 3)
    assert np.isnan(noise_floor(TRUTH, STEPS)["median"])


def test_a_smooth_law_fits_a_smooth_table_and_leaves_a_jump():
    rows = [
        ("net", workers, nodes, batch, 0.01 * batch**0.5 * (1 + 0.1 * nodes) * workers**0.2)
        for workers in (16, 24, 32, 48, 64)
        for nodes in (8, 16)
        for batch in (8, 16, 32)
    ]
    table = steps(rows)
    assert smooth_floor(table, STEPS).p90 < 1e-6
    jumps = table.assign(step_time_s=table["step_time_s"] * np.where(table["workers"] == 48, 1.5, 1.0))
    floor = smooth_floor(jumps, STEPS)
    assert floor.median < 0.1
    assert 0.2 < floor.p90 < 0.5
    assert np.isnan(smooth_floor(TRUTH, STEPS).median)


def test_floors_of_a_curve():
    n_bytes = np.geomspace(1e4, 1e8, 101).astype(int)
    line = 1e-5 + n_bytes / 1e10
    assert neighbour_floor(sizes(line, n_bytes), COLLECTIVES).p90 < 0.1
    noisy = line * np.exp(0.2 * np.random.default_rng(3).standard_normal(101))
    assert neighbour_floor(sizes(noisy, n_bytes), COLLECTIVES).median == pytest.approx(0.14, abs=0.04)
    few = sizes(line, n_bytes).iloc[::10]
    fine = np.linspace(1e7, 1e8, 400).astype(int)
    truth = sizes(1e-5 + fine / 1e10, fine)
    assert grid_floor(few, truth, COLLECTIVES).median < 0.03
    step = truth.assign(time_s=truth["time_s"] * np.where(truth["n_bytes"] > 5e7, 0.5, 1.0))
    assert grid_floor(few, step, COLLECTIVES).p90 > 0.2
    assert np.isnan(grid_floor(few, sizes(line, n_bytes, workers=8), COLLECTIVES).median)


def ring(workers: float, a: float = 1.0, b: float = 0.4) -> float:
    return a + b * 2 * (workers - 1) / workers


def test_baselines_of_a_ring():
    seen = steps([("a", w, n, 8, ring(w)) for w, n in ((1, 1), (2, 1), (4, 1), (8, 2))])
    at = steps([("a", 16, 4, 8, 0.0), ("a", 16, 4, 16, 0.0), ("z", 2, 1, 8, 0.0)])[list(STEPS.key)]
    found = {name: baseline(seen, at) for name, baseline in baselines.STEP_BASELINES.items()}
    np.testing.assert_allclose(found["perfect scaling"], [1.0, 2.0, np.nan])
    np.testing.assert_allclose(found["last point"], [ring(8), ring(8), np.nan])
    np.testing.assert_allclose(found["ring term"], [ring(16), ring(16), np.nan])
    np.testing.assert_allclose(found["alpha-beta"], [ring(16), ring(16), np.nan])


def test_the_last_point_is_the_one_of_the_nearest_nodes():
    seen = steps([("a", 16, 4, 8, 1.0), ("a", 16, 16, 8, 2.0), ("a", 1, 1, 8, 0.5)])
    at = steps([("a", 32, 8, 8, 0.0), ("a", 64, 16, 8, 0.0)])[list(STEPS.key)]
    assert baselines.last_point(seen, at).tolist() == [1.0, 2.0]


def test_baselines_of_a_line():
    n_bytes = np.array([1_000, 100_000, 10_000_000])
    seen = sizes(1e-5 + n_bytes / 1e9, n_bytes)
    asked = np.array([100_000, 20_000_000])
    for name in baselines.COLLECTIVE_BASELINES:
        found = baselines.COLLECTIVE_BASELINES[name](seen, sizes(np.zeros(2), asked)[list(COLLECTIVES.key)])
        np.testing.assert_allclose(found, 1e-5 + asked / 1e9, rtol=1e-3)
    wider = baselines.alpha_beta_line(seen, sizes(np.zeros(2), asked, workers=8)[list(COLLECTIVES.key)])
    np.testing.assert_allclose(wider, (1e-5 + asked / 1e9) * 1.75 / 1.5, rtol=1e-6)


def public(name: str, kind: Kind) -> tuple[pd.DataFrame, pd.DataFrame]:
    seen, truth = (read_observed(HOLDOUT / f"{name}_{part}.csv", kind) for part in ("fit", "devtest"))
    return seen, truth


def scored(seen: pd.DataFrame, truth: pd.DataFrame, kind: Kind, baseline: baselines.Baseline) -> pd.DataFrame:
    at = truth[list(kind.key)]
    return compared(seen, truth, at.assign(**{kind.time: baseline(seen, at)}), kind)


@needs_public
@pytest.mark.parametrize(("name", "median", "p90"), [("last point", 0.048, 0.113), ("ring term", 0.033, 0.113)])
def test_the_baselines_on_public_steps_are_the_published_ones(name, median, p90):
    found = score(scored(*public("scaleout_hkbu", STEPS), STEPS, baselines.STEP_BASELINES[name]))
    assert (round(found.median, 3), round(found.p90, 3)) == (median, p90)


@needs_public
def test_the_baseline_on_public_collectives_is_the_published_one():
    table = scored(*public("allreduce_vidur", COLLECTIVES), COLLECTIVES, baselines.interpolation)
    found = score(table[table["is_seen"]])
    assert (round(found.median, 3), round(found.p90, 3)) == (0.021, 0.215)


@needs_public
def test_public_steps_are_predicted_better_than_by_baselines_and_the_intervals_hold():
    seen, truth = public("scaleout_hkbu", STEPS)
    found = score(compared(seen, truth, extrapolate(seen, truth[list(STEPS.key)]), STEPS))
    assert found.median < 0.025
    assert found.p90 < 0.08
    assert found.coverage_hi > 0.9
    assert found.width < 0.25


@needs_public
def test_public_collectives_are_predicted_better_than_by_interpolation():
    seen, truth = public("allreduce_vidur", COLLECTIVES)
    table = compared(seen, truth, predict_collectives(seen, truth[list(COLLECTIVES.key)]), COLLECTIVES)
    measured, other = score(table[table["is_seen"]]), score(table[~table["is_seen"]])
    assert measured.median < 0.02
    assert measured.p90 < 0.2
    assert measured.coverage > 0.9
    assert other.median < 0.1
