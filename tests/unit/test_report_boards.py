"""The board's figures say what the tables say."""

import numpy as np
import pandas as pd
import pytest

from steptime.report import boards, style


@pytest.fixture(autouse=True)
def _style() -> None:
    style.use()


def test_every_set_and_model_is_drawn_where_its_errors_are():
    rows = [("one", "ours", "held out", 0.02, 0.1, True), ("one", "ours", "in-sample", 0.0, 0.001, True)]
    rows += [("one", "last point", "held out", 0.05, 0.2, False), ("two", "ours", "held out", 0.3, 0.9, True)]
    table = pd.DataFrame(rows, columns=["set", "model", "where", "median", "p90", "is_ours"])
    figure = boards.errors(table, {"one": 0.01}, "Errors")
    first, second = figure.axes
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["one", "two"]
    assert [text.get_text() for text in first.get_yticklabels()] == ["ours", "ours, in-sample", "last point"]
    bars = [line for line in first.lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "-"]
    np.testing.assert_allclose([line.get_xdata() for line in bars], [[0.02, 0.1], [0.001, 0.001], [0.05, 0.2]])
    floors = [[line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] for axes in (first, second)]
    assert floors == [[0.01], []]
    assert style.svg_text(figure) == style.svg_text(boards.errors(table, {"one": 0.01}, "Errors"))


def test_a_curve_tells_what_was_fitted_on_from_what_was_held_out():
    table = pd.DataFrame({"n_bytes": [2**20, 2**10, 2**14], "is_observed": [False, True, False]})
    table = table.assign(measured_s=[0.3, 0.1, 0.2], predicted_s=0.2, lo_s=0.1, hi_s=0.4)
    figure = boards.curve(
        table, "n_bytes", "bytes", "a title that is longer than the figure is wide, so that it breaks"
    )
    axes = figure.axes[0]
    line, held_out, observed = axes.lines
    assert line.get_xdata().tolist() == [2**10, 2**14, 2**20]
    assert observed.get_xdata().tolist() == [2**10]
    assert held_out.get_xdata().tolist() == [2**14, 2**20]
    figure.canvas.draw()
    assert {"1 KiB", "1 MiB"} <= {text.get_text() for text in axes.get_xticklabels()}
