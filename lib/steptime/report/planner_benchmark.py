"""How long the planner page takes to redraw after a change: `steptime benchmarks planner`."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from steptime.core.errors import InputError
from steptime.core.machine import read_link
from steptime.core.step import SCHEDULES, Schedule
from steptime.model.step import predict_step
from steptime.report.planner import LINK, Recorded, read_recorded, spread

GOAL_S = 0.050
WORKERS, CHANGES = 1024, 60
_SCHEDULES = (*SCHEDULES, "published_merge", "buckets")
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
_DRAG = """
const [key, changes, done] = arguments, slider = document.querySelector(`input[type=range][data-key=${key}]`);
const drawn = [], painted = [];
const nextFrame = () => new Promise((next) => {
  const {port1, port2} = new MessageChannel();
  port1.onmessage = next;
  requestAnimationFrame(() => port2.postMessage(0));
});
(async () => {
  for (let change = 0; change < changes; change++) {
    const start = performance.now();
    slider.value = 300 + (change * 37) % 400;
    slider.dispatchEvent(new Event("input", {bubbles: true}));
    document.body.getBoundingClientRect();
    drawn.push(performance.now() - start);
    await nextFrame();
    painted.push(performance.now() - start);
  }
  return {drawn, painted, headline: document.getElementById("headline").textContent};
})().then(done, (error) => done({error: String(error)}));
"""


def planner_speed(root: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Drag the latency on the built page at 1,024 workers under each schedule, and say what a change takes.

    `drawn`: computing, drawing and layout; `painted`: until the next frame is on the screen, which waits for it. Beside
    it one run of the Python model for the numbers of such a change. `met`: 95 of 100 changes painted within GOAL_S.
    Raises InputError where the page or the browser is missing.
    """
    page = root / "data" / "reports" / "planner.html"
    if not page.is_file():
        raise InputError(f"{page}: is missing; run `make study` (or `steptime site`) first")
    recorded = min(read_recorded(root / "data" / "derived" / "fit"), key=lambda item: item.order)
    say(f"planner: {recorded.profile.network}, {recorded.setting}, {WORKERS} workers, {CHANGES} changes of the latency")
    every: list[float] = []
    with _browser() as browser:
        browser.get(page.as_uri())
        for schedule in _SCHEDULES:
            address = f"profile={recorded.campaign}/{recorded.case_id}&workers={WORKERS}&schedule={schedule}"
            browser.execute_script("location.hash = arguments[0]", address)
            found = browser.execute_async_script(_DRAG, "alpha_us", CHANGES)
            if "error" in found or f"{WORKERS} workers" not in found["headline"]:
                raise InputError(
                    f"{page}: did not answer ({found.get('error', found.get('headline'))}); build it again"
                )
            drawn, painted = ([value / 1e3 for value in found[name]] for name in ("drawn", "painted"))
            every += painted
            python_s = _python_s(root, recorded, schedule)
            ratio = python_s / statistics.median(drawn)
            say(
                f"  {schedule:16} drawn {_ms(drawn)}, painted {_ms(painted)}; "
                f"Python {1e3 * python_s:.1f} ms for the same numbers, {ratio:.1f} times as long"
            )
    late = statistics.quantiles(every, n=20)[-1]
    met = late <= GOAL_S
    said = f"goal {1e3 * GOAL_S:.0f} ms: {'met' if met else 'MISSED'}"
    say(f"painted within {1e3 * late:.1f} ms in 95 of 100 changes; {said}")
    return {"p95_s": late, "met": met}


def _python_s(root: Path, recorded: Recorded, schedule: str) -> float:
    """Seconds that the Python model takes for the curves, the interval and the changes that a redraw shows."""
    link = read_link(root / "data" / "machines" / "links", LINK)
    counts = [2**power for power in range(WORKERS.bit_length())]
    own = Schedule(schedule)
    curves = {*SCHEDULES, schedule}
    bands = 0 if spread(recorded) is None else 2
    start = time.perf_counter()
    for name in [*curves, *[schedule] * bands]:
        for count in counts:
            predict_step(recorded.profile, Schedule(name), count, link)
    for _ in range(6 + bands):
        predict_step(recorded.profile, own, WORKERS, link)
    return time.perf_counter() - start


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ms (at most {1e3 * max(seconds):.1f})"


@contextmanager
def _browser():  # type: ignore[no-untyped-def]
    """A headless Chromium with a profile of its own."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        raise InputError("benchmarks planner: no Chromium here; sudo apt-get install -y chromium chromium-driver")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError as error:
        raise InputError("benchmarks planner: selenium is missing; run `make env`") from error
    with tempfile.TemporaryDirectory() as own:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*_FLAGS, f"--user-data-dir={own}", "--window-size=1440,900"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=Service(driver))
        browser.set_script_timeout(120)
        try:
            yield browser
        finally:
            browser.quit()
