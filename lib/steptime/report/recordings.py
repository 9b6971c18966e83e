"""Figures of recorded steps: where each step's time goes, what the ranks did when, and the step on more workers.

Each returns a matplotlib Figure, like `report.figures`.
"""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from steptime.core.step import Timeline
from steptime.report.style import colour, mark

WIDTH = 4.8
PARTS = {
    "compute_s": ("compute", "backward"),
    "input_s": ("read input", "io"),
    "copy_s": ("copy", "h2d"),
    "communication_s": ("exposed communication, with waiting", "comm"),
    "idle_s": ("idle", "grid"),
}
"""Part of a step -> what the legend calls it, and its colour."""
KINDS = {
    "input": ("read input", "io"),
    "h2d": ("copy", "h2d"),
    "forward": ("forward", "forward"),
    "backward": ("backward", "backward"),
    "communicate": ("communicate", "comm"),
    "update": ("update", "update"),
}
"""Kind of task -> what the legend calls it, and its colour."""


def step_parts(table: pd.DataFrame, title: str) -> Figure:
    """Each step of each rank as one bar of its parts. Columns: step, rank and those of PARTS (seconds)."""
    rows = table.sort_values(["step", "rank"], ignore_index=True)
    figure = Figure(figsize=(WIDTH, 1.4 + 0.19 * len(rows)))
    axes = figure.subplots()
    left = pd.Series(0.0, index=rows.index)
    shown = [name for name in PARTS if rows[name].sum() > 0]
    for name in shown:
        axes.barh(rows.index, 1e3 * rows[name], left=1e3 * left, height=0.8, color=colour(PARTS[name][1]))
        left += rows[name]
    axes.set_yticks(rows.index, [f"step {row.step}, rank {row.rank}" for row in rows.itertuples()], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time in one step, ms (measured)")
    handles = [Patch(color=colour(PARTS[name][1]), label=PARTS[name][0]) for name in shown]
    return _titled(figure, handles, title)


def rank_timeline(line: Timeline, title: str) -> Figure:
    """What each worker's resources did when, a row each. Tasks have one of KINDS."""
    rows = list(dict.fromkeys((task.worker, task.resource) for task in line.tasks))
    order = {"input": 0, "compute": 1, "copy": 2, "link": 3}
    rows.sort(key=lambda row: (row[0], order.get(row[1], len(order))))
    figure = Figure(figsize=(WIDTH, 1.5 + 0.3 * len(rows)))
    axes = figure.subplots()
    for task in line.tasks:
        place = rows.index((task.worker, task.resource))
        shade = colour(KINDS[task.kind][1])
        # Messages in flight at once lie on each other: thinner, so that both edges are seen.
        edge = {"edgecolor": colour("ink"), "linewidth": 0.5} if task.kind == "communicate" else {"linewidth": 0.0}
        axes.barh(place, 1e3 * (task.end_s - task.start_s), left=1e3 * task.start_s, height=0.7, color=shade, **edge)
    axes.set_yticks(range(len(rows)), [f"rank {worker}: {resource}" for worker, resource in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time in the step, ms ({line.kind})")
    shown = {task.kind for task in line.tasks}
    handles = [Patch(color=colour(shade), label=label) for kind, (label, shade) in KINDS.items() if kind in shown]
    return _titled(figure, handles, title)


def growth(grown: pd.DataFrame, recorded: pd.DataFrame, title: str) -> Figure:
    """Step time against workers, a line and a band a link, and the recorded steps themselves with their range.

    `grown`: link, workers, median_s, lo_s, hi_s (modelled). `recorded`: workers, median_s, lo_s, hi_s (measured).
    """
    figure = Figure(figsize=(WIDTH, 3.6))
    axes = figure.subplots()
    shades = ("torch", "tensorflow", "jax", "caffe", "cntk")
    handles = []
    for shade, (link, part) in zip(shades, grown.groupby("link", sort=False), strict=False):
        look = mark("modelled", shade)
        axes.fill_between(
            part["workers"], 1e3 * part["lo_s"], 1e3 * part["hi_s"], color=colour(shade), alpha=0.12, lw=0
        )
        axes.plot(part["workers"], 1e3 * part["median_s"], **look)
        handles.append(Line2D([], [], **look, label=f"{link}, modelled"))
    look = mark("measured", "ink") | {"linestyle": "none"}
    for row in recorded.itertuples():
        axes.plot([row.workers] * 2, [1e3 * row.lo_s, 1e3 * row.hi_s], color=colour("ink"), linewidth=1.2)
        axes.plot([row.workers], [1e3 * row.median_s], **look)
    handles.append(Line2D([], [], **look, label="recorded, measured"))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
        axis.grid(True)
    low, high = axes.get_ylim()
    ticks = [value for value in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if low <= value <= high]
    axes.set_yticks(ticks)
    axes.set_xlabel("workers")
    axes.set_ylabel("step time, ms")
    return _titled(figure, handles, title)


def _titled(figure: Figure, handles: list[Patch] | list[Line2D], title: str) -> Figure:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.legend(handles=handles, loc="outside lower left", ncols=2)
    return figure
