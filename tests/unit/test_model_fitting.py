"""Layer profiles of a planted campaign: the planted times come back, and what was scaled away is told."""

import numpy as np
import pandas as pd
import pytest

from steptime import networks
from steptime.core.campaign import RUNS, SAMPLES, Campaign, as_table
from steptime.core.errors import InputError
from steptime.core.machine import Link
from steptime.core.step import Schedule
from steptime.model.fitting import (
    find_case,
    layer_profile,
    pass_fits,
    phase_medians,
    profile_cases,
    profile_from_table,
)
from steptime.model.step import predict_step

LINK = Link(name="planted", alpha_s=1.0, beta_s_per_byte=1.0, source="planted")
PHASES = {"io": 0.004, "h2d": 0.001, "forward": 0.010, "backward": 0.020, "update": 0.003}
NETWORK = networks.build("lenet")
CASE = {
    "framework": "torch",
    "network": "lenet",
    "size": "quick",
    "batch": 32,
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "workers": 1,
}
ROW = {
    "schema_version": 1,
    "status": "finished",
    "position": 0,
    "seed": 1,
    "warmups": 1,
    "git_dirty": False,
    "code_hash": "planted",
    "fingerprint": "planted",
    "command": "planted",
    "steptime_version": "0",
    "platform": "planted",
    "cpu_model": "planted",
    "cores_present": 2,
    "cores_allowed": 2,
    "memory_bytes": 1,
    "is_virtual": False,
    "timer": "planted",
}


def planted_campaign(name: str = "planted", speed: float = 1.0, framework: str = "torch") -> Campaign:
    """One case read in sequence and its twin with prefetch; layers take 1, 2, 3 … parts, in all half of the pass.

    The three processes drift by 2 % either way; warm-ups and disturbed
    repetitions take ten times as long.
    """
    runs, samples = [], []
    for reading in ("sequential", "prefetch"):
        case_id = f"{framework}-lenet-{reading}"
        for number, drift in enumerate((0.98, 1.0, 1.02)):
            run_id = f"{case_id}-r{number:02d}"
            runs.append(
                {
                    **ROW,
                    **CASE,
                    "framework": framework,
                    "run_id": run_id,
                    "case_id": case_id,
                    "input": reading,
                    "round": number,
                }
            )
            whole = 0.034 if reading == "prefetch" else sum(PHASES.values())
            read = 0.001 if reading == "prefetch" else PHASES["io"]
            times = {"step": whole, **PHASES, "io": read}
            for phase, seconds in times.items():
                samples += _repetitions(run_id, phase, None, seconds * drift * speed)
            if reading == "sequential":
                for phase in ("forward", "backward"):
                    for layer, share in zip(NETWORK.layers, _shares(), strict=True):
                        if layer.kind != "flatten":
                            seconds = 0.5 * share * PHASES[phase] * drift * speed
                            samples += _repetitions(run_id, phase, layer.name, seconds)
    return Campaign(name, as_table(runs, RUNS), as_table(samples, SAMPLES))


def _shares() -> np.ndarray:
    parts = np.array([0.0 if layer.kind == "flatten" else place + 1.0 for place, layer in enumerate(NETWORK.layers)])
    return parts / parts.sum()


def _repetitions(run_id: str, phase: str, layer: str | None, seconds: float) -> list[dict]:
    kinds = [(True, False), (False, True), (False, False), (False, False), (False, False)]
    return [
        {
            "run_id": run_id,
            "phase": phase,
            "layer": layer,
            "repeat": repeat,
            "is_warmup": warm,
            "is_disturbed": hit,
            "time_s": seconds * (10 if warm or hit else 1),
        }
        for repeat, (warm, hit) in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def campaign() -> Campaign:
    return planted_campaign()


def test_the_planted_phases_come_back(campaign):
    assert phase_medians(campaign, "torch-lenet-sequential") == pytest.approx(PHASES)


def test_the_profile_adds_up_to_the_measured_passes(campaign):
    profile = layer_profile(campaign, NETWORK, "torch-lenet-sequential")
    assert profile.t_f_s == pytest.approx(PHASES["forward"])
    assert profile.t_b_s == pytest.approx(PHASES["backward"])
    np.testing.assert_allclose(profile.backward_s, PHASES["backward"] * _shares(), rtol=1e-9)
    assert (profile.t_io_s, profile.t_h2d_s, profile.t_u_s) == pytest.approx((0.004, 0.001, 0.003))
    assert profile.parameter_bytes.sum() == 4 * NETWORK.parameter_count
    assert profile.activation_bytes[0] == 4 * 32 * NETWORK.layers[0].activation_count


def test_what_was_scaled_away_is_told(campaign):
    for fit in pass_fits(campaign, NETWORK, "torch-lenet-sequential").values():
        assert fit.scale == pytest.approx(2)
        assert fit.unexplained == pytest.approx(0.5)


def test_the_model_predicts_the_planted_steps(campaign):
    profile = layer_profile(campaign, NETWORK, "torch-lenet-sequential")
    times = [predict_step(profile, Schedule(prefetch=ahead), 1, LINK).step_s for ahead in (False, True)]
    assert times == pytest.approx([0.038, 0.033])


def test_only_cases_with_layers_and_unhidden_reading_have_profiles(campaign):
    assert list(profile_cases(campaign)["case_id"]) == ["torch-lenet-sequential"]
    assert find_case(campaign, "lenet", "torch") == "torch-lenet-sequential"
    with pytest.raises(InputError, match="it has torch lenet"):
        find_case(campaign, "alexnet", "torch")


def test_faults_are_one_line(campaign):
    with pytest.raises(InputError, match="no finished run"):
        layer_profile(campaign, NETWORK, "no such case")
    with pytest.raises(InputError, match="no layer or no phase timings"):
        layer_profile(campaign, NETWORK, "torch-lenet-prefetch")
    with pytest.raises(InputError, match="is not in mlp"):
        layer_profile(campaign, networks.build("mlp"), "torch-lenet-sequential")


TABLE = pd.DataFrame({"layer": ["a", "b"], "backward_s": [1.0, 3.0], "parameter_bytes": [4, 8]})


def test_a_table_without_forward_takes_it_from_the_step():
    profile = profile_from_table(TABLE, network="n", source="s", batch=2, step_s=6.0)
    assert profile.t_f_s == pytest.approx(2)
    assert profile.t_b_s == pytest.approx(4)


def test_a_table_with_forward_and_phases_is_taken_as_it_is():
    table = TABLE.assign(forward_s=[0.5, 0.25], activation_bytes=[7, 9])
    profile = profile_from_table(
        table, network="n", source="s", batch=2, phases_s={"io": 1.0, "h2d": 2.0, "update": 3.0}
    )
    assert (profile.t_io_s, profile.t_h2d_s, profile.t_f_s, profile.t_u_s) == (1, 2, 0.75, 3)
    np.testing.assert_array_equal(profile.activation_bytes, [7, 9])


def test_a_bad_table_is_one_line():
    with pytest.raises(InputError, match="'forward_s' is missing"):
        profile_from_table(TABLE, network="n", source="s", batch=2)
    with pytest.raises(InputError, match="step_s = 3: is shorter"):
        profile_from_table(TABLE, network="n", source="s", batch=2, step_s=3.0)
