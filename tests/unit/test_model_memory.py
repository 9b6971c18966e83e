"""The memory model: described bytes against counting by hand, the fit against planted peaks, the largest batch against
its definition."""

import numpy as np
import pandas as pd
import planted_campaign as planted
import pytest

from steptime.core.errors import InputError
from steptime.model import memory
from steptime.model.cases import case_table
from steptime.networks import Builder, build


def test_described_bytes_of_a_dense_layer_and_a_view() -> None:
    b = Builder((3, 4, 4))
    b.flatten("flat", "input")
    b.dense("dense", "flat", 10)
    found = memory.described_bytes(b.network("n", "quick"))
    assert found.fixed == 2 * 4 * (48 * 10 + 10)
    # input 48, output of the dense layer 10 (the view keeps nothing), gradients of the view: 48 in, 48 out
    assert found.per_sample == 4 * (48 + 10 + 96)
    assert found.at(5) == found.fixed + 5 * found.per_sample


def test_tokens_are_eight_bytes_and_lower_precision_keeps_parameters_whole() -> None:
    network = build("lstm")
    full, half = memory.described_bytes(network), memory.described_bytes(network, "bfloat16")
    assert half.fixed == full.fixed
    tokens = 8 * network.input_shape[0]
    assert half.per_sample - tokens == (full.per_sample - tokens) / 2


def test_the_fit_finds_the_planted_base_and_factor() -> None:
    described = np.array([1e6, 5e6, 40e6])
    fit = memory.fit_memory(described, 2e8 + 2.5 * described)
    assert fit.base_bytes == pytest.approx(2e8)
    assert fit.factor == pytest.approx(2.5)


def test_a_fit_of_one_size_is_refused() -> None:
    with pytest.raises(InputError, match="needs 2"):
        memory.fit_memory(np.array([1e6, 1e6]), np.array([1e8, 1e8]))


def test_leaving_a_network_out_predicts_it_from_the_others() -> None:
    cases = pd.DataFrame({"network": ["a", "b", "c"], "described_bytes": [1e6, 2e6, 4e6]})
    cases["peak_memory_bytes"] = 1e8 + 3 * cases["described_bytes"]
    found = memory.left_out(cases)
    assert found["error"].abs().max() < 1e-9
    assert found["constant_error"].abs().min() > 0.01
    # one network off the line is what its own row shows
    cases.loc[2, "peak_memory_bytes"] *= 1.2
    assert memory.left_out(cases).set_index("network").loc["c", "error"] == pytest.approx(1 / 1.2 - 1)


def test_two_networks_are_too_few_to_leave_one_out() -> None:
    cases = pd.DataFrame({"network": ["a", "b"], "described_bytes": [1.0, 2.0], "peak_memory_bytes": [5.0, 6.0]})
    assert memory.left_out(cases).empty


@pytest.mark.parametrize("budget", [3e8, 1e9, 7.7e9])
def test_the_largest_batch_fits_and_one_more_does_not(budget: float) -> None:
    fit, described = memory.MemoryFit(2.5e8, 2.3), memory.described_bytes(build("resnet50"))
    batch = memory.largest_batch(fit, described, budget)
    assert fit.predict(described.at(batch)) <= budget < fit.predict(described.at(batch + 1))


def test_no_sample_fits_and_no_growth_seen() -> None:
    described = memory.Described(10, 5)
    assert memory.largest_batch(memory.MemoryFit(1e9, 1.0), described, 1e8) == 0
    assert memory.largest_batch(memory.MemoryFit(1e6, 0.0), described, 1e8) is None


def test_a_campaign_s_setting_is_fitted_on_its_measured_peaks() -> None:
    campaign = planted.campaign()
    fit, error, largest = memory.fit_setting(campaign, "torch")
    assert fit.base_bytes == pytest.approx(planted.BASE_BYTES, rel=1e-4)
    assert fit.factor == pytest.approx(planted.MEMORY_FACTOR, rel=1e-3)
    assert error is not None
    assert error < 1e-4
    assert largest == 16
    with pytest.raises(InputError, match="it has caffe, jax, tensorflow"):
        memory.fit_setting(campaign, "theano")
    assert set(memory.memory_cases(case_table(campaign))["input"]) == {"sequential"}
