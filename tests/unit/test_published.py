"""The published files are valid, and the models reproduce what was computed from them before."""

from pathlib import Path

import numpy as np
import pytest

from steptime.core.campaign import read_table
from steptime.core.claims import read_paper
from steptime.core.errors import InputError
from steptime.core.machine import read_link
from steptime.model import merging
from steptime.model.collectives import AllReduce, ring, ring_link
from steptime.model.fitting import fit_all_reduce
from steptime.model.published import (
    ALL_REDUCE,
    SMALLEST_BYTES,
    bcaffe_all_reduce,
    bcaffe_curve,
    bcaffe_layers,
    bcaffe_profile,
    bcaffe_steps,
    poseidon_scaling,
)
from steptime.model.step import sending_order

DATA = Path(__file__).parents[2] / "data"
PUBLISHED = DATA / "published"
LINKS = DATA / "machines" / "links"


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_paper_is_valid_and_says_what_is_unverified(path):
    paper = read_paper(path)
    names = [figure.id for figure in paper.figures]
    assert len(set(names)) == len(names)
    for figure in paper.figures:
        second_hand = figure.where.startswith("from memory") or "as public notes on the paper quote it" in figure.where
        assert figure.verified == (not second_hand), figure.id


@pytest.mark.parametrize("path", sorted(LINKS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_link_is_valid(path):
    assert len(read_link(LINKS, path.stem).source) > 20


def test_an_unknown_link_names_the_known_ones():
    with pytest.raises(InputError, match="10gbe"):
        read_link(LINKS, "carrier-pigeon")


def test_a_link_is_called_as_its_file(tmp_path):
    (tmp_path / "a.yaml").write_text("{name: b, alpha_s: 1.0, beta_s_per_byte: 1.0, source: planted}")
    with pytest.raises(InputError, match="must equal the file's name"):
        read_link(tmp_path, "a")


def test_the_profile_is_the_one_that_was_described():
    for nodes, backward_ms, comm_ms in ((2, 200.3, 154.0), (4, 206.8, 261.5), (8, 205.3, 310.7)):
        layers = bcaffe_layers(PUBLISHED, nodes)
        assert len(layers) == 64
        assert layers["parameter_bytes"].sum() == 4 * 13_379_136
        assert layers["backward_s"].sum() * 1e3 == pytest.approx(backward_ms, abs=0.05)
        assert layers["comm_s"].sum() * 1e3 == pytest.approx(comm_ms, abs=0.05)
    with pytest.raises(InputError, match="nodes = 3"):
        bcaffe_layers(PUBLISHED, 3)


def test_one_node_takes_the_measured_step():
    profile = bcaffe_profile(PUBLISHED, 8)
    assert profile.t_f_s + profile.t_b_s == pytest.approx(0.391773)


@pytest.mark.parametrize(("nodes", "error"), [(2, -0.083), (4, 0.046), (8, -0.022)])
def test_wait_free_from_measured_layer_times(nodes, error):
    """Predicted with the start-time recursion, against the measured 427.6, 427.2 and 508.7 ms."""
    profile = bcaffe_profile(PUBLISHED, nodes)
    ready, _, _ = sending_order(profile)
    times = bcaffe_layers(PUBLISHED, nodes)["comm_s"].to_numpy()[::-1]
    end = merging.start_times(ready, times)[-1] + times[-1]
    predicted = profile.t_f_s + profile.t_b_s + max(0.0, end - profile.t_b_s)
    assert predicted / _step("WFBP", nodes) - 1 == pytest.approx(error, abs=0.0006)


@pytest.mark.parametrize(("nodes", "error"), [(2, -0.07), (4, -0.126), (8, -0.152)])
def test_one_message_by_the_fitted_all_reduce_is_too_fast(nodes, error):
    """The copies to the host and the reduction inside a node are not in the all-reduce benchmark."""
    profile = bcaffe_profile(PUBLISHED, nodes)
    cost = bcaffe_all_reduce(PUBLISHED, nodes)
    predicted = profile.t_f_s + profile.t_b_s + cost.time_s(float(profile.parameter_bytes.sum()))
    assert predicted / _step("one message", nodes) - 1 == pytest.approx(error, abs=0.001)


@pytest.mark.parametrize(
    ("faster", "cost", "layer_wise", "rule", "rule_count", "best", "best_count", "one"),
    [
        (1, AllReduce(5e-3, 2e-9), 427.5, 210.4, 4, 210.4, 14, 317.4),
        (5, AllReduce(9e-4, 7.4e-10), 97.3, 52.6, 3, 44.4, 5, 81.6),
        (5, AllReduce(2.4e-3, 1.5e-9), 234.0, 118.1, 2, 88.3, 3, 123.7),
        (5, AllReduce(5e-3, 2e-9), 427.1, 153.1, 1, 122.1, 3, 153.1),
        (20, AllReduce(5e-4, 1.5e-9), 112.3, 89.5, 2, 81.7, 2, 91.0),
    ],
)
def test_merging_on_the_k80_profile(faster, cost, layer_wise, rule, rule_count, best, best_count, one):
    """End of backward and aggregation, ms: the shipped rule is up to a third above the optimum."""
    ready, n_bytes, _ = sending_order(bcaffe_profile(PUBLISHED, 8))
    ready = ready / faster

    def milliseconds(ends):
        return 1e3 * merging.end_s(ready, n_bytes, ends, cost)

    rule_ends, best_ends = (
        choose(ready, n_bytes, cost) for choose in (merging.published_groups, merging.optimal_groups)
    )
    assert milliseconds(merging.layer_wise(64)) == pytest.approx(layer_wise, abs=0.05)
    assert (milliseconds(rule_ends), len(rule_ends)) == (pytest.approx(rule, abs=0.05), rule_count)
    assert (milliseconds(best_ends), len(best_ends)) == (pytest.approx(best, abs=0.05), best_count)
    assert milliseconds(merging.one_message(64)) == pytest.approx(one, abs=0.05)


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_the_ring_law_gives_the_published_slopes(nodes):
    figures = {figure.id: figure.value for figure in read_paper(PUBLISHED / "hkbu-network-fits.yaml").figures}
    link = ring_link("iperf", AllReduce(0.0, 8 / (figures["iperf-10gbe"] * 1e9)), 2, "planted")
    assert ring(nodes, link).b_s_per_byte == pytest.approx(figures[f"ring-beta-{nodes}"], rel=0.03)


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_the_k80_links_are_what_the_measurements_give(nodes):
    table = read_table(PUBLISHED / "bcaffe_osu_allreduce.csv", ALL_REDUCE)
    table = table[(table["nodes"] == nodes) & (table["n_bytes"] >= SMALLEST_BYTES)]
    line = fit_all_reduce(table["n_bytes"].to_numpy(), table["time_s"].to_numpy())
    fitted, filed = ring_link("fit", line, nodes, ""), read_link(LINKS, f"k80-10gbe-{nodes}")
    assert filed.alpha_s == pytest.approx(fitted.alpha_s, rel=1e-3)
    assert filed.beta_s_per_byte == pytest.approx(fitted.beta_s_per_byte, rel=1e-3)


def test_two_lines_fit_the_all_reduce_better_than_one():
    table = read_table(PUBLISHED / "bcaffe_osu_allreduce.csv", ALL_REDUCE)
    table = table[(table["nodes"] == 8) & (table["n_bytes"] >= SMALLEST_BYTES)]
    sizes, times = table["n_bytes"].to_numpy(), table["time_s"].to_numpy()
    one, two = fit_all_reduce(sizes, times), bcaffe_all_reduce(PUBLISHED, 8)
    error_one, error_two = (float(np.median(np.abs(cost.time_s(sizes) / times - 1))) for cost in (one, two))
    assert error_two < 0.5 * error_one


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_the_curve_passes_every_measured_all_reduce(nodes):
    table = read_table(PUBLISHED / "bcaffe_osu_allreduce.csv", ALL_REDUCE)
    table = table[table["nodes"] == nodes]
    curve = bcaffe_curve(PUBLISHED, nodes)
    np.testing.assert_allclose(curve.time_s(table["n_bytes"].to_numpy()), table["time_s"])
    assert curve.time_s(5e7) == bcaffe_all_reduce(PUBLISHED, nodes).time_s(5e7)


def test_the_papers_figures_are_those_of_the_table():
    figures = {figure.id: figure.value for figure in read_paper(PUBLISHED / "mg-wfbp-2018.yaml").figures}
    names = {"WFBP": "wfbp", "MG-WFBP": "mg-wfbp", "one message": "one-message"}
    for schedule, name in names.items():
        for nodes in (2, 4, 8):
            assert figures[f"step-googlenet-{name}-{nodes}"] == pytest.approx(1e3 * _step(schedule, nodes), abs=0.05)
        for network, slug in (("GoogLeNet", "googlenet"), ("ResNet-50", "resnet50")):
            speedup = 8 * _step(schedule, 1, network) / _step(schedule, 8, network)
            assert figures[f"speedup-{slug}-{name}-8"] == pytest.approx(speedup, abs=0.005)


def test_poseidon_s_figures_are_those_of_its_series():
    figures = {figure.id: figure.value for figure in read_paper(PUBLISHED / "poseidon-2017.yaml").figures}
    seconds = poseidon_scaling(PUBLISHED).set_index(["system", "nodes"])["seconds_per_20_steps"]
    for slug, system in (("poseidon", "poseidon"), ("wfbp", "caffe_wfbp"), ("ps", "caffe_ps")):
        for nodes in (2, 4, 8, 16, 32):
            speed_up = nodes * seconds["caffe", 1] / seconds[system, nodes]
            assert figures[f"speedup-{slug}-{nodes}"] == pytest.approx(speed_up, abs=0.006)


def _step(schedule: str, nodes: int, network: str = "GoogLeNet") -> float:
    steps = bcaffe_steps(PUBLISHED).set_index(["network", "schedule", "nodes"])["step_time_s"]
    return float(steps[network, schedule, nodes])
