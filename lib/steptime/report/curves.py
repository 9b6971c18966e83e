"""Figures of published systems: curves over workers, and bars of what a step is made of.

Each takes a table and returns a matplotlib Figure, like `report.figures`; how a number was got (`kind`) decides mark
and line. Series are told apart by colour and by their name at the line's end or in the legend.
"""

import math

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from steptime.report.figures import _checked, _dodge, _legend_columns, _lines, _order, _short
from steptime.report.style import colour, mark

WIDTH = 4.8
SERIES = ("tensorflow", "torch", "jax", "caffe", "cntk", "mxnet", "muted", "ink")
"""Names of colours, in the order in which series take them."""
MOST_NAMED = 8
"""A legend names each series in each kind up to so many; beyond, the series and the kinds by themselves."""


def curves(
    table: pd.DataFrame,
    title: str,
    labels: tuple[str, str],
    *,
    ideal: bool = False,
    logarithmic: tuple[bool, bool] = (True, True),
) -> Figure:
    """Lines of `y` over `x`, one a series and kind; `ideal` draws y = x.

    Columns: x, y, series, kind; optionally lo, hi (drawn as a band). One series has one colour, whatever the
    kind: a published point is a row of its own.
    """
    table = _checked("curves", table, ["x", "y", "series", "kind"])
    names = _order(table["series"])
    shades = {name: SERIES[place % len(SERIES)] for place, name in enumerate(names)}
    figure = Figure(figsize=(WIDTH, 3.4 + 0.17 * len(names)))
    axes = figure.subplots()
    handles = []
    for (name, kind), part in table.groupby(["series", "kind"], sort=False):
        part, style = part.sort_values("x"), mark(str(kind), shades[name])
        if {"lo", "hi"} <= set(part.columns) and part["lo"].notna().all():
            axes.fill_between(part["x"], part["lo"], part["hi"], color=colour(shades[name]), alpha=0.18, linewidth=0)
        axes.plot(part["x"], part["y"], **style, markersize=4.5, markevery=max(1, len(part) // 8))
        handles.append(Line2D([], [], **style, markersize=4.5, label=f"{name}, {kind}"))
    if len(handles) > MOST_NAMED:
        kinds = _order(table["kind"])
        handles = [Line2D([], [], color=colour(shade), linewidth=2.4, label=name) for name, shade in shades.items()]
        handles += [Line2D([], [], **mark(kind, "ink"), markersize=4.5, label=kind) for kind in kinds]
    if ideal:
        ends = [table["x"].min(), table["x"].max()]
        axes.plot(ends, ends, color=colour("muted"), linewidth=0.9)
        handles.append(Line2D([], [], color=colour("muted"), linewidth=0.9, label="ideal"))
    for axis, scale, is_log, low, high in (
        (axes.xaxis, axes.set_xscale, logarithmic[0], table["x"].min(), table["x"].max()),
        (axes.yaxis, axes.set_yscale, logarithmic[1], table["y"].min(), table["y"].max()),
    ):
        if is_log:
            scale("log", **({"base": 2} if axis is axes.xaxis else {}))
            if axis is axes.yaxis:
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 300 else (1.0,)))
                axis.set_minor_locator(NullLocator())
            axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.grid(True)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    figure.suptitle(_lines(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
    columns = _legend_columns(handles, figure.get_figwidth() * 72)
    figure.legend(handles=handles, loc="outside lower left", ncols=columns)
    return figure


def waterfall(table: pd.DataFrame, title: str, label: str) -> Figure:
    """One bar a row, its value beside it; a published value of the row is a filled dot.

    Columns: name, value, published (NaN: none).
    """
    table = _checked("waterfall", table, ["name", "value", "published"])
    figure = Figure(figsize=(WIDTH, 1.3 + 0.34 * len(table)))
    axes = figure.subplots()
    for place, row in enumerate(table.itertuples()):
        axes.barh(place, row.value, 0.66, color=colour("wait_free"), alpha=0.75)
        if not math.isnan(row.published):
            axes.plot([row.published], [place], **mark("measured", "torch") | {"linestyle": "none"})
        end = row.value if math.isnan(row.published) else max(row.value, row.published)
        axes.annotate(_short(row.value), (end, place), (7, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(table)), list(table["name"]), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * float(table[["value", "published"]].max().max()))
    axes.xaxis.grid(True)
    axes.set_xlabel(label)
    handles = [
        Patch(facecolor=colour("wait_free"), alpha=0.75, label="modelled"),
        Line2D([], [], **mark("measured", "torch") | {"linestyle": "none"}, label="published"),
    ]
    figure.suptitle(_lines(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.legend(handles=handles, loc="outside lower left", ncols=2)
    return figure


def points(table: pd.DataFrame, title: str, label: str, *, band: tuple[float, float]) -> Figure:
    """Marks of several series on one row each; `band` is shaded, the axis crosses 0.

    Columns: row, series, x, kind; optionally lo, hi (an interval around x).
    """
    table = _checked("points", table, ["row", "series", "x", "kind"])
    rows, names = _order(table["row"]), _order(table["series"])
    shades = {name: SERIES[place % len(SERIES)] for place, name in enumerate(names)}
    figure = Figure(figsize=(WIDTH, 1.4 + 0.2 * len(rows)))
    axes = figure.subplots()
    axes.axvspan(*band, color=colour("grid"), linewidth=0, alpha=0.7)
    axes.axvline(0.0, color=colour("muted"), linewidth=0.9)
    handles = []
    for (name, kind), part in table.groupby(["series", "kind"], sort=False):
        style = mark(str(kind), shades[name]) | {"linestyle": "none"}
        shift = _dodge(names.index(str(name)), len(names)) if "lo" in part else 0.0
        places = [rows.index(row) + shift for row in part["row"]]
        if "lo" in part:
            axes.hlines(places, part["lo"], part["hi"], color=colour(shades[name]), linewidth=1.2)
        axes.plot(part["x"], places, **style)
        handles.append(Line2D([], [], **style, label=f"{name}, {kind}"))
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.grid(True)
    axes.set_xlabel(label)
    figure.suptitle(_lines(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.legend(handles=handles, loc="outside lower left", ncols=_legend_columns(handles, figure.get_figwidth() * 72))
    return figure
