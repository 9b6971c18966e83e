"""The report in Chromium, from disk, with the network off: planted pages always, the real ones where they are built."""

import shutil
from pathlib import Path

import pytest
from chromium import barriers, look
from planted_report import claims, plant
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from steptime.report.site import build_site

pytest_plugins = ["chromium"]  # the browser fixture

REAL = Path(__file__).resolve().parents[2] / "data" / "reports"
VIEWS = [(390, "light"), (390, "dark"), (1440, "light"), (1440, "dark")]

FAULTS = (Path(__file__).parent / "faults.js").read_text(encoding="utf-8")
OVERLAPS = (Path(__file__).parent / "overlaps.js").read_text(encoding="utf-8")
FAINT = (Path(__file__).parent / "faint.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = plant(tmp_path_factory.mktemp("planted"))
    build_site(root)
    return root / "data" / "reports"


@pytest.fixture(scope="module", params=["planted", "real"])
def reports(request: pytest.FixtureRequest, planted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, alone in their folder, so that nothing else of the checkout can help them."""
    source = planted if request.param == "planted" else REAL
    if not (source / "index.html").is_file():
        pytest.skip("data/reports is not built here; `make study` builds it")
    target = tmp_path_factory.mktemp(request.param) / "reports"
    shutil.copytree(source, target)
    return target


@pytest.fixture(autouse=True)
def offline(browser: object) -> None:
    browser.execute_cdp_cmd("Network.enable", {})
    off = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", off)
    browser.get_log("browser")


def test_the_checks_see_planted_faults(browser: object, tmp_path: Path) -> None:
    look(browser, 390, "light")
    page = tmp_path / "faulty.html"
    page.write_text(
        "<meta name=viewport content='width=device-width'>"
        "<p style='width: 500px'>wide</p><p style='width: 50px; overflow: hidden; white-space: nowrap'>long, long</p>"
        "<p style='color: #999'>faint</p><svg width=50 height=20><text x=40 y=15>outside</text></svg><img src=none.png>"
        "<div class=figure><svg width=90 height=50><text x=5 y=15>one</text><text x=15 y=18>two</text>"
        "<text x=5 y=40>three</text></svg></div>"
    )
    browser.get(page.as_uri())
    found = "\n".join(browser.execute_script(FAULTS))
    for fault in ("document is", "sticks out: P.: wide", "cut off: P.: long, long", "outside its figure: outside"):
        assert fault in found
    assert browser.execute_script(OVERLAPS) == ["labels overlap: one | two"]
    assert [line[5:] for line in browser.execute_script(FAINT)] == ["P.: faint"]
    assert any("none.png" in entry["message"] for entry in browser.get_log("browser"))
    told = "\n".join(barriers(browser))
    for fault in ("critical image-alt: img", "serious color-contrast: p", "serious html-has-lang: html"):
        assert fault in told


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_every_page_fits_and_is_readable(browser: object, reports: Path, width: int, scheme: str) -> None:
    look(browser, width, scheme)
    faults = {}
    for page in sorted(reports.glob("*.html")):
        assert page.stat().st_size < 2_000_000, page.name
        browser.get(page.as_uri())
        browser.execute_script("for (const box of document.querySelectorAll('details')) box.open = true")
        assert browser.execute_script("return document.title").endswith("steptime")
        assert browser.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
        found = [fault for check in (FAULTS, FAINT, OVERLAPS) for fault in browser.execute_script(check)]
        found += barriers(browser)
        found += [entry["message"] for entry in browser.get_log("browser")]
        if found:
            faults[page.name] = found
    assert faults == {}


def test_every_local_link_leads_somewhere(browser: object, reports: Path) -> None:
    look(browser, 1440, "light")
    seen, missing = set(), []
    for page in sorted(reports.glob("*.html")):
        browser.get(page.as_uri())
        links = "return [...document.querySelectorAll('a[href]')].map((a) => a.href)"
        for link in browser.execute_script(links):
            if link.startswith("file:"):
                target = Path(link.removeprefix("file://").partition("#")[0])
                seen.add(target)
                if not target.is_file() or reports not in target.parents:
                    missing.append((page.name, link))
        anchors = (
            "return [...document.querySelectorAll('a[href^=\"#\"]')].filter((a) => !document.querySelector(a.hash))"
        )
        assert browser.execute_script(f"{anchors}.map((a) => a.hash)") == []
    assert missing == []
    assert set(reports.glob("*.html")) <= seen


def test_a_reader_walks_through_all_pages_with_next(browser: object, reports: Path) -> None:
    look(browser, 390, "light")
    browser.get((reports / "index.html").as_uri())
    walked = []
    while True:
        walked.append(browser.current_url.rpartition("/")[2])
        following = browser.find_elements("css selector", "a[rel=next]")
        if not following or len(walked) > 100:
            break
        browser.execute_script("arguments[0].click()", following[0])
    assert sorted(walked) == sorted(page.name for page in reports.glob("*.html"))


def test_the_menu_of_a_narrow_screen_opens_and_leads_on(browser: object, planted: Path) -> None:
    look(browser, 390, "light")
    browser.get((planted / "index.html").as_uri())
    link = browser.find_element("css selector", ".menu a[href='claims.html']")
    assert not link.is_displayed()
    browser.find_element("css selector", ".menu > summary").click()
    assert link.is_displayed()
    link.click()
    assert browser.current_url.endswith("claims.html")


LOADED = "return [...document.scripts].filter((script) => script.src).map((script) => script.src.split('/').pop())"


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_a_search_by_keyboard_leads_to_the_heading(browser: object, planted: Path, width: int, scheme: str) -> None:
    look(browser, width, scheme)
    browser.get((planted / "claims.html").as_uri())
    assert browser.execute_script(LOADED) == []
    field = browser.find_element("css selector", "#search input")
    field.send_keys("Exit STATUSES")
    links = _places(browser)
    assert browser.execute_script(LOADED) == ["search-index.js"]
    assert links[0].get_attribute("href").endswith("about.html#statuses")
    assert links[0].find_element("tag name", "mark").text.lower() == "exit"
    found = [fault for check in (FAULTS, FAINT) for fault in browser.execute_script(check)]
    assert found + barriers(browser) + browser.get_log("browser") == []
    field.send_keys(Keys.ARROW_DOWN)
    assert browser.switch_to.active_element == links[0]
    links[0].send_keys(Keys.ESCAPE)
    assert browser.switch_to.active_element == field
    assert not browser.find_element("id", "search-results").is_displayed()
    field.send_keys(" ", Keys.BACKSPACE)
    _places(browser)[0].send_keys(Keys.ENTER)
    assert browser.current_url.endswith("about.html#statuses")


def test_a_search_finds_every_page_claims_and_says_what_it_does_not_find(browser: object, planted: Path) -> None:
    look(browser, 1440, "light")
    for page in sorted(planted.glob("*.html")):
        browser.get((planted / "index.html").as_uri())
        browser.get(page.as_uri())
        title = browser.find_element("tag name", "h1").text
        browser.find_element("css selector", "#search input").send_keys(title)
        assert page.name in [link.get_attribute("href").rpartition("/")[2] for link in _places(browser)]
    field = browser.find_element("css selector", "#search input")
    field.clear()
    field.send_keys("merging claim 4)")
    claim = _places(browser)[0]
    assert "claims.html#planted-" in claim.get_attribute("href")
    claim.click()
    assert browser.execute_script("return document.querySelector(location.hash).textContent").count("planted claim 4")
    field = browser.find_element("css selector", "#search input")
    field.send_keys("<img src=x> nowhere")
    said = browser.find_element("id", "search-said")
    WebDriverWait(browser, 10).until(lambda _: said.text == "No places")
    assert not browser.find_element("id", "search-results").is_displayed()


def test_a_page_without_its_index_says_so(browser: object, planted: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(planted / "about.html", tmp_path))
    browser.get(alone.as_uri())
    browser.find_element("css selector", "#search input").send_keys("exit")
    said = browser.find_element("id", "search-said")
    WebDriverWait(browser, 10).until(lambda _: said.text == "search-index.js is missing beside this page")


def test_the_ledger_sorts_by_number_and_back(browser: object, planted: Path) -> None:
    look(browser, 1440, "light")
    browser.get((planted / "claims.html").as_uri())
    ours = [claim["ours"] for claim in claims() if claim["ours"] is not None]
    button = browser.find_element("xpath", "//th/button[text()='Ours']")
    button.click()
    assert _column(browser, "Ours") == [*map(str, sorted(ours)), ""]
    assert button.find_element("xpath", "..").get_attribute("aria-sort") == "ascending"
    button.click()
    assert [value for value in _column(browser, "Ours") if value] == [*map(str, sorted(ours, reverse=True))]
    assert button.find_element("xpath", "..").get_attribute("aria-sort") == "descending"


def test_the_ledger_filters_by_verdict_kind_and_words(browser: object, planted: Path) -> None:
    look(browser, 1440, "light")
    browser.get((planted / "claims.html").as_uri())
    form = browser.find_element("id", "filter")

    def choose(name: str, value: str) -> None:
        script = "arguments[0].elements[arguments[1]].value = arguments[2];"
        browser.execute_script(f"{script} arguments[0].dispatchEvent(new Event('input'))", form, name, value)

    for name in ("verdict", "kind", "paper"):
        for value in sorted({claim[name] for claim in claims()}):
            choose(name, value)
            expected = [claim["claim"] for claim in claims() if claim[name] == value]
            assert _shown(browser) == expected
            assert form.find_element("tag name", "output").text == f"{len(expected)} of {len(claims())} claims"
        choose(name, "")
    form.find_element("name", "words").send_keys("MERGING claim 4)")
    assert _shown(browser) == ["Gain of merging (planted claim 4)"]
    form.find_element("name", "words").clear()
    form.find_element("name", "words").send_keys("nothing like it")
    assert _shown(browser) == []


def test_the_pages_are_whole_without_scripts(browser: object, planted: Path) -> None:
    look(browser, 1440, "light")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get((planted / "claims.html").as_uri())
        rows = browser.find_elements("css selector", "#ledger tbody tr")
        assert [row.is_displayed() for row in rows] == [True] * len(claims())
        assert not browser.find_element("id", "filter").is_displayed()
        assert not browser.find_elements("css selector", "th button")
        assert not browser.find_element("id", "search").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def _places(browser: object) -> list[object]:
    """Links of the places that the search found, once there are some."""
    return WebDriverWait(browser, 10).until(
        lambda _: browser.find_elements("css selector", "#search-results:not([hidden]) a")
    )


def _column(browser: object, label: str) -> list[str]:
    cells = browser.find_elements("css selector", f"#ledger td[data-label='{label}']")
    return [cell.get_attribute("data-value") for cell in cells]


def _shown(browser: object) -> list[str]:
    script = """
    return [...document.querySelectorAll("#ledger tbody tr")].filter((row) => row.offsetHeight)
      .map((row) => row.querySelector("[data-label=Claim] > div").firstChild.data.trim())
    """
    return browser.execute_script(script)
