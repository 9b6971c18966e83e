"""Figures of parallel training: what a GPU keeps, and what a step's time goes into, one bar a layout."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from steptime.report.style import colour

WIDTH = 4.8
MEMORY = {
    "values": ("parameters", "forward"),
    "gradients": ("gradients", "backward"),
    "optimizer": ("optimizer", "h2d"),
    "layers": ("activations", "comm"),
    "outside": ("logits, embedding", "update"),
}
TIME = {
    "compute_s": ("compute", "backward"),
    "tensor_s": ("all-reduce of layers", "comm"),
    "send_s": ("between stages", "tensorflow"),
    "bubble_s": ("bubble", "h2d"),
    "data_s": ("gradients", "torch"),
    "update_s": ("update", "update"),
}
"""Column -> what the legend calls it, and its colour."""


def memory(table: pd.DataFrame, limit_gb: float, title: str) -> Figure:
    """Gigabytes of a GPU, stacked, one bar a row of `name`; the line is what it has. Columns: name, those of MEMORY in
    bytes."""
    figure, axes = _bars(table, MEMORY, 1e-9, "GB on a GPU", title)
    axes[0].axvline(limit_gb, color=colour("ink"), linewidth=1.0, linestyle=":")
    axes[0].annotate(
        f"{limit_gb:g} GB",
        (limit_gb, 1),
        (3, 3),
        xycoords=("data", "axes fraction"),
        fontsize=8,
        textcoords="offset points",
    )
    return figure


def times(table: pd.DataFrame, title: str) -> Figure:
    """Seconds of a step, stacked, one bar a row of `name`. Columns: name, those of TIME."""
    figure, _ = _bars(table, TIME, 1.0, "time of a step, s", title)
    return figure


def scores(table: pd.DataFrame, title: str) -> Figure:
    """Mean error, one row a split, one mark a model, on a logarithmic axis. Columns: split, model, mean."""
    splits, models = list(dict.fromkeys(table["split"])), list(dict.fromkeys(table["model"]))
    figure = Figure(figsize=(WIDTH, 1.3 + 0.34 * len(splits)))
    axes = figure.subplots()
    shades = [colour(name) for name in ("tensorflow", "muted", "torch")]
    for model, shade, marker in zip(models, shades, "osD", strict=False):
        part = table[table["model"] == model].set_index("split")["mean"].reindex(splits)
        axes.plot(part, range(len(splits)), marker, color=shade, markersize=6, label=model)
    axes.set_xscale("log")
    ticks = [0.003, 0.01, 0.03, 0.1, 0.3]
    axes.set_xticks(ticks, [f"{100 * tick:g} %" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(splits)), splits, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("mean error of what was held out")
    axes.xaxis.grid(True)
    _finish(figure, axes.get_legend_handles_labels()[0], title, 1)
    return figure


def _bars(
    table: pd.DataFrame, parts: Mapping[str, tuple[str, str]], unit: float, label: str, title: str
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, 1.7 + 0.27 * len(table)))
    axes = figure.subplots()
    left = np.zeros(len(table))
    places = np.arange(len(table))
    for column, (_, shade) in parts.items():
        width = unit * table[column].to_numpy(float)
        axes.barh(places, width, 0.78, left, color=colour(shade), edgecolor=colour("paper"), linewidth=0.5)
        left += width
    for place, end in zip(places, left, strict=True):
        axes.annotate(f"{end:.3g}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(places, table["name"], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, left.max() * 1.13)
    axes.set_xlabel(label)
    axes.xaxis.grid(True)
    present = [column for column in parts if table[column].max() * unit > 0.001 * left.max()]
    _finish(figure, [Patch(facecolor=colour(parts[c][1]), label=parts[c][0]) for c in present], title, 3)
    return figure, [axes]


def _finish(figure: Figure, handles: list, title: str, columns: int) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=8)
