"""Figures: what is drawn is what the table says, the marks say how it was got, the files never change by chance."""

import os
import subprocess
import sys

import pandas as pd
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from steptime.core.errors import InputError
from steptime.report import figures, style

TIMES = pd.DataFrame(
    {
        "network": ["mlp", "mlp", "lenet"],
        "framework": ["torch", "tensorflow", "torch"],
        "median_s": [0.002, 0.003, 0.0123],
        "lo_s": [0.0019, 0.0028, 0.012],
        "hi_s": [0.0022, 0.0031, 0.013],
    }
)


@pytest.fixture(autouse=True)
def _style() -> None:
    style.use()


def test_every_colour_is_its_own() -> None:
    # the report recolours figures by their light values, so two names with one value would be confused
    lights = [light for light, _ in style.THEME.values()]
    assert len(set(lights)) == len(lights)


@pytest.mark.parametrize("shade", [0, 1])
def test_colours_are_seen_on_their_paper(shade: int) -> None:
    paper = style.THEME["paper"][shade]
    for name in ("ink", "muted"):
        assert _contrast(style.THEME[name][shade], paper) >= 4.5, name
    for name in set(style.THEME) - {"paper", "ink", "muted", "grid", "io", "h2d", "forward", "update"}:
        assert _contrast(style.THEME[name][shade], paper) >= 3, name


def test_marks_tell_how_a_number_was_got() -> None:
    marks = {kind: style.mark(kind, "torch") for kind in style.KINDS}
    assert len({(mark["marker"], mark["linestyle"]) for mark in marks.values()}) == len(marks)
    assert marks["measured"]["markerfacecolor"] == style.colour("torch")
    assert marks["modelled"]["markerfacecolor"] == style.colour("paper")
    with pytest.raises(InputError, match="guessed"):
        style.mark("guessed", "torch")


def test_step_times_draws_medians_and_intervals_in_ms() -> None:
    axes = figures.step_times(TIMES).axes[0]
    drawn = sorted(tuple(line.get_xdata()) for line in axes.lines)
    expected = [(row.median_s * 1e3,) for row in TIMES.itertuples()]
    expected += [(row.lo_s * 1e3, row.hi_s * 1e3) for row in TIMES.itertuples()]
    assert drawn == sorted(expected)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["mlp", "lenet"]
    assert {text.get_text() for text in axes.texts} == {"2.00", "3.00", "12.3"}


def test_phases_stack_to_the_step() -> None:
    table = pd.DataFrame(
        {
            "network": "mlp",
            "framework": "torch",
            "phase": ["io", "forward", "backward"],
            "time_s": [0.001, 0.002, 0.004],
        }
    )
    axes = figures.phases(table).axes[0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([1, 2, 4])
    assert [bar.get_x() for bar in axes.patches] == pytest.approx([0, 1, 3])
    with pytest.raises(InputError, match="phase = 'lunch'"):
        figures.phases(table.assign(phase="lunch"))


def test_speed_up_has_the_ideal_line_and_open_marks_for_a_model() -> None:
    table = pd.DataFrame(
        {"network": "mlp", "schedule": "wait_free", "workers": [1, 2, 4, 8], "speed_up": [1.0, 1.9, 3.5, 6.0]}
    )
    ideal, curve = figures.speed_up(table).axes[0].lines
    assert list(ideal.get_xdata()) == list(ideal.get_ydata()) == [1, 2, 4, 8]
    assert list(curve.get_ydata()) == [1.0, 1.9, 3.5, 6.0]
    assert to_hex(curve.get_markerfacecolor()) == style.colour("paper")
    filled = figures.speed_up(table.assign(kind="measured")).axes[0].lines[1]
    assert to_hex(filled.get_markerfacecolor()) == style.colour("wait_free")


def test_predicted_measured_draws_the_ratio_and_its_interval() -> None:
    table = pd.DataFrame(
        {"network": ["mlp"], "framework": ["torch"], "measured_s": [0.01], "predicted_s": [0.012]}
    ).assign(lo_s=0.008, hi_s=0.015)
    lines = [tuple(line.get_xdata()) for line in figures.predicted_measured(table).axes[0].lines]
    assert pytest.approx((1.2,)) in lines
    assert pytest.approx((0.8, 1.5)) in lines


def test_a_wide_interval_is_cut_and_does_not_stretch_the_axis() -> None:
    table = pd.DataFrame(
        {"network": ["mlp", "lenet"], "framework": "torch", "measured_s": 0.01, "predicted_s": [0.012, 0.009]}
    ).assign(lo_s=[4e-6, 0.0095], hi_s=[25.0, 0.0105])
    figure = figures.predicted_measured(table)
    axes = figure.axes[0]
    low, high = axes.get_xlim()
    assert 0.5 < low < 0.9
    assert 1.2 < high < 2
    cut = {(line.get_marker(), *line.get_xdata()) for line in axes.lines if line.get_marker() in ("<", ">")}
    assert cut == {("<", low), (">", high)}
    assert _inside(figure, axes.texts)


@pytest.mark.parametrize("draw", ["speed_up", "step_times"])
def test_a_legend_of_many_entries_stays_inside(draw: str) -> None:
    names = [f"tensorflow, variant {place}" for place in range(7)]
    if draw == "speed_up":
        table = pd.DataFrame({"schedule": names, "workers": 2, "speed_up": 1.5})
        figure = figures.speed_up(table, panel=None)
        legend = figure.legends[0]
    else:
        table = pd.DataFrame({"network": "mlp", "framework": names, "median_s": 1.0, "lo_s": 0.9, "hi_s": 1.1})
        figure = figures.step_times(table)
        legend = figure.axes[0].get_legend()
    assert len(legend.get_texts()) >= len(names)
    assert _inside(figure, legend.get_texts())


@pytest.mark.parametrize("draw", [figures.step_times, figures.phases, figures.speed_up, figures.predicted_measured])
def test_a_table_that_cannot_be_drawn_is_one_line(draw: object) -> None:
    with pytest.raises(InputError, match=r"column '\w+' is missing"):
        draw(pd.DataFrame({"network": ["mlp"]}))
    names = "network framework median_s lo_s hi_s phase time_s workers speed_up schedule measured_s predicted_s"
    with pytest.raises(InputError, match="no rows"):
        draw(pd.DataFrame(columns=names.split()))


def test_a_figure_is_the_same_bytes_in_every_process(tmp_path: object) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from test_report_figures import TIMES; from steptime.report import figures, style\n"
        "style.use(); style.save(figures.step_times(TIMES), Path(sys.argv[2]))"
    )
    texts = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.svg"
        command = [sys.executable, "-c", code, os.path.dirname(__file__), str(path)]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": seed})
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    assert "<dc:date>" not in texts[0]
    assert ">lenet</text>" in texts[0]


def test_only_svg_is_written(tmp_path: object) -> None:
    with pytest.raises(InputError, match="SVG"):
        style.save(figures.step_times(TIMES), tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())


def _inside(figure: Figure, texts: list[Text]) -> bool:
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in texts]
    return all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)


def _contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio."""

    def luminance(colour: str) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)
