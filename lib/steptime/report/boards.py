"""Figures of the board: how far predictions are off, beside the floor of the data, and where they are off most."""

import textwrap
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from steptime.report.style import colour

WIDTH = 4.8
LEAST = 0.001
OURS = "tensorflow"
"""The colour of this project's models; baselines are grey."""


def errors(table: pd.DataFrame, floors: Mapping[str, float], title: str) -> Figure:
    """Median (dot) to 90 % quantile (bar's end) of the error, one panel a set, one row a model.

    Columns: set, model, where ("held out" or "in-sample"), median, p90, is_ours; `floors`: set -> median error of the
    floor. The axis is logarithmic; errors below 0.1 % stand at its left end.
    """
    sets = list(dict.fromkeys(table["set"]))
    heights = [table.loc[table["set"] == name].groupby(["model", "where"]).ngroups for name in sets]
    figure = Figure(figsize=(WIDTH, 1.1 + 0.42 * len(sets) + 0.2 * sum(heights)))
    panels = figure.subplots(len(sets), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, name in zip(panels, sets, strict=True):
        rows = table[table["set"] == name].reset_index(drop=True)
        for place, row in rows.iterrows():
            median, p90 = max(row["median"], LEAST), max(row["p90"], LEAST)
            shade = colour(OURS) if row["is_ours"] else colour("muted")
            is_held_out = row["where"] == "held out"
            axes.plot([median, p90], [place, place], color=shade, linewidth=2.2 if is_held_out else 1.0)
            face = shade if is_held_out else colour("paper")
            axes.plot([median], [place], "o", markersize=5, color=shade, markerfacecolor=face)
        names = [row["model"] + ("" if row["where"] == "held out" else ", in-sample") for _, row in rows.iterrows()]
        axes.set_yticks(range(len(rows)), names, fontsize=8, color=colour("ink"))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        if np.isfinite(floors.get(name, np.nan)):
            axes.axvline(max(floors[name], LEAST), color=colour("caffe"), linestyle=":", linewidth=1.4)
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks([0.001, 0.01, 0.1, 1, 10])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
        axes.tick_params(axis="x", labelsize=8)
        axes.xaxis.grid(True)
        axes.set_title(name, fontsize=9, fontweight="normal", pad=3)
    panels[-1].set_xlabel("error, median (dot) to 90 % quantile (end)", fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    handles = [
        Line2D([], [], color=colour(OURS), marker="o", linewidth=2.2, label="ours"),
        Line2D([], [], color=colour("muted"), marker="o", linewidth=2.2, label="baseline"),
        Line2D([], [], color=colour("caffe"), linestyle=":", label="floor, median"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3)
    return figure


def curve(table: pd.DataFrame, x: str, label: str, title: str) -> Figure:
    """Measured and predicted times over `x` with the 90 % interval, both axes logarithmic.

    Columns: `x`, measured_s, predicted_s, lo_s, hi_s, is_observed (the measured time was fitted on).
    """
    table = table.sort_values(x)
    figure = Figure(figsize=(WIDTH, 3.4))
    axes = figure.subplots()
    axes.fill_between(table[x], table["lo_s"], table["hi_s"], color=colour(OURS), alpha=0.18, linewidth=0)
    axes.plot(table[x], table["predicted_s"], color=colour(OURS), linestyle="--", linewidth=1.2)
    for is_observed, shade, size in ((False, "torch", 3.0), (True, "ink", 4.5)):
        part = table[table["is_observed"] == is_observed]
        axes.plot(part[x], part["measured_s"], "o", markersize=size, color=colour(shade))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(value) if label == "bytes" else f"{value:g}"))
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low > 5 else (1, 1.5, 2, 3, 4, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=8)
    axes.grid(True, which="major")
    axes.set_xlabel(label, fontsize=9)
    axes.set_ylabel("seconds", fontsize=9)
    figure.suptitle(textwrap.fill(title, 48), x=0.01, ha="left", fontsize=11, fontweight="bold")
    handles = [
        Line2D([], [], color=colour("ink"), marker="o", linestyle="none", label="measured, fitted on"),
        Line2D([], [], color=colour("torch"), marker="o", linestyle="none", label="measured, held out"),
        Line2D([], [], color=colour(OURS), linestyle="--", label="modelled, 90 % interval"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=2)
    return figure


def _size(n_bytes: float) -> str:
    """Bytes in the unit that keeps the number short."""
    for unit, one in (("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= one:
            return f"{n_bytes / one:g} {unit}"
    return f"{n_bytes:g} B"
