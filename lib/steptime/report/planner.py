"""What the report's planner page is made of: measured layer profiles and links as one JSON, and the plan that stands
there without scripts.

The page computes with the closed forms of `model.step` and `model.exchanges`; this module says what it changes in a
profile before that: the batch, the speed of the device, and the interval.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from steptime.core.errors import InputError
from steptime.core.files import read_text
from steptime.core.machine import Link
from steptime.core.statistics import setting_names
from steptime.core.step import SCHEDULES, LayerProfile, Schedule
from steptime.model.fitting import profile_from_table
from steptime.model.step import predict_table
from steptime.report import figures, markup, style
from steptime.report.notebooks import TEMPLATES

LINK, WORKERS = "10gbe", (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""What the page shows first, and its static table without scripts."""
_SAME = ["framework", "network", "size", "dtype", "device", "threads"]
_SCHEDULE_LABELS = {name: figures.SCHEDULE_LABELS[name] for name in SCHEDULES}


@dataclass(frozen=True, eq=False)
class Recorded:
    """A measured layer profile with what was measured of its whole step.

    `step_s`: median and 95 % interval of one worker's step, seconds, if any. `batches`: (batch, median step in seconds)
    of the same setting on one campaign, ascending, empty where only one batch was measured.
    """

    campaign: str
    case_id: str
    setting: str
    dtype: str
    threads: int
    profile: LayerProfile
    step_s: tuple[float, float, float] | None
    batches: tuple[tuple[int, float], ...]

    @cached_property
    def order(self) -> tuple[bool, bool, int]:
        """The committed before this machine's, torch before others, then the network of the most gradients."""
        is_last = (self.campaign == "local", self.setting != "torch")
        return (*is_last, -int((self.profile.parameter_bytes > 0).sum()))


def read_recorded(fitted: Path) -> list[Recorded]:
    """Every layer profile of the tables of the fit stage (data/derived/fit), one worker, by campaign and case.

    None where no campaign has one. Raises InputError for a missing table.
    """
    layers, phases, steps = (_read(fitted, name) for name in ("layers", "phases", "steps"))
    cases = phases[phases["workers"] == 1].drop_duplicates(["campaign", "case_id"])
    if cases.empty:
        return []
    names = setting_names(cases)
    whole = steps.set_index(["campaign", "case_id"])[["median_s", "lo_s", "hi_s"]]
    layers_of = dict(list(layers.groupby(["campaign", "case_id"])))
    phases_of = {key: part.set_index("phase")["time_s"] for key, part in phases.groupby(["campaign", "case_id"])}
    found = []
    for (_, case), setting in zip(cases.iterrows(), names, strict=True):
        key = (case["campaign"], case["case_id"])
        profile = profile_from_table(
            layers_of[key],
            network=case["network"],
            source=f"{key[0]}: {key[1]}",
            batch=int(case["batch"]),
            phases_s=phases_of[key].to_dict(),
        )
        median_lo_hi = whole.loc[key].tolist() if key in whole.index else None
        step_s = None if median_lo_hi is None else (median_lo_hi[0], median_lo_hi[1], median_lo_hi[2])
        found.append(
            Recorded(*key, setting, case["dtype"], int(case["threads"]), profile, step_s, _batches(steps, case))
        )
    return found


def batch_factor(batches: Sequence[tuple[int, float]], recorded: int, batch: int) -> float:
    """How many times as long a step of `batch` computes and reads as one of the recorded batch.

    Between measured batches a straight line, beyond the largest in proportion, below the smallest its time; without
    measured batches in proportion.
    """
    if not batches:
        return batch / recorded
    sizes, times = map(list, zip(*batches, strict=True))

    def time_s(at: int) -> float:
        return float(np.interp(at, sizes, times)) if at <= sizes[-1] else times[-1] * at / sizes[-1]

    return time_s(batch) / time_s(recorded)


def scaled(recorded: Recorded, batch: int | None = None, speed: float = 1.0) -> LayerProfile:
    """The profile of another batch on a device `speed` times as fast.

    Forward and backward scale with `batch_factor` over `speed`, reading and copying with the factor, the update with
    the speed alone: it touches every parameter once, whatever the batch. Raises InputError for values not above 0.
    """
    profile = recorded.profile
    batch = profile.batch if batch is None else batch
    for name, value in (("batch", batch), ("speed", speed)):
        if not 0 < value < float("inf"):
            raise InputError(f"planner: {name} = {value}: must be above 0; correct the number")
    factor = batch_factor(recorded.batches, profile.batch, batch)
    return replace(
        profile,
        batch=batch,
        forward_s=profile.forward_s * factor / speed,
        backward_s=profile.backward_s * factor / speed,
        activation_bytes=profile.activation_bytes * batch / profile.batch,
        t_io_s=profile.t_io_s * factor,
        t_h2d_s=profile.t_h2d_s * factor,
        t_u_s=profile.t_u_s / speed,
    )


def planned_profile(
    root: Path, campaign: str, case_id: str, batch: int | None = None, speed: float = 1.0
) -> LayerProfile:
    """`scaled` of the profile of a case in data/derived/fit. Raises InputError naming what is known."""
    every = {(item.campaign, item.case_id): item for item in read_recorded(Path(root) / "data" / "derived" / "fit")}
    if (campaign, case_id) not in every:
        known = ", ".join(" ".join(key) for key in every) or "none; run `steptime run fit`"
        raise InputError(f"planner: {campaign} {case_id}: has no layer profile; known are {known}")
    return scaled(every[campaign, case_id], batch, speed)


def spread(recorded: Recorded) -> tuple[float, float] | None:
    """Factors of all of a profile's times between which the step lies: the interval's ends.

    One worker's modelled step, the sum of its phases, and the 95 % interval of the measured one: the range that has
    both. It says how well the step of one worker is known, nothing of the link. None without a measured step.
    """
    if recorded.step_s is None:
        return None
    of = recorded.profile
    one = of.t_io_s + of.t_h2d_s + of.t_f_s + of.t_b_s + of.t_u_s
    return min(1.0, recorded.step_s[1] / one), max(1.0, recorded.step_s[2] / one)


def page_values(fitted: Path, links: Sequence[Link]) -> dict[str, Any]:
    """What the template planner.html is filled with; without a layer profile or a link there is no static plan."""
    recorded = sorted(read_recorded(fitted), key=lambda item: item.order) if (fitted / "layers.csv").is_file() else []
    return {
        "static": _static(recorded[0], _first_link(links)) if recorded and links else None,
        "data": Markup(data_text(recorded, links)),
        "css": Markup(read_text(TEMPLATES / "planner.css")),
        "scripts": [Markup(read_text(TEMPLATES / name)) for name in ("planner-model.js", "planner.js")],
    }


def _static(first: Recorded, link: Link) -> dict[str, Any]:
    """The plan that stands on the page without scripts: a figure and a table."""
    table = predict_table(first.profile, [Schedule(name) for name in SCHEDULES], WORKERS, link)
    table["schedule"] = table["schedule"].map(_SCHEDULE_LABELS)
    style.use()
    drawn = table.assign(schedule=table["schedule"].map({label: key for key, label in _SCHEDULE_LABELS.items()}))
    figure = figures.speed_up(drawn, panel=None, title=f"Speed-up of {first.profile.network}, modelled: {link.name}")
    what = f"Speed-up of {first.profile.network} over {link.name} by workers and schedule, modelled"
    shown = table[["schedule", "workers", "step_s", "t_c_no_s", "samples_per_s", "speed_up"]]
    shown = shown.rename(columns={"t_c_no_s": "not_hidden_s", "samples_per_s": "samples a second"})
    return {
        "first": first,
        "link": link,
        "figure": Markup(markup.figure(style.svg_text(figure), what, "figure-plan")),
        "table": Markup(markup.table(shown, f"Modelled steps of {first.profile.network} over {link.name}")),
    }


def _first_link(links: Sequence[Link]) -> Link:
    return next((link for link in links if link.name == LINK), links[0])


def data_text(recorded: Sequence[Recorded], links: Sequence[Link]) -> str:
    """The page's data as JSON that may stand in a script element: profiles, the first the one shown first, and links.

    Layers' names and parameter bytes, the same in most settings, are there once (`sizes`).
    """
    sizes: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
    profiles = []
    for item in recorded:
        of = item.profile
        key = (of.layers, tuple(of.parameter_bytes.astype(int).tolist()))
        profiles.append(
            {
                **{name: getattr(item, name) for name in ("campaign", "case_id", "setting", "dtype", "threads")},
                "network": of.network,
                "batch": of.batch,
                "sizes": sizes.setdefault(key, len(sizes)),
                **{name: getattr(of, name).tolist() for name in ("forward_s", "backward_s")},
                **{name: getattr(of, name) for name in ("t_io_s", "t_h2d_s", "t_u_s")},
                "step_s": item.step_s,
                "batches": item.batches,
            }
        )
    data = {
        "sizes": [{"layers": names, "parameter_bytes": n_bytes} for names, n_bytes in sizes],
        "profiles": profiles,
        "links": [link.model_dump() for link in links],
        "first_link": _first_link(links).name if links else None,
    }
    # "</" would end the script element
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")


def _batches(steps: pd.DataFrame, case: pd.Series) -> tuple[tuple[int, float], ...]:
    """Measured batches of the case's setting on the campaign that has the most of them, two at least."""
    same = (steps[_SAME] == case[_SAME]).all(axis=1) & (steps["workers"] == 1) & (steps["input"] == "sequential")
    parts = [part for _, part in steps[same].groupby("campaign") if case["batch"] in set(part["batch"])]
    if not parts or len(longest := max(parts, key=len)) < 2:
        return ()
    ordered = longest.drop_duplicates("batch").sort_values("batch")
    return tuple(zip(ordered["batch"].astype(int).tolist(), ordered["median_s"].astype(float).tolist(), strict=True))


def _read(folder: Path, name: str) -> pd.DataFrame:
    path = folder / f"{name}.csv"
    if not path.is_file():
        raise InputError(f"{path}: is missing; run `steptime run fit` (or `make study`) first")
    return pd.read_csv(path)
