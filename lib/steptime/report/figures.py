"""Figures of the study: each takes a table (one row a mark, seconds) and returns a matplotlib Figure.

Frameworks and schedules have one colour everywhere; how a number was got (`kind`) decides mark and line. Call
`style.use()` once before.
"""

import math
import textwrap
from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from steptime.core.errors import InputError
from steptime.report.style import colour, mark

WIDTH = 4.8
"""Inches: a figure is seen whole on a phone, its labels still large enough to read."""
PHASES = ("io", "h2d", "forward", "backward", "comm", "update")
PHASE_LABELS = {
    "io": "read input",
    "h2d": "copy to device",
    "forward": "forward",
    "backward": "backward",
    "comm": "communicate",
    "update": "update",
}
SCHEDULE_LABELS = {
    "end_of_backward": "after backward",
    "wait_free": "wait-free",
    "merged": "merged",
    "ps_central": "one server",
    "ps_sharded": "sharded servers",
    "sufficient_factors": "sufficient factors",
    "lazy": "lazy, fused",
    "sparse": "sparse chunks",
    "local_sgd": "local SGD",
}
_WIDE_RANGE = 12
"""A larger ratio between the longest and the shortest time is drawn on a logarithmic axis."""
_MANY_DECADES = 1000
"""Beyond this ratio only powers of ten are labelled."""
_LETTER_PT, _HANDLE_PT = 5.6, 44
"""Width of a legend's letter, and of its mark with the space around."""
_INTERVAL_ROOM = 1.5
"""An interval widens an axis of ratios by at most this factor beyond the points; the rest is cut."""
_WIDE_RATIOS = 4
"""Ratios that differ by more are drawn on a logarithmic axis."""


def step_times(table: pd.DataFrame, title: str = "Time of one training step") -> Figure:
    """Step time with its interval, one row a network, one mark a framework.

    Columns: network, framework, median_s, lo_s, hi_s; optionally kind (default measured).
    """
    table = _checked("step_times", table, ["network", "framework", "median_s", "lo_s", "hi_s"])
    networks, frameworks = _order(table["network"]), _order(table["framework"])
    figure = Figure(figsize=(WIDTH, 1.25 + 0.34 * len(networks) * max(len(frameworks), 1.6)))
    axes = figure.subplots()
    for row in table.itertuples():
        y = networks.index(row.network) + _dodge(frameworks.index(row.framework), len(frameworks))
        median, lo, hi = row.median_s * 1e3, row.lo_s * 1e3, row.hi_s * 1e3
        _interval(axes, (lo, hi), y, row.framework)
        axes.plot([median], [y], **mark(row.kind, row.framework) | {"linestyle": "none"})
        axes.annotate(
            _short(median), (hi, y), (7, 0), textcoords="offset points", va="center", fontsize=9, color=colour("ink")
        )
    _times_axis(axes, [table["lo_s"].min(), table["hi_s"].max()], "step time, ms (line: 95 % interval)")
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * 1.25 if axes.get_xscale() == "log" else high + 0.1 * (high - low))
    _rows_axis(axes, networks)
    _legend(axes, [_dot(name, kind) for name, kind in _pairs(table, "framework")], title)
    return figure


def phases(table: pd.DataFrame, title: str = "Where the step's time goes") -> Figure:
    """The phases of a step, stacked, one bar a network and framework.

    Columns: network, framework, phase (one of PHASES), time_s.
    """
    table = _checked("phases", table, ["network", "framework", "phase", "time_s"])
    wide = table.pivot_table(index=["network", "framework"], columns="phase", values="time_s", sort=False)
    unknown = [name for name in wide.columns if name not in PHASES]
    if unknown:
        raise InputError(f"figure phases: phase = {unknown[0]!r}: is unknown; use one of {', '.join(PHASES)}")
    present = [name for name in PHASES if name in wide.columns and wide[name].fillna(0).sum() > 0]
    networks, frameworks = _order(table["network"]), _order(table["framework"])
    figure = Figure(figsize=(WIDTH, 1.3 + 0.31 * len(networks) * (len(frameworks) + 0.4)))
    axes = figure.subplots()
    height = 0.8 / len(frameworks)
    total = wide.sum(axis=1) * 1e3
    for (network, framework), row in wide.iterrows():
        y = networks.index(network) + _dodge(frameworks.index(framework), len(frameworks), 0.8)
        left = 0.0
        for name in present:
            value = 0.0 if pd.isna(row[name]) else row[name] * 1e3
            axes.barh(y, value, height * 0.9, left, color=colour(name), edgecolor=colour("paper"), linewidth=0.6)
            left += value
        label = f"{_short(left)}  {framework}" if len(frameworks) > 1 else _short(left)
        axes.annotate(label, (left, y), (6, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, total.max() * 1.28)
    axes.set_xlabel("time in one step, ms")
    axes.xaxis.grid(True)
    _rows_axis(axes, networks)
    _legend(axes, [Patch(facecolor=colour(name), label=PHASE_LABELS[name]) for name in present], title)
    return figure


def speed_up(
    table: pd.DataFrame,
    series: str = "schedule",
    panel: str | None = "network",
    title: str = "Speed-up over one worker",
) -> Figure:
    """Speed-up curves with the ideal line, one panel a value of column `panel`, one line a value of column `series`.

    Columns: workers, speed_up, `series`, `panel` (None: a single panel); optionally kind (default modelled) and
    lo, hi (95 % interval of the speed-up).
    """
    needed = ["workers", "speed_up", series] + ([panel] if panel else [])
    table = _checked("speed_up", table, needed, kind="modelled")
    names = _order(table[panel]) if panel else [""]
    columns = min(len(names), 2)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(WIDTH, 0.9 + (2.3 if columns > 1 else 3.1) * rows))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    counts = sorted(table["workers"].unique())
    for axes, name in zip(grid.flat, names, strict=False):
        part = table[table[panel] == name] if panel else table
        axes.plot(counts, counts, color=colour("muted"), linewidth=0.9)
        _curves(axes, part, series)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.grid(True)
        axes.set_title(name, fontsize=10, fontweight="normal", pad=4)
    for number, axes in enumerate(grid.flat):
        axes.set_visible(number < len(names))
        is_lowest = number + columns >= len(names)
        axes.tick_params(labelbottom=is_lowest)
        axes.set_xlabel("workers" if is_lowest else "")
        axes.set_ylabel("speed-up" if number % columns == 0 else "")
    handles = [_line(value, kind) for value, kind in _pairs(table, series)]
    handles.append(Line2D([], [], color=colour("muted"), linewidth=0.9, label="ideal"))
    figure.suptitle(_lines(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.legend(handles=handles, loc="outside lower left", ncols=_legend_columns(handles, figure.get_figwidth() * 72))
    return figure


def predicted_measured(table: pd.DataFrame, title: str = "Predicted over measured step time") -> Figure:
    """Predicted over measured step time, one row a network; the band is 10 % either way.

    Columns: network, framework, measured_s, predicted_s; optionally lo_s, hi_s (95 % interval of the measured time)
    and kind (of the prediction, default modelled).
    """
    needed = ["network", "framework", "measured_s", "predicted_s"]
    table = _checked("predicted_measured", table, needed, kind="modelled")
    networks, frameworks = _order(table["network"]), _order(table["framework"])
    figure = Figure(figsize=(WIDTH, 1.25 + 0.34 * len(networks) * max(len(frameworks), 1.6)))
    axes = figure.subplots()
    axes.axvspan(0.9, 1.1, color=colour("grid"), linewidth=0, alpha=0.6)
    axes.axvline(1.0, color=colour("muted"), linewidth=0.9)
    limits = _ratio_limits(table)
    for row in table.itertuples():
        y = networks.index(row.network) + _dodge(frameworks.index(row.framework), len(frameworks))
        ratio = row.predicted_s / row.measured_s
        ends = (row.predicted_s / row.hi_s, row.predicted_s / row.lo_s) if "lo_s" in table else (ratio, ratio)
        _interval(axes, ends, y, row.framework, limits)
        axes.plot([ratio], [y], **mark(row.kind, row.framework) | {"linestyle": "none"})
        axes.text(1.02, y, f"{ratio:.2f}", transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    _ratios_axis(axes, limits)
    axes.set_xlabel("predicted / measured\n(line: 95 % interval of the measured time; arrow: it goes on)")
    _rows_axis(axes, networks)
    handles = [_dot(name, kind) for name, kind in _pairs(table, "framework")]
    _legend(axes, [*handles, Patch(facecolor=colour("grid"), label="within 10 %")], title)
    return figure


def _checked(figure: str, table: pd.DataFrame, columns: list[str], kind: str = "measured") -> pd.DataFrame:
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise InputError(f"figure {figure}: column {missing[0]!r} is missing; it needs {', '.join(columns)}")
    if table.empty:
        raise InputError(f"figure {figure}: the table has no rows; measure or select at least one case")
    return table if "kind" in table.columns else table.assign(kind=kind)


def _order(values: pd.Series) -> list[str]:
    """Distinct values as they first appear."""
    return list(dict.fromkeys(values))


def _pairs(table: pd.DataFrame, column: str) -> list[tuple[str, str]]:
    return list(dict.fromkeys(zip(table[column], table["kind"], strict=True)))


def _dodge(index: int, count: int, span: float = 0.5) -> float:
    """Offset of the `index`-th of `count` marks that share a row."""
    return 0.0 if count == 1 else span * ((index + 0.5) / count - 0.5)


def _short(value: float) -> str:
    """Three significant digits, never an exponent."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def _label(name: str) -> str:
    return SCHEDULE_LABELS.get(name, name)


def _dot(name: str, kind: str) -> Line2D:
    return Line2D([], [], **mark(kind, name) | {"linestyle": "none"}, label=f"{_label(name)}, {kind}")


def _line(name: str, kind: str) -> Line2D:
    return Line2D([], [], **mark(kind, name), markersize=4.5, label=f"{_label(name)}, {kind}")


def _interval(
    axes: Axes, ends: tuple[float, float], y: float, of: str, limits: tuple[float, float] = (-math.inf, math.inf)
) -> None:
    """A line with caps, so that an interval narrower than its mark is seen to be there; an arrow where `limits` cut it.

    `ends` and `limits`: low, high.
    """
    cut = [ends[0] < limits[0], ends[1] > limits[1]]
    drawn = [max(ends[0], limits[0]), min(ends[1], limits[1])]
    line = axes.plot(drawn, [y, y], color=colour(of), linewidth=1.6, marker="|", markersize=8, markeredgewidth=1.4)[0]
    line.set_markevery([place for place in (0, 1) if not cut[place]])
    for place in (0, 1):
        if cut[place]:
            axes.plot(drawn[place], y, color=colour(of), marker="<>"[place], markersize=5.5, clip_on=False)


def _ratio_limits(table: pd.DataFrame) -> tuple[float, float]:
    """Ends of an axis for predicted / measured: all points and the band; of the intervals what is near them."""
    ratio = table["predicted_s"] / table["measured_s"]
    low, high = min(ratio.min(), 0.9), max(ratio.max(), 1.1)
    if "lo_s" in table:
        low = max(min(low, (table["predicted_s"] / table["hi_s"]).min()), low / _INTERVAL_ROOM)
        high = min(max(high, (table["predicted_s"] / table["lo_s"]).max()), high * _INTERVAL_ROOM)
    return low / 1.05, high * 1.05


def _ratios_axis(axes: Axes, limits: tuple[float, float]) -> None:
    if limits[1] / limits[0] > _WIDE_RATIOS:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.minorticks_off()
    axes.set_xlim(limits)
    axes.xaxis.grid(True)


def _curves(axes: Axes, table: pd.DataFrame, series: str) -> None:
    for name, kind in _pairs(table, series):
        part = table[(table[series] == name) & (table["kind"] == kind)].sort_values("workers")
        if {"lo", "hi"} <= set(part.columns):
            axes.fill_between(part["workers"], part["lo"], part["hi"], color=colour(name), alpha=0.18, linewidth=0)
        # a curve read off a formula has no points of its own: mark a few so that the kind is seen
        every = max(1, len(part) // 8)
        axes.plot(part["workers"], part["speed_up"], **mark(kind, name), markersize=4.5, markevery=every)


def _times_axis(axes: Axes, ends_s: Sequence[float], label: str) -> None:
    """Milliseconds from left to right; logarithmic where the times differ much."""
    low, high = ends_s
    if low > 0 and high / low > _WIDE_RANGE:
        axes.set_xscale("log")
        between = (1.0, 2.0, 5.0) if high / low < _MANY_DECADES else (1.0,)
        axes.xaxis.set_major_locator(LogLocator(subs=between))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.minorticks_off()
    else:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(label)
    axes.xaxis.grid(True)


def _rows_axis(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=10, color=colour("ink"))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    sns.despine(ax=axes, left=True)


def _legend(axes: Axes, handles: Sequence[Line2D | Patch], title: str) -> None:
    """Legend between title and axes, in one line where it fits."""
    names = max(len(label.get_text()) for label in axes.get_yticklabels())
    columns = _legend_columns(handles, axes.figure.bbox.width / axes.figure.dpi * 72 - _LETTER_PT * names)
    axes.legend(
        handles=list(handles),
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=columns,
        columnspacing=1.2,
        handletextpad=0.4,
        borderaxespad=0.3,
    )
    axes.set_title(_lines(title), pad=14 + 14 * math.ceil(len(handles) / columns))


def _legend_columns(handles: Sequence[Line2D | Patch], room_pt: float) -> int:
    """The most columns of a legend that fit into `room_pt`; columns are filled one after the other."""
    widths = [_LETTER_PT * len(str(handle.get_label())) + _HANDLE_PT for handle in handles]
    for columns in range(len(handles), 1, -1):
        if sum(part.max() for part in np.array_split(widths, columns)) <= room_pt:
            return columns
    return 1


def _lines(title: str) -> str:
    """The title, broken so that it stays within the figure."""
    return textwrap.fill(title, 44)
