"""Figures of many settings: small panels side by side, two at most, one row a setting in the same order in each.

Each function takes a table and returns a matplotlib Figure, like `report.figures`. A setting has its framework's
colour; what tells settings apart is their row, not their colour.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from steptime.core.machine import Machine
from steptime.report.figures import PHASE_LABELS, WIDTH, _checked, _dodge, _dot, _legend_columns, _lines, _order, _short
from steptime.report.style import colour, mark

ROW = 0.19
_FEW_RATIOS = 2
"""Up to this ratio an axis has ticks between 1 and 2."""
KIND_COLOURS = {
    "convolution": "kind_convolution",
    "dense": "kind_dense",
    "recurrent, attention": "kind_sequence",
    "normalisation": "kind_normalisation",
    "pooling": "kind_pooling",
    "element-wise": "kind_elementwise",
    "moving": "kind_moving",
    "outside layers": "kind_outside",
}
"""Group of layer kinds -> name of its colour."""
PHASE_COLOURS = {label: name for name, label in PHASE_LABELS.items()}
"""Phase in words -> name of its colour."""


def standings(table: pd.DataFrame, title: str) -> Figure:
    """Each setting's step over the fastest one's, one panel a network, with its interval; ties are called so.

    Columns: network, setting, ratio, lo, hi, standing (fastest, tied, slower, alone), median_s. Rows: settings, the one
    with the smallest typical ratio first.
    """
    table = _checked("standings", table, ["network", "setting", "ratio", "lo", "hi", "standing", "median_s"])
    order = list(np.exp(np.log(table["ratio"]).groupby(table["setting"]).mean()).sort_values(kind="stable").index)
    highest = max(float(table["ratio"].max()), 1.05)

    def draw(axes: Axes, part: pd.DataFrame) -> None:
        axes.axvline(1.0, color=colour("muted"), linewidth=0.9)
        for row in part.itertuples():
            y = order.index(row.setting)
            lo, hi = max(row.lo, 0.7), min(row.hi, highest * 1.3)
            axes.plot([lo, hi], [y, y], color=colour(row.setting), linewidth=1.4)
            axes.plot([row.ratio], [y], "o", color=colour(row.setting), markersize=4.5)
            said = {"fastest": f"{_short(row.median_s * 1e3)} ms", "alone": f"{_short(row.median_s * 1e3)} ms"}
            label = said.get(row.standing, "tied" if row.standing == "tied" else _short(row.ratio))
            axes.annotate(label, (hi, y), (4, 0), textcoords="offset points", va="center", fontsize=7.5)
        axes.set_xscale("log")
        _ratio_ticks(axes, highest)
        axes.set_xlim(min(0.93, float(part["lo"].clip(lower=0.7).min()) * 0.97), highest * 1.3 * (highest + 1) ** 0.55)

    return _grid(table, "network", order, draw, title, "step / fastest step (line: interval)")


def marks(table: pd.DataFrame, series: str, title: str, label: str, reference: float) -> Figure:
    """A mark for each value of column `series` in a setting's row, one panel a network; a line at `reference`.

    Columns: network, setting, value (above 0), `series` (its colour); optionally lo and hi (95 % interval) and kind
    (default modelled). Rows: settings by name. The axis is logarithmic, the same in all panels; an interval that
    reaches beyond all values by more than half of them is cut.
    """
    table = _checked("marks", table, ["network", "setting", series, "value"], kind="modelled")
    order, names = sorted(set(table["setting"])), _order(table[series])
    ends = (min(float(table["value"].min()), reference) / 1.5, max(float(table["value"].max()), reference) * 1.5)

    def draw(axes: Axes, part: pd.DataFrame) -> None:
        axes.axvline(reference, color=colour("muted"), linewidth=0.9)
        for row in part.itertuples():
            name = str(getattr(row, series))
            y = order.index(row.setting) + _dodge(names.index(name), len(names), 0.6 if series != "setting" else 0.0)
            if "lo" in part:
                drawn = [max(row.lo, ends[0]), min(row.hi, ends[1])]
                axes.plot(drawn, [y, y], color=colour(name), linewidth=1.2)
            axes.plot([row.value], [y], **mark(row.kind, name) | {"linestyle": "none", "markersize": 4})
        axes.set_xscale("log")
        _ratio_ticks(axes, _FEW_RATIOS if ends[1] / ends[0] < 3 * _FEW_RATIOS else ends[1] / ends[0])
        axes.set_xlim(ends)

    kinds = [(name, table.loc[table[series] == name, "kind"].iloc[0]) for name in names]
    handles = [_dot(name, kind) for name, kind in kinds] if series != "setting" else []
    return _grid(table, "network", order, draw, title, label, handles)


def stacked(
    table: pd.DataFrame,
    colours: Mapping[str, str],
    title: str,
    label: str = "time in one step, ms",
    note: str = "",
    scale: float = 1e3,
) -> Figure:
    """Bars of stacked parts, one panel a network, one bar a setting.

    Columns: network, setting, part (a key of `colours`, in whose order they are stacked), time_s, which is
    drawn `scale` times as large. A setting without rows in a panel has `note` there.
    """
    table = _checked("stacked", table, ["network", "setting", "part", "time_s"])
    order = sorted(set(table["setting"]))
    parts = [name for name in colours if table.loc[table["part"] == name, "time_s"].sum() > 0]

    def draw(axes: Axes, part: pd.DataFrame) -> None:
        wide = part.pivot_table(index="setting", columns="part", values="time_s", aggfunc="sum").fillna(0.0) * scale
        for setting in order:
            y, left = order.index(setting), 0.0
            if setting not in wide.index:
                axes.annotate(note, (0, y), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
                continue
            for name in [name for name in parts if name in wide.columns]:
                value = float(wide.loc[setting, name])
                shade, paper = colour(colours[name]), colour("paper")
                axes.barh(y, value, 0.75, left, color=shade, edgecolor=paper, linewidth=0.4)
                left += value
            axes.annotate(_short(left), (left, y), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
        axes.set_xlim(0, float(wide.sum(axis=1).max()) * 1.3)
        axes.xaxis.set_major_locator(MaxNLocator(3))

    handles = [Patch(facecolor=colour(colours[name]), label=name) for name in parts]
    return _grid(table, "network", order, draw, title, label, handles)


def roofline(table: pd.DataFrame, machine: Machine, title: str) -> Figure:
    """FLOP/s over FLOPs a byte, one panel a setting, one point a row; the lines are the machine's peaks.

    Columns: setting, group (a key of KIND_COLOURS), intensity, flops_per_s. Layers without operations are not drawn.
    """
    table = _checked("roofline", table, ["setting", "group", "intensity", "flops_per_s"])
    table = table[(table["intensity"] > 0) & (table["flops_per_s"] > 0)]
    groups = [name for name in KIND_COLOURS if (table["group"] == name).any()]
    names = _order(table["setting"])
    columns = min(2, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(WIDTH, 1.0 + 2.4 * rows))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    ends = np.array([table["intensity"].min() / 2, table["intensity"].max() * 2])
    ridge = machine.peak_flops_per_s / machine.memory_bytes_per_s
    roof = np.array(sorted([*ends, ridge]))
    for place, axes in enumerate(grid.flat):
        axes.set_visible(place < len(names))
        if place >= len(names):
            continue
        height = np.minimum(machine.peak_flops_per_s, roof * machine.memory_bytes_per_s) / 1e9
        axes.plot(roof, height, color=colour("muted"), linewidth=1.0)
        part = table[table["setting"] == names[place]]
        for name in groups:
            own = part[part["group"] == name]
            shade = colour(KIND_COLOURS[name])
            axes.plot(own["intensity"], own["flops_per_s"] / 1e9, ".", color=shade, markersize=4)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(names[place], fontsize=9, fontweight="normal", pad=3)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
        axes.grid(True, which="major")
        is_lowest = place + columns >= len(names)
        axes.tick_params(labelbottom=is_lowest, labelsize=8)
        axes.set_xlabel("FLOPs a byte" if is_lowest else "", fontsize=9)
        axes.set_ylabel("GFLOP/s" if place % columns == 0 else "", fontsize=9)
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=colour(KIND_COLOURS[name]), marker="o", linestyle="none", label=name) for name in groups
    ]
    handles.append(Line2D([], [], color=colour("muted"), linewidth=1.0, label="machine's peaks"))
    return _finished(figure, title, handles)


def scaling(table: pd.DataFrame, x: str, y: str, labels: tuple[str, str], title: str) -> Figure:
    """Curves of `y` over `x`, one panel a network below the other, one line a setting with its name at the end.

    Columns: network, setting, `x`, `y`. Both axes are logarithmic.
    """
    table = _checked("scaling", table, ["network", "setting", x, y])
    names = _order(table["network"])
    figure = Figure(figsize=(WIDTH, 0.7 + 2.3 * len(names)))
    for axes, name in zip(figure.subplots(len(names), 1, squeeze=False).flat, names, strict=True):
        ends = []
        for setting, part in table[table["network"] == name].groupby("setting", sort=False):
            part = part.sort_values(x)
            axes.plot(part[x], part[y], "o-", color=colour(setting), markersize=3.5, linewidth=1.2)
            ends.append((float(part[x].iloc[-1]), float(part[y].iloc[-1]), str(setting)))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _name_ends(axes, ends)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(name, fontsize=9, fontweight="normal", pad=3)
        axes.set_ylabel(labels[1], fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(True, which="major")
    axes.set_xlabel(labels[0], fontsize=9)
    figure.suptitle(_lines(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


def factors(table: pd.DataFrame, title: str, label: str) -> Figure:
    """Dots on a logarithmic axis of ratios, one row a value of `lever`; the farthest dot of a row is named.

    Columns: lever, name (of the dot), setting (for its colour), factor (above 0).
    """
    table = _checked("factors", table, ["lever", "name", "setting", "factor"])
    levers = _order(table["lever"])
    figure = Figure(figsize=(WIDTH, 1.0 + 0.36 * len(levers)))
    axes = figure.subplots()
    axes.axvline(1.0, color=colour("muted"), linewidth=0.9)
    for row in table.itertuples():
        shade = colour(row.setting)
        axes.plot([row.factor], [levers.index(row.lever)], "o", color=shade, markersize=4.5, alpha=0.7)
    for lever, part in table.groupby("lever", sort=False):
        far = part.loc[np.log(part["factor"]).abs().idxmax()]
        text = f"{_short(far['factor'])}  {far['name']}"
        axes.annotate(
            text, (1.02, levers.index(str(lever))), xycoords=("axes fraction", "data"), va="center", fontsize=8
        )
    axes.set_xscale("log")
    highest = float(max(table["factor"].max(), 1.1))
    _ratio_ticks(axes, highest)
    axes.set_xlim(min(float(table["factor"].min()), 0.97) / 1.05, highest * 1.1)
    _rows(axes, levers)
    axes.set_xlabel(label)
    axes.set_title(_lines(title))
    return figure


def memory(table: pd.DataFrame, title: str) -> Figure:
    """Measured peak memory over the predicted one, both in MiB; the line is equality.

    Columns: setting, predicted_bytes, peak_memory_bytes. One colour a framework.
    """
    table = _checked("memory", table, ["setting", "predicted_bytes", "peak_memory_bytes"])
    figure = Figure(figsize=(WIDTH, 4.2))
    axes = figure.subplots()
    values = table[["predicted_bytes", "peak_memory_bytes"]] / 2**20
    ends = [float(values.min().min()) / 1.15, float(values.max().max()) * 1.15]
    axes.plot(ends, ends, color=colour("muted"), linewidth=0.9)
    for setting, part in table.groupby("setting", sort=False):
        own = part[["predicted_bytes", "peak_memory_bytes"]] / 2**20
        axes.plot(own.iloc[:, 0], own.iloc[:, 1], "o", color=colour(str(setting)), markersize=4.5, alpha=0.8)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
        axis.grid(True)
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_xlabel("predicted from the other networks, MiB")
    axes.set_ylabel("measured, MiB")
    settings = {colour(name): name for name in reversed(_order(table["setting"]))}
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=shade, marker="o", linestyle="none", label=_framework(name))
        for shade, name in reversed(settings.items())
    ]
    return _finished(figure, title, handles)


def _grid(
    table: pd.DataFrame,
    panel: str,
    order: Sequence[str],
    draw: Callable[[Axes, pd.DataFrame], None],
    title: str,
    label: str,
    handles: Sequence[Line2D | Patch] = (),
) -> Figure:
    """Panels of the values of column `panel`, two abreast, that share their rows."""
    names = _order(table[panel])
    columns = min(2, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(WIDTH, 0.9 + rows * (0.55 + ROW * len(order))))
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for place, axes in enumerate(grid.flat):
        axes.set_visible(place < len(names))
        if place >= len(names):
            continue
        draw(axes, table[table[panel] == names[place]])
        _rows(axes, order)
        axes.tick_params(labelsize=8)
        axes.xaxis.grid(True)
        axes.set_title(names[place], fontsize=9, fontweight="normal", pad=3)
    # one label is enough for axes that mean the same
    lowest = grid[-1][0]
    lowest.set_xlabel(textwrap.fill(label, 48), loc="left", fontsize=9)
    return _finished(figure, title, list(handles))


def _finished(figure: Figure, title: str, handles: Sequence[Line2D | Patch]) -> Figure:
    """The figure with its title, and a legend below."""
    figure.suptitle(_lines(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
    if handles:
        figure.legend(
            handles=list(handles), loc="outside lower left", ncols=_legend_columns(handles, figure.get_figwidth() * 72)
        )
    return figure


def _rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8, color=colour("ink"))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _ratio_ticks(axes: Axes, highest: float) -> None:
    steps = (1.0, 2.0, 5.0) if highest > _FEW_RATIOS else (1.0, 1.2, 1.5, 2.0)
    axes.xaxis.set_major_locator(LogLocator(subs=steps if highest < 100 else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.minorticks_off()


def _name_ends(axes: Axes, ends: list[tuple[float, float, str]]) -> None:
    """Names right of the curves' ends, moved apart where they would overlap."""
    low, high = np.log(axes.get_ylim())
    least = 0.075 * (high - low)
    last = -math.inf
    for x, y, name in sorted(ends, key=lambda end: end[1]):
        place = max(np.log(y), last + least)
        last = place
        axes.annotate(
            name, (x, y), (1.03, (place - low) / (high - low)), textcoords="axes fraction", va="center", fontsize=7.5
        )


def _framework(setting: str) -> str:
    return setting.split("_")[0].split(",")[0]
