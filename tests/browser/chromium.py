"""Chromium for the browser tests: Debian's, started here, headless, with a new profile; what it is to look like."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import axe_core_python
import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
AXE = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
AXE_RUN = """
const done = arguments[0];
const told = ({id, impact, nodes}) => nodes.map((node) => `${impact} ${id}: ${node.target.join(" ")}`);
axe.run({resultTypes: ["violations"]}).then(({violations}) => done(violations
  .filter(({impact}) => ["serious", "critical"].includes(impact)).flatMap(told)), (error) => done([String(error)]));
"""
INSTALL = "no Chromium here; install it: sudo apt-get install -y chromium chromium-driver"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A selenium driver; the module's tests share it."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip(INSTALL)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    found.set_page_load_timeout(60)
    yield found
    found.quit()


def look(browser: object, width: int, scheme: str, height: int = 900) -> None:
    """Emulate a screen of `width` CSS pixels that prefers `scheme` (light or dark)."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def barriers(browser: object) -> list[str]:
    """What axe-core calls serious or critical on the page as it is shown: impact, rule and place."""
    browser.set_script_timeout(120)
    browser.execute_script(AXE)
    return browser.execute_async_script(AXE_RUN)
