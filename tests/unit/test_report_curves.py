"""Figures of published systems draw every row, in the kind's own mark, and refuse what they cannot draw."""

import pandas as pd
import pytest

from steptime.core.errors import InputError
from steptime.report import curves

LINE = pd.DataFrame(
    {
        "x": [1, 2, 4, 4],
        "y": [1.0, 1.9, 3.5, 3.6],
        "series": "a",
        "kind": ["modelled", "modelled", "modelled", "measured"],
    }
)


def test_one_series_has_one_colour_and_its_kinds_differ_in_their_marks():
    axes = curves.curves(LINE, "Planted", ("workers", "speed-up")).axes[0]
    modelled, published = axes.lines
    assert list(modelled.get_xdata()) == [1, 2, 4]
    assert list(published.get_ydata()) == [3.6]
    assert modelled.get_color() == published.get_color()
    assert modelled.get_markerfacecolor() != published.get_markerfacecolor()


def test_the_ideal_and_the_band_are_drawn_where_asked():
    table = LINE.assign(lo=LINE["y"] - 0.1, hi=LINE["y"] + 0.1)
    axes = curves.curves(table, "Planted", ("workers", "speed-up"), ideal=True).axes[0]
    assert list(axes.lines[-1].get_xdata()) == list(axes.lines[-1].get_ydata()) == [1, 4]
    assert len(axes.collections) == 2


def test_a_waterfall_has_a_bar_a_row_and_the_published_value_on_its_own():
    table = pd.DataFrame({"name": ["a", "b"], "value": [1.0, 2.0], "published": [float("nan"), 2.5]})
    axes = curves.waterfall(table, "Planted", "times").axes[0]
    assert [bar.get_width() for bar in axes.patches] == [1.0, 2.0]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] == [([2.5], [1])]


def test_points_stand_on_the_row_of_their_name():
    table = pd.DataFrame({"row": ["b", "a", "b"], "series": ["s", "s", "t"], "x": [1.0, 2.0, 3.0], "kind": "modelled"})
    axes = curves.points(table, "Planted", "error, %", band=(-1, 1)).axes[0]
    marks = {tuple(line.get_xdata()): list(line.get_ydata()) for line in axes.lines[1:]}
    assert marks == {(1.0, 2.0): [0, 1], (3.0,): [0]}


def test_intervals_of_points_stand_beside_each_other():
    table = pd.DataFrame({"row": "a", "series": ["s", "t"], "x": [1.0, 3.0], "kind": "modelled"})
    axes = curves.points(table.assign(lo=table["x"] - 1, hi=table["x"] + 2), "Planted", "error, %", band=(-1, 1)).axes[
        0
    ]
    drawn = [collection.get_segments()[0] for collection in axes.collections]
    assert [tuple(line[:, 0]) for line in drawn] == [(0.0, 3.0), (2.0, 5.0)]
    assert drawn[0][0, 1] < 0 < drawn[1][0, 1]


def test_many_series_of_two_kinds_are_named_once():
    table = pd.concat([LINE.assign(series=name) for name in "abcdef"])
    texts = [text.get_text() for text in curves.curves(table, "Planted", ("x", "y")).legends[0].get_texts()]
    assert texts == [*"abcdef", "modelled", "measured"]


@pytest.mark.parametrize("table", [LINE.drop(columns="y"), LINE.iloc[:0]])
def test_a_table_without_what_is_needed_is_refused(table):
    with pytest.raises(InputError, match="figure curves"):
        curves.curves(table, "Planted", ("x", "y"))
