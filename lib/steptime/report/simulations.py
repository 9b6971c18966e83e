"""Figures of simulated steps: timelines of schedules beside each other, and what each resource keeps the step from.

Each returns a matplotlib Figure, like `report.figures`.
"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from steptime.core.step import Timeline
from steptime.report.figures import _checked, _legend_columns, _lines, _order
from steptime.report.style import colour, mark

WIDTH = 4.8
KINDS = {
    "input": ("read input", "io"),
    "h2d": ("copy to device", "h2d"),
    "host": ("host's delay", "muted"),
    "forward": ("forward", "forward"),
    "backward": ("backward", "backward"),
    "compress": ("choose what to send", "torch"),
    "communicate": ("communicate", "comm"),
    "update": ("update", "update"),
}
"""Kind of task -> what the legend calls it, and its colour."""
RESOURCES = {"device": "backward", "link": "comm", "input": "io", "copy": "h2d", "nic": "comm", "server": "torch"}
"""Resource -> its colour."""


def timelines(lines: Mapping[str, Timeline], title: str) -> Figure:
    """Timelines one below the other on one axis, a row a resource, a bar a task; tasks of one worker.

    The thin line is the end of the step. All lines must be of one kind, which the axis names.
    """
    rows = {name: list(dict.fromkeys(task.resource for task in line.tasks)) for name, line in lines.items()}
    heights = [len(resources) + 0.6 for resources in rows.values()]
    figure = Figure(figsize=(WIDTH, 1.4 + 0.23 * sum(heights)))
    panels = figure.subplots(len(lines), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    narrow_s = max(line.end_s for line in lines.values()) / 100
    for axes, (name, line) in zip(panels, lines.items(), strict=True):
        for task in line.tasks:
            axes.barh(
                rows[name].index(task.resource),
                1e3 * (task.end_s - task.start_s),
                left=1e3 * task.start_s,
                height=0.72,
                color=colour(KINDS[task.kind][1]),
                edgecolor=colour("paper"),
                linewidth=0.3 if task.end_s - task.start_s > narrow_s else 0.0,
            )
        axes.axvline(1e3 * line.end_s, color=colour("ink"), linewidth=0.9)
        axes.set_yticks(range(len(rows[name])), rows[name])
        axes.set_ylim(len(rows[name]) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.set_title(f"{name}: {1e3 * line.end_s:.3g} ms", fontsize=9, fontweight="normal", pad=2)
    panels[-1].set_xlabel(f"time in one step, ms ({', '.join(sorted({line.kind for line in lines.values()}))})")
    shown = {task.kind for line in lines.values() for task in line.tasks}
    handles = [Patch(color=colour(shade), label=label) for kind, (label, shade) in KINDS.items() if kind in shown]
    figure.suptitle(_lines(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.legend(handles=handles, loc="outside lower left", ncols=_legend_columns(handles, WIDTH * 72))
    return figure


def free_steps(table: pd.DataFrame, title: str) -> Figure:
    """What is left of the step if a resource took no time: a row a `name`, a mark a resource, percent of the step.

    Columns: name, resource, left (share of the step), kind.
    """
    table = _checked("free_steps", table, ["name", "resource", "left", "kind"])
    names, resources = _order(table["name"]), [name for name in RESOURCES if name in set(table["resource"])]
    figure = Figure(figsize=(WIDTH, 1.5 + 0.3 * len(names)))
    axes = figure.subplots()
    for row in table.itertuples():
        y = names.index(row.name) + 0.5 * ((resources.index(row.resource) + 0.5) / len(resources) - 0.5)
        axes.plot([100, 100 * row.left], [y, y], color=colour(RESOURCES[row.resource]), linewidth=1.2)
        axes.plot([100 * row.left], [y], **mark(row.kind, RESOURCES[row.resource]) | {"linestyle": "none"})
    axes.axvline(100, color=colour("muted"), linewidth=0.9)
    axes.set_xlim(0, 104)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(True, axis="x")
    axes.set_xlabel("step that would be left, share of the step")
    kinds = {row.resource: row.kind for row in table.itertuples()}
    handles = [
        Line2D(
            [], [], **mark(kinds[name], RESOURCES[name]) | {"linestyle": "none"}, label=f"{name} free, {kinds[name]}"
        )
        for name in resources
    ]
    figure.suptitle(_lines(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.legend(handles=handles, loc="outside lower left", ncols=_legend_columns(handles, WIDTH * 72))
    return figure
