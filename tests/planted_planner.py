"""Invented ("planted") tables of the fit stage and links, for the planner page."""

from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from steptime.core.files import write_text
from steptime.core.step import LayerProfile

CAMPAIGN = "planted-laptop"
LINKS = {"10gbe": (4.5e-5, 8.5e-10), "1gbe": (4.4e-4, 9e-9), "100gb-ib": (7.2e-6, 8e-11)}
NETWORKS = {"lenet": (6, 32), "alexnet": (23, 16), "resnet50": (94, 16)}
"""Layers and batch."""
BATCHES = {4: 0.4, 16: 1.0, 64: 3.1}
"""Steps of alexnet at other batches, over that at 16."""


def plant_fit(root: Path) -> Path:
    """Write layers, phases and steps of two settings on three networks, and links; return the folder of the tables."""
    draw = np.random.default_rng(11)
    layers, phases, steps = [], [], []
    for network, (count, batch) in NETWORKS.items():
        n_bytes = np.where(draw.random(count) < 0.4, 0, 4 * draw.integers(10, 3_000_000, count))
        n_bytes[0] = 4000
        for framework, dtype in (("torch", "float32"), ("torch", "bfloat16"), ("tensorflow", "float32")):
            case_id = f"{framework}-{network}-quick-b{batch}-{dtype}-cpu-t1-sequential"
            case = _case(case_id, framework, network, batch, dtype)
            forward = draw.lognormal(-7.5, 1, count)
            table = {"layer": [f"{network}_{place}" for place in range(count)], "forward_s": forward}
            table |= {"backward_s": 1.9 * forward, "parameter_bytes": n_bytes, "activation_bytes": 1000}
            layers.append(pd.DataFrame({"campaign": CAMPAIGN, "case_id": case_id} | table))
            parts = {"io": 2e-4, "h2d": 3e-5, "forward": forward.sum(), "backward": 1.9 * forward.sum(), "update": 4e-4}
            phases += [case | {"phase": phase, "time_s": seconds} for phase, seconds in parts.items()]
            # the measured step is 4 % longer than its phases
            whole = 1.04 * sum(parts.values())
            others = BATCHES if network == "alexnet" and framework == "torch" and dtype == "float32" else {batch: 1.0}
            for other, factor in others.items():
                own = case | {"batch": other, "case_id": case_id.replace(f"-b{batch}-", f"-b{other}-")}
                steps.append(own | _interval(factor * whole))
    fitted = root / "data" / "derived" / "fit"
    for name, table in (
        ("layers", pd.concat(layers)),
        ("phases", pd.DataFrame(phases)),
        ("steps", pd.DataFrame(steps)),
    ):
        write_text(fitted / f"{name}.csv", table.to_csv(index=False, float_format="%.6g"))
    for name, (alpha_s, beta) in LINKS.items():
        link = {"name": name, "alpha_s": alpha_s, "beta_s_per_byte": beta, "source": "planted"}
        write_text(root / "data" / "machines" / "links" / f"{name}.yaml", yaml.safe_dump(link))
    return fitted


def plant_profile(root: Path, campaign: str, case_id: str, profile: LayerProfile) -> None:
    """Add the profile of a float32 case of torch to what `plant_fit` wrote, to the last digit."""
    fitted = root / "data" / "derived" / "fit"
    names = ("forward_s", "backward_s", "parameter_bytes", "activation_bytes")
    layers = pd.DataFrame({"layer": profile.layers} | {name: getattr(profile, name) for name in names})
    case = _case(case_id, "torch", profile.network, profile.batch, "float32") | {"campaign": campaign}
    phases = {
        "io": profile.t_io_s,
        "h2d": profile.t_h2d_s,
        "forward": profile.t_f_s,
        "backward": profile.t_b_s,
        "update": profile.t_u_s,
    }
    added = {
        "layers": layers.assign(campaign=campaign, case_id=case_id),
        "phases": pd.DataFrame([case | {"phase": phase, "time_s": seconds} for phase, seconds in phases.items()]),
    }
    for name, rows in added.items():
        whole = pd.concat([pd.read_csv(fitted / f"{name}.csv"), rows])
        write_text(fitted / f"{name}.csv", whole.to_csv(index=False, float_format="%.17g"))


def _case(case_id: str, framework: str, network: str, batch: int, dtype: str) -> dict:
    fixed = {"size": "quick", "device": "cpu", "threads": 1, "workers": 1, "input": "sequential"}
    own = {"framework": framework, "network": network, "batch": batch, "dtype": dtype}
    return {"campaign": CAMPAIGN, "case_id": case_id} | own | fixed


def _interval(seconds: float) -> dict:
    return {"median_s": seconds, "lo_s": 0.97 * seconds, "hi_s": 1.05 * seconds, "processes": 4, "samples": 80}
