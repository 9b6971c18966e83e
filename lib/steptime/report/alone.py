"""Pages that stand alone, in one file, in the report's style: two campaigns compared, a network of one's own."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from steptime.core.comparing import Compared, summary_lines
from steptime.core.files import write_text
from steptime.report import markup, style
from steptime.report.figures import WIDTH, _interval, _lines
from steptime.report.site import alone
from steptime.report.style import colour

MOST_DRAWN = 40
"""Cases of a figure; those that changed come first."""
_ROOM = 1.25
"""Intervals are drawn to this factor beyond the ratios; an arrow says that one goes on."""


def write_comparison(compared: Compared, path: Path) -> None:
    """One HTML file: what is said of the two campaigns, the figure, the table."""
    style.use()
    table = compared.table
    figure = changes_figure(table.head(MOST_DRAWN), f"Step time of {compared.b} over that of {compared.a}")
    rest = f" The first {MOST_DRAWN} of {len(table)} cases." if len(table) > MOST_DRAWN else ""
    shown = table[["case_id", "rounds_a", "rounds_b", "a_s", "b_s", "measured", "ratio", "lo", "hi", "p_value"]]
    shown = shown.assign(verdict=table["verdict"].replace("", "not told apart"))
    first, *others = summary_lines(compared)
    sections = [
        ("What was found", paragraphs(others)),
        (
            "Changes",
            markup.figure(style.svg_text(figure), "Each case's ratio with its interval", "changes")
            + paragraphs([f"Ratio B / A with simultaneous {1 - compared.level:.1%} intervals, measured.{rest}"]),
        ),
        ("Cases", markup.table(shown, "Each case of both campaigns; times are medians over processes, measured")),
    ]
    write_text(path, alone(f"{compared.a} and {compared.b} compared", first, sections))


def changes_figure(table: pd.DataFrame, title: str) -> Figure:
    """A dot a case with its interval, the line is no change. Columns: case_id, framework, ratio, lo, hi, verdict."""
    figure = Figure(figsize=(WIDTH, 1.2 + 0.24 * len(table)))
    axes = figure.subplots()
    axes.axvline(1.0, color=colour("muted"), linewidth=0.9)
    limits = (min(table["ratio"].min(), 0.97) / _ROOM, max(table["ratio"].max(), 1.03) * _ROOM)
    limits = (max(limits[0], min(table["lo"].min(), 0.97)), min(limits[1], max(table["hi"].max(), 1.03)))
    for y, row in enumerate(table.itertuples()):
        shade = row.framework if row.verdict else "muted"
        _interval(axes, (row.lo, row.hi), y, shade, limits)
        axes.plot([row.ratio], [y], "o", color=colour(shade), markersize=5)
        axes.text(1.05, y, f"{row.ratio:.3f}", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set_xlim(limits)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.grid(True)
    axes.set_yticks(range(len(table)), [case_words(row) for row in table.itertuples()], fontsize=8)
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.set_xlabel("B / A (in grey: not told apart)")
    figure.suptitle(_lines(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


def case_words(row: object) -> str:
    """A case in few words: what is usual is left out."""
    usual = {"dtype": "float32", "device": "cpu", "threads": 1, "input": "sequential", "workers": 1}
    more = [
        f"{getattr(row, name)} {name}" if name in ("threads", "workers") else str(getattr(row, name))
        for name, value in usual.items()
        if getattr(row, name) != value
    ]
    words = f"{row.framework} {row.network} b{row.batch}"  # type: ignore[attr-defined]
    return " ".join([words, *more])


def paragraphs(lines: Sequence[str]) -> str:
    """Plain lines as paragraphs."""
    return "".join(f"<p>{markup.escape(line)}</p>" for line in lines)


def milliseconds(values: np.ndarray) -> list[str]:
    """Seconds as text in ms."""
    return [f"{1e3 * value:.4g}" for value in values]
