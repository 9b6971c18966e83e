"""The planner in JupyterLab: controls of ipywidgets over the models that the planner page has, redrawn at each change.

What is computed is `computed`, what is shown of it `headline`, `without` and the two figures; they stand by themselves
where no kernel answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import ipywidgets as widgets
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from steptime.core.machine import Link
from steptime.core.step import SCHEDULES, LayerProfile, Schedule, Timeline
from steptime.model.exchanges import ring_exchange
from steptime.model.schedules import step_graph
from steptime.model.simulator import simulate
from steptime.model.step import StepTime, predict_step, predict_table
from steptime.model.what_if import bottlenecks
from steptime.report import figures, markup, simulations, style
from steptime.report.planner import Recorded, scaled, spread

MOST_WORKERS = 4096
FREED = {"link": "communication", "device": "computing", "input": "reading", "copy": "copying"}
"""Resource -> what it does, in the table of what a step waits for."""


WAIT_FREE = Schedule("wait_free")


@dataclass(frozen=True)
class Plan:
    """What one may choose: seconds and bytes, `speed` times the device's FLOP/s, workers in a ring."""

    recorded: Recorded
    link: Link
    batch: int
    workers: int = 16
    speed: float = 1.0
    schedule: Schedule = WAIT_FREE


@dataclass(frozen=True)
class Planned:
    """What follows from a plan. `ends_s`: the step by how well one worker's step is known, None where it was not
    measured; `curve`: workers, schedule, speed_up; `without`: resource, free_step_s, gain."""

    step: StepTime
    ends_s: tuple[float, float] | None
    speed_up: float
    curve: pd.DataFrame
    timeline: Timeline
    without: pd.DataFrame


def computed(plan: Plan) -> Planned:
    """The step, its interval, the curve, one step's tasks and what each resource keeps it from (all modelled)."""
    profile = scaled(plan.recorded, plan.batch, plan.speed)
    step = predict_step(profile, plan.schedule, plan.workers, plan.link)
    factors = spread(plan.recorded)
    ends = None if factors is None else tuple(_stretched_s(plan, profile, factor) for factor in factors)
    counts = sorted({*(2**power for power in range(int(np.log2(max(64, plan.workers))) + 1)), plan.workers})
    schedules = [Schedule(name, plan.schedule.prefetch) for name in SCHEDULES]
    graph = step_graph(profile, plan.schedule, ring_exchange(plan.workers, plan.link))
    one_s = predict_step(profile, plan.schedule, 1, plan.link).step_s
    return Planned(
        step,
        ends,  # type: ignore[arg-type]
        plan.workers * one_s / step.step_s,
        predict_table(profile, schedules, counts, plan.link)[["workers", "schedule", "speed_up"]],
        simulate(graph).timeline(),
        bottlenecks(graph)[["resource", "free_step_s", "gain"]],
    )


def _stretched_s(plan: Plan, profile: LayerProfile, factor: float) -> float:
    """The step if all that one worker does took `factor` times as long."""
    phases = {
        name: factor * getattr(profile, name) for name in ("forward_s", "backward_s", "t_io_s", "t_h2d_s", "t_u_s")
    }
    return predict_step(replace(profile, **phases), plan.schedule, plan.workers, plan.link).step_s


def headline(plan: Plan, found: Planned) -> str:
    """The answer in one sentence, and what one change would bring in another."""
    interval = "" if found.ends_s is None else " ({:.4g} to {:.4g})".format(*(1e3 * end for end in found.ends_s))
    profile = plan.recorded.profile
    most = found.without.iloc[0]
    return (
        f"{plan.recorded.setting} on {profile.network}, batch {plan.batch} a worker, {plan.workers} "
        f"worker{'' if plan.workers == 1 else 's'} over {plan.link.name}: {1e3 * found.step.step_s:.4g} ms a "
        f"step{interval}, speed-up {found.speed_up:.3g} (modelled). "
        f"Without {FREED[most['resource']]} it would take {1e3 * most['free_step_s']:.4g} ms, "
        f"{most['gain']:.1%} less."
    )


def without(found: Planned) -> pd.DataFrame:
    """What a step waits for, as a table for people."""
    table = found.without
    return pd.DataFrame(
        {
            "without": table["resource"].map(FREED),
            "step, ms": (1e3 * table["free_step_s"]).map("{:.4g}".format),
            "less": (100 * table["gain"]).map("{:.1f} %".format),
        }
    )


def curve_figure(plan: Plan, found: Planned) -> Figure:
    """Speed-up over workers for each schedule."""
    title = f"Speed-up of {plan.recorded.profile.network} over {plan.link.name}, modelled"
    return figures.speed_up(found.curve, panel=None, title=title)


def timeline_figure(plan: Plan, found: Planned) -> Figure:
    """One worker's tasks in one step."""
    name = figures.SCHEDULE_LABELS.get(plan.schedule.aggregation, plan.schedule.aggregation)
    return simulations.timelines({name: found.timeline}, f"One step on {plan.workers} workers, simulated")


class Planner:
    """Controls and what they show; `panel` is the widget. `found` is what is shown now."""

    def __init__(self, recorded: Sequence[Recorded], links: Mapping[str, Link], link: str, workers: int = 16) -> None:
        """The first of `recorded` is shown first, on `workers` (a power of two) over the link of that name."""
        self.links = links
        options = [(f"{item.profile.network}, {item.setting} ({item.campaign})", item) for item in recorded]
        wide = {"style": {"description_width": "9rem"}, "layout": {"width": "34rem"}}
        late = wide | {"continuous_update": True}
        self.profile = widgets.Dropdown(options=options, description="layer profile", **wide)
        self.batch = widgets.BoundedIntText(recorded[0].profile.batch, min=1, max=4096, description="batch", **wide)
        self.speed = widgets.FloatLogSlider(1.0, min=-2, max=3, step=0.05, description="FLOP/s, times", **late)
        self.workers = widgets.SelectionSlider(
            options=[2**power for power in range(13)], value=workers, description="workers", **late
        )
        self.link = widgets.Dropdown(options=[*links, "own"], value=link, description="link", **wide)
        self.alpha_us = widgets.FloatLogSlider(50, min=-2, max=4, step=0.05, description="α, µs", **late)
        self.gbit_per_s = widgets.FloatLogSlider(10, min=-2, max=4, step=0.05, description="1/β, Gbit/s", **late)
        names = [(figures.SCHEDULE_LABELS[name], name) for name in SCHEDULES]
        self.schedule = widgets.Dropdown(options=names, value="wait_free", description="gradients leave", **wide)
        self.prefetch = widgets.Checkbox(False, description="read the next batch meanwhile", **wide)
        self.said, self.shown = widgets.HTML(), widgets.HTML()
        self._own = widgets.VBox([self.alpha_us, self.gbit_per_s])
        self._controls = (
            self.profile, self.batch, self.speed, self.workers, self.link, self.alpha_us, self.gbit_per_s,
            self.schedule, self.prefetch,
        )  # fmt: skip
        top = [*self._controls[:5], self._own, self.schedule, self.prefetch]
        self.panel = widgets.VBox([*top, self.said, self.shown])
        self.profile.observe(self._take_its_batch, "value")
        for control in self._controls:
            control.observe(self._redraw, "value")
        self._redraw()

    @property
    def plan(self) -> Plan:
        """What the controls say."""
        return Plan(
            self.profile.value,
            self.links.get(self.link.value) or self._own_link(),
            self.batch.value,
            self.workers.value,
            self.speed.value,
            Schedule(self.schedule.value, self.prefetch.value),
        )

    def _own_link(self) -> Link:
        beta = 8 / (self.gbit_per_s.value * 1e9)
        return Link(name="own", alpha_s=self.alpha_us.value / 1e6, beta_s_per_byte=beta, source="typed")

    def _take_its_batch(self, _: object) -> None:
        self.batch.value = self.profile.value.profile.batch

    def _redraw(self, _: object = None) -> None:
        self._own.layout.display = "" if self.link.value == "own" else "none"
        plan = self.plan
        self.found = computed(plan)
        self.said.value = f"<p><strong>{markup.escape(headline(plan, self.found))}</strong></p>"
        drawn = [style.svg_text(draw(plan, self.found)) for draw in (timeline_figure, curve_figure)]
        svgs = "".join(f'<div style="background: #fff">{svg[svg.index("<svg") :]}</div>' for svg in drawn)
        self.shown.value = markup.table(without(self.found)) + svgs
