"""Figures of many settings: every row of the table is drawn where it belongs, and sixteen settings stay readable."""

from itertools import pairwise

import numpy as np
import pandas as pd
import planted_campaign as planted
import pytest
from matplotlib.figure import Figure

from steptime.core.errors import InputError
from steptime.core.machine import Machine
from steptime.report import panels, style

MACHINE = Machine(**planted.MACHINE)
SETTINGS = [f"framework_{place:02d}" for place in range(16)]


@pytest.fixture(autouse=True)
def _style() -> None:
    style.use()


def standings(settings: list[str], networks: int) -> pd.DataFrame:
    rows = [
        {"network": f"net{number}", "setting": name, "ratio": 1 + 0.2 * place, "median_s": 0.01 * (1 + 0.2 * place)}
        for number in range(networks)
        for place, name in enumerate(settings)
    ]
    table = pd.DataFrame(rows)
    standing = table["ratio"].map(lambda ratio: "fastest" if ratio == 1 else "tied" if ratio < 1.3 else "slower")
    return table.assign(lo=table["ratio"] * 0.98, hi=table["ratio"] * 1.02, standing=standing)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_standings_draw_each_ratio_in_its_row_and_call_ties_so() -> None:
    figure = panels.standings(standings(["torch", "jax", "caffe"], 2), "Step")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["net0", "net1"]
    drawn = {
        tuple(line.get_xdata()): line.get_ydata()[0] for line in figure.axes[0].lines if len(line.get_xdata()) == 1
    }
    assert drawn == {(1.0,): 0, (1.2,): 1, (1.4,): 2}
    assert texts(figure)[:3] == ["10.0 ms", "tied", "1.40"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["torch", "jax", "caffe"]


def test_an_endless_interval_is_cut() -> None:
    table = standings(["torch", "jax"], 1).assign(lo=0.0, hi=np.inf)
    (axes,) = panels.standings(table, "Step").axes
    assert np.isfinite(axes.get_xlim()).all()
    style.svg_text(panels.standings(table, "Step"))


def test_marks_lie_in_their_settings_row_open_for_a_model_with_intervals_cut() -> None:
    rows = [
        {"network": "a", "setting": setting, "schedule": schedule, "value": value, "lo": value / 9, "hi": value * 1.1}
        for setting, value in (("torch", 4.0), ("caffe", 8.0))
        for schedule in ("merged", "wait_free")
    ]
    figure = panels.marks(pd.DataFrame(rows), "schedule", "Speed-up", "times", 16.0)
    (axes,) = figure.axes
    points = [line for line in axes.lines if len(line.get_xdata()) == 1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["caffe", "torch"]
    assert [(line.get_xdata()[0], round(line.get_ydata()[0])) for line in points] == [(4, 1), (4, 1), (8, 0), (8, 0)]
    assert {line.get_markerfacecolor() for line in points} == {style.colour("paper")}
    assert [line.get_markeredgecolor() for line in points[:2]] == [style.colour("merged"), style.colour("wait_free")]
    lines = [tuple(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 2]
    assert lines[0] == (16, 16)
    assert lines[1] == pytest.approx((4 / 1.5, 4.4))
    assert [text.get_text() for text in figure.legends[0].texts] == ["merged, modelled", "wait-free, modelled"]


def test_parts_stack_to_their_sum_and_what_is_missing_says_so() -> None:
    table = pd.DataFrame(
        {
            "network": ["a", "a", "b"],
            "setting": ["torch", "torch", "jax"],
            "part": ["dense", "pooling", "dense"],
            "time_s": [0.001, 0.002, 0.004],
        }
    )
    figure = panels.stacked(table, panels.KIND_COLOURS, "Kinds", note="not measured")
    bars = figure.axes[0].patches
    assert sum(bar.get_width() for bar in bars) == pytest.approx(3)
    # the part listed first in the colours lies to the left, whatever the table's order
    assert [bar.get_x() for bar in bars] == pytest.approx([0, 1])
    assert "not measured" in texts(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["dense", "pooling"]


def test_the_roof_has_the_machine_s_peaks_and_bends_at_their_balance() -> None:
    table = pd.DataFrame(
        {"setting": "torch", "group": ["convolution", "dense"], "intensity": [1.0, 50.0], "flops_per_s": [3e9, 2e10]}
    )
    figure = panels.roofline(table, MACHINE, "Roof")
    roof = figure.axes[0].lines[0]
    x, y = np.array(roof.get_xdata()), np.array(roof.get_ydata())
    assert y.max() == pytest.approx(60)
    assert x[y >= 60 - 1e-9].min() == pytest.approx(5)
    assert y[0] == pytest.approx(x[0] * 12)


@pytest.mark.parametrize(
    ("draw", "column"),
    [
        (lambda table: panels.standings(table, "t"), "network"),
        (lambda table: panels.factors(table, "t", "l"), "lever"),
        (lambda table: panels.memory(table, "t"), "setting"),
    ],
)
def test_a_table_that_cannot_be_drawn_is_one_line(draw: object, column: str) -> None:
    with pytest.raises(InputError, match=f"column '{column}' is missing") as error:
        draw(pd.DataFrame({"nothing": [1]}))  # type: ignore[operator]
    assert "\n" not in str(error.value)


def test_sixteen_settings_and_twelve_networks_stay_apart() -> None:
    figure = panels.standings(standings(SETTINGS, 12), "Step")
    style.svg_text(figure)  # lays it out
    first = figure.axes[0]
    boxes = [label.get_window_extent() for label in first.get_yticklabels()]
    assert all(above.y0 >= below.y1 - 1 for above, below in pairwise(boxes))
    assert all(box.x0 >= 0 for box in boxes)
    assert len(figure.axes) == 12


def test_a_setting_has_its_framework_s_colour() -> None:
    assert style.colour("torch_channels_last") == style.colour("torch")
    assert style.colour("tensorflow1") == style.colour("tensorflow")
    assert style.colour("torch bfloat16") == style.colour("torch")
    assert style.colour("h2o") != style.colour("ink")
    assert style.colour("unheard_of") == style.colour("ink")


def test_the_names_at_the_ends_of_curves_do_not_overlap() -> None:
    table = pd.DataFrame(
        [
            {"network": "a", "setting": name, "batch": batch, "rate": 100.0 * batch * (1 + 0.001 * place)}
            for place, name in enumerate(SETTINGS[:8])
            for batch in (8, 16)
        ]
    )
    figure = panels.scaling(table, "batch", "rate", ("batch", "samples/s"), "Batch")
    style.svg_text(figure)  # lays it out
    boxes = sorted((text.get_window_extent() for text in figure.axes[0].texts), key=lambda box: box.y0)
    assert all(above.y0 >= below.y1 - 2 for below, above in pairwise(boxes))
