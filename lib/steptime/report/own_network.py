"""What is said of a measured network of one's own: step, phases, layers, the step on more workers; as text and page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from steptime.core.campaign import Campaign
from steptime.core.files import write_texts
from steptime.core.machine import Link
from steptime.core.network import Network
from steptime.core.statistics import case_table
from steptime.core.step import SCHEDULES, LayerProfile, Schedule
from steptime.model.fitting import layer_profile, pass_fits
from steptime.model.step import predict_table
from steptime.report import figures, markup, style
from steptime.report.alone import paragraphs
from steptime.report.site import alone

WORKERS = (1, 2, 4, 8, 16)
MOST_LAYERS = 12
"""Layers that the terminal lists; the page and profile.csv have all."""


@dataclass(frozen=True)
class Result:
    """`case`: a row of `statistics.case_table`; `layers`: layer, kind, output, parameters, forward_s, backward_s;
    `unexplained`: share of forward and backward that the layers' own times miss; `remarks`: a line each."""

    case: pd.Series
    profile: LayerProfile
    layers: pd.DataFrame
    unexplained: dict[str, float]
    predictions: pd.DataFrame
    link: Link
    remarks: tuple[str, ...]


def result(campaign: Campaign, network: Network, remarks: Sequence[str], link: Link) -> Result:
    """The campaign of one case, its layer profile, and the modelled step on WORKERS."""
    case = case_table(campaign.joined()).iloc[0]
    profile = layer_profile(campaign, network, case["case_id"])
    layers = pd.DataFrame(
        {
            "layer": [layer.name for layer in network.layers],
            "kind": [layer.kind for layer in network.layers],
            "output": [" × ".join(map(str, layer.out_shape)) for layer in network.layers],
            "parameters": [layer.parameter_count for layer in network.layers],
            "forward_s": profile.forward_s,
            "backward_s": profile.backward_s,
        }
    )
    fits = pass_fits(campaign, network, case["case_id"])
    predictions = predict_table(profile, [Schedule(name) for name in SCHEDULES], WORKERS, link)
    unexplained = {name: fit.unexplained for name, fit in fits.items()}
    return Result(case, profile, layers, unexplained, predictions, link, tuple(remarks))


def lines(found: Result) -> list[str]:
    """For the terminal."""
    profile, layers = found.profile, found.layers
    longest = layers.assign(both=layers["forward_s"] + layers["backward_s"]).nlargest(MOST_LAYERS, "both")
    shown = pd.DataFrame(
        {
            "layer": longest["layer"],
            "kind": longest["kind"],
            "forward, ms": (1e3 * longest["forward_s"]).map("{:.4g}".format),
            "backward, ms": (1e3 * longest["backward_s"]).map("{:.4g}".format),
            "parameters": longest["parameters"].map("{:,}".format),
        }
    )
    more = f"; the {MOST_LAYERS} longest of {len(layers)}" if len(layers) > MOST_LAYERS else ""
    predicted = found.predictions
    steps = pd.DataFrame(
        {
            "schedule": predicted["schedule"],
            "workers": predicted["workers"],
            "step, ms": (1e3 * predicted["step_s"]).map("{:.4g}".format),
            "speed-up": predicted["speed_up"].map("{:.4g}".format),
        }
    )
    return [
        _step_line(found),
        _phases_line(found),
        *found.remarks,
        f"layers, measured{more}:",
        shown.to_string(index=False),
        _model_line(found),
        f"on more workers over {found.link.name}, {profile.batch} samples each, modelled:",
        steps.to_string(index=False),
    ]


def write(found: Result, folder: Path) -> None:
    """profile.csv (which `steptime workers run --emulate` reads), predictions.csv and index.html, all or none."""
    profile = found.profile
    table = found.layers[["layer", "forward_s", "backward_s"]].assign(
        parameter_bytes=profile.parameter_bytes.astype(int)
    )
    form = {"index": False, "float_format": "%.9g", "lineterminator": "\n"}
    write_texts(
        {
            folder / "profile.csv": table.to_csv(**form),
            folder / "predictions.csv": found.predictions.to_csv(**form),
            folder / "index.html": _page(found),
        }
    )


def _page(found: Result) -> str:
    style.use()
    curve = found.predictions[["schedule", "workers", "speed_up"]].assign(kind="modelled")
    drawing = figures.speed_up(curve, panel=None, title=f"Speed-up over one worker, {found.link.name}")
    shown = found.predictions[["schedule", "workers", "step_s", "speed_up", "efficiency"]]
    sections = [
        ("The step", paragraphs([_phases_line(found), *found.remarks])),
        (
            "Layers",
            markup.table(found.layers, "Each layer in forward order, measured in whole steps and scaled to them"),
        ),
        (
            "On more workers",
            paragraphs([_model_line(found)])
            + markup.figure(style.svg_text(drawing), "Speed-up by workers and schedule", "speed-up")
            + markup.table(shown, f"Weak scaling over {found.link.name}, modelled"),
        ),
    ]
    return alone(found.profile.network, _step_line(found), sections)


def _step_line(found: Result) -> str:
    case = found.case
    ends = (1e3 * case["median_s"], 1e3 * case["lo_s"], 1e3 * case["hi_s"])
    return (
        f"{case['case_id']}: a step takes {ends[0]:.4g} ms ({ends[1]:.4g} to {ends[2]:.4g}, 95 %), measured in "
        f"{case['processes']} processes"
    )


def _model_line(found: Result) -> str:
    """How far the model is off where it can be checked."""
    modelled = float(found.predictions.loc[found.predictions["workers"] == 1, "step_s"].iloc[0])
    measured = float(found.case["median_s"])
    off = f"{modelled / measured - 1:+.0%}"
    return f"one worker: {1e3 * modelled:.4g} ms modelled, {1e3 * measured:.4g} ms measured: the model is {off} off"


def _phases_line(found: Result) -> str:
    profile = found.profile
    phases = {
        "reading": profile.t_io_s,
        "copy": profile.t_h2d_s,
        "forward": profile.t_f_s,
        "backward": profile.t_b_s,
        "update": profile.t_u_s,
    }
    told = ", ".join(f"{name} {1e3 * seconds:.4g} ms" for name, seconds in phases.items())
    off = ", ".join(f"{share:+.0%} of {name}" for name, share in found.unexplained.items())
    return f"{told}; the layers' own times miss {off}, and are scaled to it"
