"""Megatron's iteration times: planted machines, intervals, far configurations, bad files, public measurements."""

import itertools
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.core.files import write_table
from steptime.model import megatron
from steptime.model.megatron import CONFIGURATION, HIGH_MS, LOW_MS, NOTE, TIME_MS, Configurations
from steptime.model.parallelism import Rates

HOLDOUT = Path(__file__).parents[3] / "shared" / "holdout"
NAMES = [field.name for field in fields(Rates)]
HEADER = ",".join((*CONFIGURATION, TIME_MS)) + "\n"
GOOD = "8,32,4,1024,16,24,1024,2,2,2,219.7\n"


SIZES = ((1, 2, 1), (2, 1, 2), (4, 2, 1))


def configurations(hidden=(1024, 2048), layers=(12, 24), micro=(1, 2, 4), micro_batches=(2, 8)) -> pd.DataFrame:
    rows = []
    for h, length, b, (t, d, p), m in itertools.product(hidden, layers, micro, SIZES, micro_batches):
        rows.append((t * d * p, b * m * d, b, h, 16, length, 1024, t, d, p))
    return pd.DataFrame(rows, columns=list(CONFIGURATION))


def planted(table: pd.DataFrame, noise: float = 0.01, seed: int = 0, **rates: float) -> pd.DataFrame:
    """Times of the prior's machine with some rates changed by a factor, and noise."""
    theta = np.log([megatron.PRIOR[name][0] * rates.get(name, 1.0) for name in NAMES])
    random = np.random.default_rng(seed)
    log_s = Configurations.of(table).log_time(theta) + noise * random.standard_normal(len(table))
    return table.assign(**{TIME_MS: 1e3 * np.exp(log_s)})


def errors(predicted: pd.DataFrame, truth: pd.DataFrame) -> np.ndarray:
    return (predicted[TIME_MS] / truth[TIME_MS] - 1).abs().to_numpy()


def test_a_planted_machine_is_predicted_on_the_half_it_was_not_fitted_on():
    seen, unseen = megatron.split(planted(configurations(), launch_s=0.5, tensor_bytes_per_s=0.8, step_s=3.0), 0)
    found = megatron.fit_and_predict(seen, unseen[list(CONFIGURATION)])
    assert len(seen) == len(unseen) == 36
    assert errors(found, unseen).mean() < 0.02
    assert (found[NOTE] == "").all()


def test_planted_rates_are_found():
    fitted = megatron.fit(planted(configurations(), noise=0.002, launch_s=0.4, head_slowdown=1.8)).rates
    assert fitted.launch_s == pytest.approx(0.4 * megatron.PRIOR["launch_s"][0], rel=0.15)
    assert fitted.head_slowdown == pytest.approx(1.8 * megatron.PRIOR["head_slowdown"][0], rel=0.25)


def test_noise_is_found_and_intervals_cover_nine_in_ten():
    covered, table = [], configurations(micro_batches=(2, 4, 8, 16))
    for seed in range(4):
        seen, unseen = megatron.split(planted(table, noise=0.05, seed=seed, launch_s=0.7), seed)
        assert 0.03 < megatron.fit(seen).noise < 0.07
        found = megatron.fit_and_predict(seen, unseen[list(CONFIGURATION)])
        covered += list((found[LOW_MS] <= unseen[TIME_MS]) & (unseen[TIME_MS] <= found[HIGH_MS]))
    assert 0.82 <= np.mean(covered) <= 0.98


def test_large_models_on_many_nodes_stay_near_the_planted_machine():
    far = pd.DataFrame(
        [(64, 64, 1, 12288, 96, 96, 2048, 8, 1, 8), (256, 1024, 4, 6144, 48, 40, 2048, 8, 32, 1)],
        columns=list(CONFIGURATION),
    )
    truth = planted(far, noise=0.0, launch_s=0.5)
    near = planted(configurations(), launch_s=0.5)
    found = megatron.fit_and_predict(near, far)
    assert errors(found, truth).max() < 0.15
    assert ((found[LOW_MS] < truth[TIME_MS]) & (truth[TIME_MS] < found[HIGH_MS])).all()
    assert found[NOTE].str.contains("80 GB").all()
    assert found[NOTE].str.contains("beyond what was observed: # GPUs").all()
    width = np.log(found[HIGH_MS] / found[LOW_MS])
    seen = megatron.fit_and_predict(near, configurations())
    assert width.min() > 3 * np.log(seen[HIGH_MS] / seen[LOW_MS]).max()


def test_one_observation_gives_finite_wide_intervals():
    found = megatron.fit_and_predict(planted(configurations()).iloc[:1], configurations())
    assert np.isfinite(found[[TIME_MS, LOW_MS, HIGH_MS]]).all(axis=None)
    assert (found[HIGH_MS] / found[LOW_MS]).max() > 1.5


def test_order_of_rows_does_not_matter():
    seen = planted(configurations())
    at = configurations(hidden=(4096,))
    shuffled = megatron.fit_and_predict(seen.sample(frac=1, random_state=1), at)
    pd.testing.assert_frame_equal(megatron.fit_and_predict(seen, at), shuffled, rtol=1e-6)


def test_no_configuration_fails():
    odd = pd.DataFrame(
        [
            (1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
            (60, 7, 3, 96, 5, 7, 100, 3, 4, 5),
            (16, 10**7, 1, 128, 10**7, 1, 10**5, 16, 1, 1),
            (10**6, 10**6, 8, 10**5, 128, 10**4, 4096, 100, 100, 100),
        ],
        columns=list(CONFIGURATION),
    )
    found = megatron.fit_and_predict(planted(configurations()), odd)
    assert np.isfinite(found[[TIME_MS, LOW_MS, HIGH_MS]]).all(axis=None)
    assert (found[LOW_MS] > 0).all()
    assert "multiple of micro batch" in found[NOTE][1]


def test_halves_are_seeded_and_keep_groups_together():
    table = planted(configurations())
    first, second = megatron.split(table, 3, ["hidden size", "micro batch"])
    again, _ = megatron.split(table, 3, ["hidden size", "micro batch"])
    pd.testing.assert_frame_equal(first, again)
    keys = [set(zip(half["hidden size"], half["micro batch"], strict=True)) for half in (first, second)]
    assert not keys[0] & keys[1]
    assert len(first) + len(second) == len(table)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (HEADER + GOOD + "8,32,4,0,16,24,1024,2,2,2,219.7\n", ["line 3", "hidden size = 0", "whole number from 1"]),
        (HEADER + "8,32,nan,1024,16,24,1024,2,2,2,219.7\n", ["line 2", "micro batch = nan"]),
        (HEADER + "8,32,4.5,1024,16,24,1024,2,2,2,219.7\n", ["line 2", "micro batch = 4.5"]),
        (HEADER + "8,32,4,1024,16,24,1024,2,2,2,\n", ["line 2", TIME_MS, "empty"]),
        (HEADER + "8,32,4,1024,16,24,1024,2,2,2,-1\n", ["line 2", "= -1", "above 0"]),
        (HEADER + "8,32,4,1024,16,24,1024,2,2,2,inf\n", ["line 2", "= inf"]),
        (HEADER + "8,32,4,1024,16,24,1024,2,2,4,219.7\n", ["line 2", "# GPUs = 8", "tensor x data x pipeline"]),
        (HEADER + GOOD + GOOD, ["line 3", "repeats"]),
        (HEADER, ["no rows"]),
        ("", ["not a table"]),
        (HEADER.replace("hidden size", "width") + GOOD, ["'hidden size' is missing", "the columns are"]),
        (HEADER.replace("hidden size", "micro batch") + GOOD, ["'hidden size' is missing"]),
        (HEADER.strip() + ",more\n" + GOOD.strip() + ",1\n", ["'more' is not known"]),
        (HEADER + GOOD.strip() + ",7\n", ["line 2"]),
    ],
)
def test_bad_observations_are_one_line_with_the_place(tmp_path, text, parts):
    path = tmp_path / "obs.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as error:
        megatron.read_observed(path)
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in [str(path), *parts]), message


def test_points_may_have_times_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "at.csv"
    path.write_text(HEADER + GOOD, encoding="utf-8-sig")
    assert list(megatron.read_points(path).columns) == list(CONFIGURATION)
    path.write_text(HEADER.replace(f",{TIME_MS}", "") + GOOD.rpartition(",")[0] + "\n", encoding="utf-8")
    assert len(megatron.read_points(path)) == 1


@given(text=st.text(max_size=200) | st.text(alphabet="0123456789.,-\n\"'e", max_size=200).map(HEADER.__add__))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_reader_never_crashes(tmp_path, text):
    path = tmp_path / "fuzzed.csv"
    path.write_text(text, encoding="utf-8", errors="replace")
    for read in (megatron.read_observed, megatron.read_points):
        said = refusal(read, path)
        assert said is None or (str(path) in said and "\n" not in said)


def refusal(read, path: Path) -> str | None:
    """What a reader says of a bad file; None of a good one."""
    try:
        read(path)
    except InputError as error:
        return str(error)
    return None


def test_what_is_written_reads_back_with_its_interval(tmp_path):
    seen = planted(configurations())
    path = tmp_path / "pred.csv"
    write_table(path, megatron.fit_and_predict(seen, seen[list(CONFIGURATION)]))
    back = pd.read_csv(path, keep_default_na=False)
    assert list(back.columns) == [*CONFIGURATION, TIME_MS, LOW_MS, HIGH_MS, NOTE]
    assert ((back[LOW_MS] < back[TIME_MS]) & (back[TIME_MS] < back[HIGH_MS])).all()


public = pytest.mark.skipif(not HOLDOUT.exists(), reason="public measurements are not beside this checkout")


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    return megatron.read_observed(HOLDOUT / "megatron_vtrain_single_node.csv")


@public
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_public_half_is_predicted_from_the_other_half(measured, seed):
    seen, unseen = megatron.split(measured, seed)
    found = megatron.fit_and_predict(seen, unseen[list(CONFIGURATION)])
    assert errors(found, unseen).mean() < 0.01
    covered = ((found[LOW_MS] <= unseen[TIME_MS]) & (unseen[TIME_MS] <= found[HIGH_MS])).mean()
    assert 0.85 <= covered <= 0.96


@public
@pytest.mark.parametrize(
    ("column", "most", "mean_error"), [("hidden size", 1024, 0.08), ("# GPUs", 4, 0.03), ("micro batch", 4, 0.08)]
)
def test_public_larger_configurations_are_predicted_from_smaller_ones(measured, column, most, mean_error):
    small = measured[column] <= most
    found = megatron.fit_and_predict(measured[small], measured.loc[~small, list(CONFIGURATION)])
    truth = measured[~small]
    assert errors(found, truth).mean() < mean_error
    assert ((found[LOW_MS] <= truth[TIME_MS]) & (truth[TIME_MS] <= found[HIGH_MS])).mean() >= 0.85


def command(root: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    executable = Path(sys.executable).parent / "steptime"
    return subprocess.run([executable, *map(str, arguments)], cwd=root, capture_output=True, text=True)


def test_the_command_predicts_and_leaves_nothing_behind_a_bad_file(root, tmp_path):
    seen = planted(configurations())
    obs, at, out = (tmp_path / name for name in ("obs.csv", "at.csv", "pred.csv"))
    seen.to_csv(obs, index=False)
    seen[list(CONFIGURATION)].to_csv(at, index=False)
    good = command(root, "megatron", "fit", "--observed", obs, "--at", at, "--out", out)
    assert good.returncode == 0, good.stderr
    assert len(pd.read_csv(out)) == len(seen)
    out.unlink()
    at.write_text(at.read_text().replace("1024", "-1", 1))
    bad = command(root, "megatron", "fit", "--observed", obs, "--at", at, "--out", out)
    assert bad.returncode == 2
    assert bad.stderr.count("\n") == 1
    assert f"{at}: line 2: hidden size = -1" in bad.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["at.csv", "obs.csv"]
