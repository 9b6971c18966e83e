"""Chromium for the browser tests: Debian's, started here, headless, with a new profile and no network of its own."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import FLAGS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))  # planted_report

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
