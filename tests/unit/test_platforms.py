"""All-reduce times at sizes and placements that were not measured: planted platforms."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.model.observations import COLLECTIVES, check_observed
from steptime.model.platforms import PCIE_BYTES_PER_S, PCIE_SHARE, predict_collectives, read_curves, ring_rounds

SIZES = np.geomspace(2048, 2**27, 12).astype(int)


def planted(group: str, workers: int, nodes: int, sizes=SIZES, bus_bytes_per_s: float = 1e10) -> pd.DataFrame:
    """Ring: 20 us of latency and the bytes of the ring over a bus bandwidth."""
    sizes = np.asarray(sizes)
    times = ring_rounds(workers) * (2e-5 + sizes / bus_bytes_per_s)
    columns = {"group": group, "workers": workers, "nodes": nodes, "n_bytes": sizes}
    return pd.DataFrame({**columns, "time_s": times, "time_std_s": 0.01 * times})


def ask(group: str, workers: int, nodes: int, sizes) -> pd.DataFrame:
    return planted(group, workers, nodes, sizes)[list(COLLECTIVES.key)]


def test_affine_curve_is_exact_between_and_beyond_its_sizes():
    sizes = [3000, 10**5, 5 * 10**6, 10**8, 10**9]
    found = predict_collectives(planted("p", 4, 1), ask("p", 4, 1, sizes))
    np.testing.assert_allclose(found["time_s"], planted("p", 4, 1, sizes)["time_s"], rtol=1e-9)
    assert (found["hi_s"] / found["lo_s"]).max() < 2
    assert found["model"].str.startswith("measured at 12").all()


def test_protocol_switch_stays_where_it_was_measured():
    seen = planted("p", 4, 1)
    seen.loc[seen["n_bytes"] > 10**6, "time_s"] += 0.001
    before, after = SIZES[SIZES < 10**6][-1], SIZES[SIZES > 10**6][0]
    found = predict_collectives(seen, ask("p", 4, 1, [before, after]))
    assert found["time_s"][1] - found["time_s"][0] > 0.001


@pytest.mark.parametrize("slow_then_fast", [True, False])
def test_a_switch_between_two_sizes_is_seen_and_put_at_the_power_of_two(slow_then_fast):
    sizes = np.array([100_000, 300_000, 1_000_000, 2_500_000, 6_000_000, 12_000_000, 28_000_000, 60_000_000])
    switch = 2**23
    slow, fast = (planted("p", 4, 1, sizes, rate) for rate in (5e9, 1e10))
    before, after = (slow, fast) if slow_then_fast else (fast, slow)
    seen = before.where(before["n_bytes"] < switch, after).astype(before.dtypes)
    asked = [switch - 1000, switch + 1000]
    found = predict_collectives(seen, ask("p", 4, 1, asked))
    rates = (5e9, 1e10) if slow_then_fast else (1e10, 5e9)
    truth = [planted("p", 4, 1, [n], rate)["time_s"][0] for n, rate in zip(asked, rates, strict=True)]
    np.testing.assert_allclose(found["time_s"], truth, rtol=0.05)
    other = [planted("p", 4, 1, [n], rate)["time_s"][0] for n, rate in zip(asked, rates[::-1], strict=True)]
    assert (found["lo_s"] < np.array(other) * 1.05).all()
    assert (found["hi_s"] > np.array(other) * 0.95).all()


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e12), st.integers(2, 64))
def test_no_single_law_of_latency_and_bandwidth_looks_like_a_switch(latency_s, bytes_per_s, workers):
    times = latency_s + SIZES / bytes_per_s
    table = pd.DataFrame({"group": "p", "workers": workers, "nodes": 1, "n_bytes": SIZES, "time_s": times})
    (curve,) = read_curves(table.assign(time_std_s=0.0))
    between = np.sqrt(SIZES[1:] * SIZES[:-1].astype(float))
    np.testing.assert_allclose(curve.time(between), latency_s + between / bytes_per_s, rtol=1e-6)


def test_own_nics_are_found_between_placements_and_not_assumed_beyond_them():
    seen = pd.concat([planted("p", 2 * g, 2, bus_bytes_per_s=g * 5e9) for g in (1, 4)])
    sizes = [2**24, 2**26]
    inside = predict_collectives(seen, ask("p", 4, 2, sizes))
    np.testing.assert_allclose(inside["time_s"], planted("p", 4, 2, sizes, 1e10)["time_s"], rtol=0.15)
    beyond = predict_collectives(seen, ask("p", 16, 2, sizes))
    same_bus = planted("p", 16, 2, sizes, 2e10)["time_s"]
    doubled_bus = planted("p", 16, 2, sizes, 4e10)["time_s"]
    np.testing.assert_allclose(beyond["time_s"], same_bus, rtol=0.05)
    assert (beyond["lo_s"] < doubled_bus * 1.1).all()


def test_latency_goes_on_growing_with_the_nodes():
    """Tree: log2 n rounds of latency; the largest observed has 4 nodes, asked are 8 and 16."""

    def tree(nodes: int) -> pd.DataFrame:
        table = planted("p", nodes, nodes)
        return table.assign(time_s=np.log2(nodes) * 5e-5 + ring_rounds(nodes) * table["n_bytes"] / 1e9)

    seen = pd.concat([tree(2), tree(4)], ignore_index=True)
    for nodes in (8, 16):
        truth = tree(nodes)
        found = predict_collectives(seen, truth[list(COLLECTIVES.key)])
        np.testing.assert_allclose(found["time_s"], truth["time_s"], rtol=0.25)
        assert ((found["lo_s"] < truth["time_s"]) & (truth["time_s"] < found["hi_s"])).all()


def test_placement_without_a_pair_follows_the_ring():
    found = predict_collectives(planted("p", 2, 1), ask("p", 4, 1, SIZES))
    np.testing.assert_allclose(found["time_s"], planted("p", 4, 1)["time_s"], rtol=1e-6)
    assert (found["hi_s"] / found["lo_s"]).min() > 1.5


@pytest.mark.parametrize("device", ["a100", "h100"])
def test_beyond_an_nvlink_island_the_bandwidth_is_pcie(device):
    group = f"{device}_pairwise"
    found = predict_collectives(planted(group, 2, 1, bus_bytes_per_s=2e11), ask(group, 4, 1, [2**14, 2**29]))
    assert found["time_s"][1] == pytest.approx(1.5 * 2**29 / (PCIE_SHARE * PCIE_BYTES_PER_S[device]), rel=0.01)
    width = np.log(found["hi_s"] / found["lo_s"])
    assert width[0] > width[1]


def test_unknown_platform_and_unknown_kind_get_a_wide_interval():
    seen = planted("p", 4, 1)
    found = predict_collectives(seen, pd.concat([ask("q", 4, 1, [10**6]), ask("p", 8, 2, [10**6])], ignore_index=True))
    assert np.isfinite(found[["time_s", "lo_s", "hi_s"]].to_numpy()).all()
    assert (found["hi_s"] / found["lo_s"]).min() > 5
    assert found["model"].str.contains("wide interval").all()


def test_one_size_is_answered():
    found = predict_collectives(planted("p", 4, 1, [10**6]), ask("p", 4, 1, [10**5, 10**7]))
    assert np.isfinite(found[["time_s", "lo_s", "hi_s"]].to_numpy()).all()
    assert found["time_s"][1] > found["time_s"][0]


def test_order_of_rows_does_not_matter():
    seen = pd.concat([planted("p", 2, 1), planted("p", 4, 1, bus_bytes_per_s=2e10)], ignore_index=True)
    at = ask("p", 8, 1, SIZES)
    mixed = predict_collectives(seen.sample(frac=1, random_state=1), at)
    pd.testing.assert_frame_equal(predict_collectives(seen, at), mixed)
    assert mixed["time_s"].is_monotonic_increasing


def test_intervals_cover_noisy_curves():
    random = np.random.default_rng(5)
    seen, truth = planted("p", 4, 1), planted("p", 4, 1, np.geomspace(3000, 2**27, 200).astype(int))
    for table in (seen, truth):
        table["time_s"] *= np.exp(0.05 * random.standard_normal(len(table)))
        table["time_std_s"] = 0.05 * table["time_s"]
    found = predict_collectives(seen, truth[list(COLLECTIVES.key)])
    covered = (found["lo_s"] <= truth["time_s"]) & (truth["time_s"] <= found["hi_s"])
    assert covered.mean() >= 0.8


def test_bad_rows_name_the_line():
    seen = planted("p", 4, 1)
    seen.loc[3, "time_s"] = -1.0
    with pytest.raises(InputError, match=r"obs.csv: line 5: time_s = -1.0: must be a time above 0 s"):
        check_observed(seen, COLLECTIVES, "obs.csv")
