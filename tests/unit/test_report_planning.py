"""The planner of JupyterLab: what its controls show is the model's, by hand and through a kernel; its page is whole."""

import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from planted_planner import LINKS, plant_fit
from planted_report import plant

from steptime.core.files import read_text
from steptime.core.machine import Link, read_link
from steptime.core.step import Schedule
from steptime.model.step import predict_step
from steptime.notebook import read_notebook
from steptime.report import planner, planning, style
from steptime.report.notebooks import read_page

TEXT = Path(__file__).parents[2] / "notebooks" / "text" / "44_planning.py"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = plant(tmp_path_factory.mktemp("planning"))
    (root / "data/machines/links/planted.yaml").unlink()  # a link whose name is not its file's
    plant_fit(root)
    style.use()
    return root


@pytest.fixture
def live(root: Path) -> planning.Planner:
    recorded = sorted(planner.read_recorded(root / "data/derived/fit"), key=lambda item: item.order)
    links = {name: read_link(root / "data/machines/links", name) for name in LINKS}
    return planning.Planner(recorded, links, "10gbe")


def test_each_control_changes_what_is_shown_to_what_the_model_says(live: planning.Planner) -> None:
    changes = [
        (live.workers, 64),
        (live.batch, 32),
        (live.speed, 10.0),
        (live.schedule, "merged"),
        (live.link, "1gbe"),
        (live.link, "own"),
        (live.alpha_us, 5.0),
        (live.gbit_per_s, 40.0),
    ]
    for control, value in changes:
        before = live.said.value
        control.value = value
        assert live.said.value != before
        link = Link(
            name="own",
            alpha_s=live.alpha_us.value / 1e6,
            beta_s_per_byte=8e-9 / live.gbit_per_s.value,
            source="typed",
        )
        link = live.links.get(live.link.value, link)
        profile = planner.scaled(live.profile.value, live.batch.value, live.speed.value)
        expected = predict_step(profile, Schedule(live.schedule.value), live.workers.value, link)
        assert live.found.step.step_s == pytest.approx(expected.step_s, rel=1e-12)
        assert f"{1e3 * expected.step_s:.4g} ms a step" in live.said.value
        low, high = live.found.ends_s
        assert low <= expected.step_s <= high


def test_the_figures_and_the_gains_are_of_the_same_step(live: planning.Planner) -> None:
    live.prefetch.value = True
    live.workers.value = 128
    live.profile.index = 1
    found = live.found
    assert live.batch.value == live.profile.value.profile.batch
    own = found.curve[(found.curve["schedule"] == "wait_free") & (found.curve["workers"] == 128)]
    assert own["speed_up"].item() == pytest.approx(found.speed_up, rel=1e-12)
    assert (found.without["free_step_s"] <= found.step.step_s * (1 + 1e-9)).all()
    best = found.without.iloc[0]
    assert best["gain"] == pytest.approx(1 - best["free_step_s"] / found.step.step_s, abs=1e-9)
    assert found.without["resource"].isin(planning.FREED).all()
    assert live.shown.value.count("<svg") == 2


def test_a_change_is_shown_in_less_than_a_second(live: planning.Planner) -> None:
    seconds = []
    for workers in (1024, 4096, 512):
        start = time.process_time()
        live.workers.value = workers
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1


def _run(root: Path, out: str, last: str = "") -> nbformat.NotebookNode:
    node = read_notebook(read_text(TEXT))
    parameters = next(cell for cell in node.cells if "parameters" in cell.metadata.get("tags", []))
    parameters.source = parameters.source.replace('out: str = ""', f"out: str = {out!r}")
    if last:
        node.cells.append(nbformat.v4.new_code_cell(last))
    NotebookClient(node, timeout=300, resources={"metadata": {"path": str(root)}}).execute()
    return node


def test_in_a_kernel_the_notebook_is_live(root: Path) -> None:
    node = _run(root, "", "planner.workers.value = 256\nprint(planner.found.step.step_s)")
    views = [output for cell in node.cells for output in cell.get("outputs", []) if "data" in output]
    assert any("application/vnd.jupyter.widget-view+json" in output["data"] for output in views)
    first = sorted(planner.read_recorded(root / "data/derived/fit"), key=lambda item: item.order)[0]
    link = read_link(root / "data/machines/links", "10gbe")
    expected = predict_step(first.profile, Schedule("wait_free"), 256, link).step_s
    assert float(node.cells[-1].outputs[0]["text"]) == pytest.approx(expected, rel=1e-12)


def test_what_the_pipeline_runs_is_a_whole_page_without_any_widget(root: Path) -> None:
    node = _run(root, "planned")
    path = root / "data/reports/notebooks/44_planning.ipynb"
    path.write_text(nbformat.writes(node))
    page = read_page(path)
    assert page.title == "What would your cluster bring?"
    assert "live in JupyterLab" in page.body
    assert "ms a step" in page.body
    assert page.body.count("<svg") == page.body.count("<table") == 2
    for word in ("<script", "widget", "require", "http"):
        assert word not in page.body.replace("http://www.w3.org", "")
    assert sorted(item.name for item in (root / "planned/figures").iterdir()) == ["speed_up.svg", "timeline.svg"]
