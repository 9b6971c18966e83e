"""A profile by FLOPs keeps the step, the shares and the bytes."""

import numpy as np
import pytest

from steptime.core.errors import InputError
from steptime.model.flops_profile import flops_profile
from steptime.networks import build


def test_layers_share_the_step_by_their_operations():
    network = build("alexnet", "full")
    profile = flops_profile(network, batch=8, step_s=0.3, source="planted")
    flops = np.array([layer.forward_flops + layer.backward_flops for layer in network.layers])
    assert profile.t_f_s + profile.t_b_s == pytest.approx(0.3)
    np.testing.assert_allclose((profile.forward_s + profile.backward_s) / 0.3, flops / flops.sum())
    assert profile.parameter_bytes.sum() == 4 * network.parameter_count


def test_the_share_of_backward_and_the_type_are_as_told():
    profile = flops_profile(build("lenet"), batch=8, step_s=2.0, source="planted", backward_share=0.25, dtype="float16")
    assert profile.t_b_s == pytest.approx(0.5)
    assert profile.parameter_bytes.sum() == 2 * build("lenet").parameter_count


@pytest.mark.parametrize("given", [{"step_s": 0.0}, {"step_s": float("nan")}, {"step_s": 1.0, "backward_share": 1.0}])
def test_an_impossible_step_is_refused(given):
    with pytest.raises(InputError, match=next(reversed(given))):
        flops_profile(build("lenet"), batch=8, source="planted", **given)
