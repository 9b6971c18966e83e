"""Pages that stand alone in Chromium, from disk, network off: two campaigns compared, a network of one's own."""

from dataclasses import replace
from pathlib import Path

import pytest
from chromium import barriers, look
from click.testing import CliRunner
from planted_report import campaign

from steptime.cli import cli
from steptime.core.campaign import write_campaign
from steptime.frameworks import examples
from steptime.measure import lock

pytest_plugins = ["chromium"]  # the browser fixture

HERE = Path(__file__).parent
CHECKS = [(HERE / f"{name}.js").read_text(encoding="utf-8") for name in ("faults", "faint", "overlaps")]
VIEWS = [(390, "light"), (390, "dark"), (1440, "light"), (1440, "dark")]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign and the same with one case twice as slow, compared by the command."""
    folder = tmp_path_factory.mktemp("compared")
    slower = campaign("b")
    is_slow = slower.samples["run_id"].isin(slower.runs.loc[slower.runs["network"] == "lenet", "run_id"])
    samples = slower.samples.assign(time_s=slower.samples["time_s"].where(~is_slow, 2 * slower.samples["time_s"]))
    for name, found in {"a": campaign("a"), "b": replace(slower, samples=samples)}.items():
        write_campaign(found, folder / name)
    page = folder / "changes.html"
    done = CliRunner().invoke(cli, ["compare", str(folder / "a"), str(folder / "b"), "--out", str(page)])
    assert page.is_file(), done.output
    return page


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with skip connections, measured."""
    folder = tmp_path_factory.mktemp("measured")
    out = folder / "unet"
    module = Path(examples.__path__[0]) / "own_modules.py"
    given = ["--torch", f"{module}:unet", "--input", "3,32,32", "--batch", "4", "--rounds", "2", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "LOCK", folder / "lock")
        done = CliRunner().invoke(cli, ["measure", *given])
    assert done.exit_code == 0, done.output
    return out / "index.html"


@pytest.fixture(params=["compared", "measured"])
def page(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_the_page_fits_and_is_readable(browser: object, page: Path, width: int, scheme: str) -> None:
    browser.execute_cdp_cmd("Network.enable", {})
    off = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", off)
    browser.get_log("browser")
    look(browser, width, scheme)
    browser.get(page.as_uri())
    found = [fault for check in CHECKS for fault in browser.execute_script(check)]
    assert found + barriers(browser) + [entry["message"] for entry in browser.get_log("browser")] == []
    assert browser.find_element("css selector", ".figure svg[role=img]").is_displayed()
    assert len(browser.find_elements("css selector", "tbody tr")) > 3
    assert page.stat().st_size < 2_000_000
