"""The planner page in Chromium, from disk, network off: Python's numbers, addresses, copied calls, no fault."""

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bs4 import BeautifulSoup
from chromium import barriers, look
from planted_planner import plant_fit, plant_profile
from planted_report import plant
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from steptime import networks
from steptime.core.campaign import read_campaign
from steptime.core.machine import Link
from steptime.core.step import AGGREGATIONS, LayerProfile, Schedule
from steptime.model.collectives import all_reduce, line
from steptime.model.exchanges import CentralServer, Collective, Exchange, ShardedServer
from steptime.model.fitting import layer_profile
from steptime.model.schedules import step_graph
from steptime.model.step import predict_step
from steptime.model.what_if import bottlenecks, steady_s
from steptime.report import planner
from steptime.report.site import build_site

pytest_plugins = ["chromium"]  # the browser fixture

HERE = Path(__file__).parent
FAULTS, FAINT, OVERLAPS = (
    (HERE / f"{name}.js").read_text(encoding="utf-8") for name in ("faults", "faint", "overlaps")
)
CHECKOUT = HERE.parents[1]
REAL = CHECKOUT / "data" / "reports" / "planner.html"
VIEWS = list(itertools.product((390, 1440), ("light", "dark")))
TOLERANCE = 1e-9
LINKS = [("10gbe", 4.525e-5, 8.484e-10), ("1gbe", 4.36e-4, 9e-9), ("100gb-ib", 7.2e-6, 8e-11)]
ALEXNET = "planted-laptop/torch-alexnet-quick-b16-float32-cpu-t1-sequential"
SETTINGS = [
    "",
    f"profile={ALEXNET}&workers=1024&batch=64&schedule=merged&link=1gbe&exchange=ps_central&prefetch=1",
    "profile=own&layers=a,0,5e7;b,1000000,2e8;c,30000000,6e7&gflops_per_s=5000&batch=128&workers=48&schedule=buckets"
    "&bucket_mib=4&link=own&alpha_us=12.5&gbit_per_s=25&exchange=halving_doubling",
]
STEP = """
const {profile, schedule, exchange, workers, link, free} = arguments[0];
const {messages, ...terms} = steptimePlanner.step(profile, schedule, exchange, workers, link, free || "");
return {...terms, messages: messages.length};
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A planted checkout with its report."""
    root = plant(tmp_path_factory.mktemp("planner"))
    plant_fit(root)
    build_site(root)
    return root


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a plan on a page that has a committed campaign's profile and the checkout's links."""
    root = plant(tmp_path_factory.mktemp("committed"))
    plant_fit(root)
    shutil.copytree(CHECKOUT / "data/machines/links", root / "data/machines/links", dirs_exist_ok=True)
    name, case_id = "epyc-2core-settings", "torch-alexnet-quick-b16-float32-cpu-t1-sequential"
    campaign = read_campaign(CHECKOUT / "data/campaigns" / name)
    plant_profile(root, name, case_id, layer_profile(campaign, networks.build("alexnet", size="quick"), case_id))
    build_site(root)
    return f"{(root / 'data/reports/planner.html').as_uri()}#profile={name}/{case_id}&link=10gbe"


@pytest.fixture(params=["planted", "real"])
def any_page(request: pytest.FixtureRequest, root: Path, tmp_path: Path) -> Path:
    """The page alone in a folder: nothing beside it can help."""
    source = root / "data/reports/planner.html" if request.param == "planted" else REAL
    if not source.is_file():
        pytest.skip("data/reports is not built here; `make study` builds it")
    return Path(shutil.copy(source, tmp_path / "planner.html"))


@pytest.fixture
def page(root: Path, browser: object) -> str:
    """The planted page's address; the screen is wide, the log empty."""
    look(browser, 1440, "light")
    return (root / "data/reports/planner.html").as_uri()


@pytest.fixture(autouse=True)
def offline(browser: object) -> None:
    browser.execute_cdp_cmd("Network.enable", {})
    off = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", off)
    browser.get_log("browser")


# ---------------------------------------------------------------------------------------------- the page and Python


def _profiles() -> list[LayerProfile]:
    draw = np.random.default_rng(5)
    found = []
    for count in (1, 6, 55):
        forward = draw.lognormal(-7, 1, count)
        n_bytes = np.where(draw.random(count) < 0.3, 0, 4 * draw.integers(1, 2_000_000, count)).astype(float)
        n_bytes[0] = 4e5
        backward = forward * draw.lognormal(0.6, 0.3, count)
        names = tuple(f"layer{place}" for place in range(count))
        phases = {"t_io_s": 2e-3, "t_h2d_s": 3e-4, "t_u_s": 5e-4}
        found.append(LayerProfile("planted", "planted", 16, names, forward, backward, n_bytes, 0 * n_bytes, **phases))
    return found


def _for_page(profile: LayerProfile, schedule: Schedule, exchange: str, workers: int, link: Link) -> dict:
    arrays = {name: getattr(profile, name).tolist() for name in ("forward_s", "backward_s", "parameter_bytes")}
    phases = {name: getattr(profile, name) for name in ("t_io_s", "t_h2d_s", "t_u_s", "batch")}
    return {
        "profile": {"layers": list(profile.layers), **arrays, **phases},
        "schedule": {name: getattr(schedule, name) for name in ("aggregation", "prefetch", "bucket_bytes")},
        "exchange": exchange,
        "workers": workers,
        "link": {"alpha_s": link.alpha_s, "beta_s_per_byte": link.beta_s_per_byte},
    }


def _on_page(browser: object, plans: list[dict]) -> list[dict]:
    """Many plans in one call of the driver."""
    script = f"const one = function () {{ {STEP} }}; return arguments[0].map((plan) => one(plan));"
    return browser.execute_script(script, plans)


def _exchange(name: str, workers: int, link: Link) -> Exchange:
    if name == "ps_central":
        return CentralServer(workers, line(link))
    if name == "ps_sharded":
        return ShardedServer(workers, line(link))
    return Collective(workers, all_reduce(name, workers, line(link)))


def _link(name: str, alpha_s: float, beta: float) -> Link:
    return Link(name=name, alpha_s=alpha_s, beta_s_per_byte=beta, source="planted")


def test_page_and_python_agree_on_a_ring(browser: object, page: str) -> None:
    browser.get(page)
    plans, expected = [], []
    grid = itertools.product(_profiles(), AGGREGATIONS, (False, True), (1, 2, 3, 16, 100, 1024), LINKS)
    for profile, aggregation, prefetch, workers, constants in grid:
        schedule, link = Schedule(aggregation, prefetch, bucket_bytes=4e6), _link(*constants)
        plans.append(_for_page(profile, schedule, "ring", workers, link))
        expected.append(vars(predict_step(profile, schedule, workers, link)))
    found = _on_page(browser, plans)
    assert len(found) == len(expected) == 648
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["messages"] == theirs["messages"]
        for name in ("step_s", "t_io_s", "t_h2d_s", "t_f_s", "t_b_s", "t_c_s", "t_c_no_s", "t_u_s"):
            # what is left of a difference is as exact as what was subtracted
            assert ours[name] == pytest.approx(theirs[name], rel=TOLERANCE, abs=TOLERANCE * theirs["step_s"]), name


EXCHANGES = ("tree", "double_tree", "recursive_doubling", "halving_doubling", "ps_central", "ps_sharded")


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_page_and_the_simulator_agree_on_other_exchanges(browser: object, page: str, exchange: str) -> None:
    browser.get(page)
    plans, expected = [], []
    names = ("end_of_backward", "wait_free", "merged", "buckets")
    for profile, name, prefetch, workers in itertools.product(_profiles(), names, (False, True), (1, 2, 5, 64)):
        schedule, link = Schedule(name, prefetch, bucket_bytes=4e6), _link(*LINKS[0])
        plans.append(_for_page(profile, schedule, exchange, workers, link))
        expected.append(steady_s(step_graph(profile, schedule, _exchange(exchange, workers, link))))
    found = [item["step_s"] for item in _on_page(browser, plans)]
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)


def test_what_a_change_brings_is_what_python_says(browser: object, page: str) -> None:
    browser.get(page)
    _, profile, _ = _profiles()
    for name, prefetch, workers in itertools.product(("wait_free", "merged"), (False, True), (4, 64)):
        schedule, link = Schedule(name, prefetch), _link(*LINKS[1])
        plan = _for_page(profile, schedule, "ring", workers, link)
        script = "const {profile, schedule, exchange, workers, link} = arguments[0];"
        script += "return steptimePlanner.bottlenecks(profile, schedule, exchange, workers, link)"
        found = {row["name"]: row for row in browser.execute_script(script, plan)}
        freed = bottlenecks(step_graph(profile, schedule, _exchange("ring", workers, link))).set_index("resource")
        assert found["communication"]["step_s"] == pytest.approx(freed.loc["link", "free_step_s"], rel=TOLERANCE)
        assert found["device"]["step_s"] == pytest.approx(freed.loc["device", "free_step_s"], rel=TOLERANCE)
        if prefetch:
            assert found["input"]["step_s"] == pytest.approx(freed.loc["input", "free_step_s"], rel=TOLERANCE)
        now = predict_step(profile, schedule, workers, link).step_s
        no_latency = predict_step(profile, schedule, workers, link.model_copy(update={"alpha_s": 0.0})).step_s
        assert found["alpha"]["step_s"] == pytest.approx(no_latency, rel=TOLERANCE)
        assert found["alpha"]["gain"] == pytest.approx(1 - no_latency / now, abs=TOLERANCE)
        no_bytes = predict_step(profile, schedule, workers, link.model_copy(update={"beta_s_per_byte": 1e-300})).step_s
        assert found["beta"]["step_s"] == pytest.approx(no_bytes, rel=TOLERANCE)


def test_batches_devices_and_intervals_are_those_of_python(browser: object, root: Path, page: str) -> None:
    browser.get(page)
    script = """
    const data = JSON.parse(document.getElementById("planner-data").textContent), [case_id, batch, speed] = arguments;
    const found = data.profiles.find((profile) => profile.case_id === case_id);
    const of = steptimePlanner.scaled(found, batch, speed);
    return [of.forward_s, of.backward_s, [of.t_io_s, of.t_h2d_s, of.t_u_s], steptimePlanner.spread(found)];
    """
    for recorded in planner.read_recorded(root / "data/derived/fit"):
        for batch, speed in ((1, 1.0), (16, 0.5), (33, 3.7), (500, 120.0)):
            *found, ends = browser.execute_script(script, recorded.case_id, batch, speed)
            of = planner.scaled(recorded, batch, speed)
            expected = [of.forward_s, of.backward_s, [of.t_io_s, of.t_h2d_s, of.t_u_s]]
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)
            assert ends == pytest.approx(planner.spread(recorded), rel=TOLERANCE)


# ------------------------------------------------------------------------------------------------ what people see


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_the_page_fits_and_is_readable(browser: object, any_page: Path, setting: int, width: int, scheme: str) -> None:
    look(browser, width, scheme)
    soup = BeautifulSoup(any_page.read_bytes(), "html.parser")
    profiles = json.loads(soup.select_one("#planner-data").string)["profiles"]
    alexnet = next(f"{item['campaign']}/{item['case_id']}" for item in profiles if item["network"] == "alexnet")
    _open(browser, f"{any_page.as_uri()}#{SETTINGS[setting].replace(ALEXNET, alexnet)}")
    assert _text(browser, "fault") == ""
    found = [fault for check in (FAULTS, FAINT, OVERLAPS) for fault in browser.execute_script(check)]
    found += barriers(browser)
    found += [entry["message"] for entry in browser.get_log("browser")]
    assert found == []
    assert not _shown(browser, "planner-static")
    assert _shown(browser, "planner")
    assert "ms a step" in _text(browser, "headline")
    for figure in ("timeline", "speed-up"):
        assert browser.execute_script(f"return !!document.querySelector('#{figure} svg[role=img][aria-label]')")


def test_without_any_profile_layers_can_be_typed(browser: object, tmp_path: Path) -> None:
    root = plant(tmp_path)
    build_site(root)
    look(browser, 390, "light")
    _open(browser, (root / "data/reports/planner.html").as_uri())
    assert "ms a step" in _text(browser, "headline")
    assert browser.find_element("id", "layers").is_displayed()
    assert browser.get_log("browser") == []


def test_without_scripts_the_table_and_the_figure_stay(browser: object, page: str) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(page)
        assert browser.find_element("id", "planner-static").is_displayed()
        assert not browser.find_element("id", "planner").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_dragging_changes_every_number_at_once_and_the_address_soon(browser: object, page: str) -> None:
    _open(browser, f"{page}#workers=4")
    before = [_text(browser, name) for name in ("headline", "without", "python")]
    figures = [browser.execute_script(f"return document.getElementById('{name}').innerHTML") for name in FIGURES]
    _drag(browser, "workers", 700)
    after = [_text(browser, name) for name in ("headline", "without", "python")]
    assert all(one != other for one, other in zip(before, after, strict=True))
    for name, drawn in zip(FIGURES, figures, strict=True):
        assert browser.execute_script(f"return document.getElementById('{name}').innerHTML") != drawn
    number = browser.execute_script("return document.getElementById('workers').value")
    assert f"on {number} workers" in after[0]
    browser.set_script_timeout(5)
    script = "const done = arguments[0]; setTimeout(() => done(location.hash), 400)"
    assert f"workers={number}" in browser.execute_async_script(script)


FIGURES = ("timeline", "speed-up")


@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_an_address_reproduces_the_plan(browser: object, page: str, setting: int) -> None:
    _open(browser, f"{page}#{SETTINGS[setting]}")
    _drag(browser, "alpha_us", 420)
    script = "const done = arguments[0]; setTimeout(() => done(location.hash), 400)"
    browser.set_script_timeout(5)
    address, text = browser.execute_async_script(script), _everything(browser)
    _open(browser, page)
    assert _everything(browser) != text
    _open(browser, page + address)
    assert _everything(browser) == text


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("workers=0", "workers = 0: must be a whole number from 1 to 4096"),
        ("workers=2.5", "workers = 2.5: must be a whole number"),
        ("link=carrier-pigeon", "link = carrier-pigeon: is not one of those below"),
        ("speed=<b>1</b>", "speed = <b>1</b>: must be a number"),
        ("colour=red", "colour: is not part of a plan"),
        ("profile=own&layers=a,1,5;b", "layers, line 2: “b”: write name, parameters, forward FLOPs"),
    ],
)
def test_a_wrong_address_is_told_in_one_line(browser: object, page: str, address: str, fault: str) -> None:
    _open(browser, f"{page}#{address}")
    assert fault in _text(browser, "fault")
    assert browser.get_log("browser") == []


def test_a_wrong_number_is_told_and_nothing_moves(browser: object, page: str) -> None:
    _open(browser, page)
    before = _text(browser, "headline")
    field = browser.find_element("id", "workers")
    field.send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.BACKSPACE)
    assert "workers = nothing" in _text(browser, "fault")
    assert field.get_attribute("aria-invalid") == "true"
    assert _text(browser, "headline") == before
    field.send_keys("32")
    assert _text(browser, "fault") == ""
    assert "on 32 workers" in _text(browser, "headline")


@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_the_copied_python_prints_the_pages_number(browser: object, root: Path, page: str, setting: int) -> None:
    _open(browser, f"{page}#{SETTINGS[setting]}")
    code = _text(browser, "python")
    printed = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert float(printed.stdout) == pytest.approx(_step_of_page(browser), rel=TOLERANCE)


@pytest.mark.parametrize("name", ["python", "command"])
def test_the_button_copies_what_stands_there(browser: object, page: str, name: str) -> None:
    _open(browser, f"{page}#workers=48")
    browser.find_element("css selector", f"[data-copy={name}]").click()
    WebDriverWait(browser, 10).until(lambda browser: f"{name.capitalize()} copied" in _text(browser, "copied"))
    field = browser.find_element("css selector", "#search input")
    field.send_keys(Keys.CONTROL, "v", Keys.NULL)
    pasted = field.get_attribute("value")  # a field of one line has no line breaks
    assert "48" in pasted
    assert "".join(pasted.split()) == "".join(_text(browser, name).split())


@pytest.mark.parametrize("plan", ["workers=64", "workers=8&schedule=merged&prefetch=1", "schedule=end_of_backward"])
def test_the_copied_command_prints_the_pages_number(browser: object, committed: str, plan: str) -> None:
    """Of a committed campaign: the command reads it in the checkout, the page has its profile."""
    look(browser, 1440, "light")
    _open(browser, f"{committed}&{plan}")
    assert _text(browser, "fault") == ""
    command = shlex.split(_text(browser, "command"))
    assert command[:2] == ["steptime", "predict"]
    arguments = [sys.executable, "-c", "from steptime.cli import main; main()", *command[1:], "--csv"]
    printed = subprocess.run(arguments, cwd=CHECKOUT, capture_output=True, text=True, check=True, env=os.environ)
    head, row = (line.split(",") for line in printed.stdout.strip().splitlines())
    assert float(row[head.index("step_s")]) == pytest.approx(_step_of_page(browser), rel=5e-6)  # it prints six digits


def _open(browser: object, address: str) -> None:
    browser.get("about:blank")
    browser.get(address)


def _drag(browser: object, key: str, position: int) -> None:
    script = """
    const slider = document.querySelector(`input[type=range][data-key=${arguments[0]}]`);
    slider.value = arguments[1];
    slider.dispatchEvent(new Event("input", {bubbles: true}));
    """
    browser.execute_script(script, key, position)


def _step_of_page(browser: object) -> float:
    """Seconds of the plan's step, to the last digit."""
    return float(browser.execute_script("return document.getElementById('headline').dataset.step_s"))


def _text(browser: object, name: str) -> str:
    return browser.execute_script("return document.getElementById(arguments[0]).textContent", name)


def _shown(browser: object, name: str) -> bool:
    return browser.find_element("id", name).is_displayed()


def _everything(browser: object) -> str:
    return json.dumps([_text(browser, name) for name in ("headline", "without", "python", "command")])
