"""TensorBoard's page over a real run: a real server, seen by a real browser."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("tensorboard")
webdriver = pytest.importorskip("selenium.webdriver")
Image = pytest.importorskip("PIL.Image")

CHROMEDRIVER = Path("/usr/bin/chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --window-size=1400,1000 "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage"
)
# Charts are inside shadow roots; this finds elements through all of them.
FIND_ALL = """
const found = [];
(function search(root) {
  root.querySelectorAll('*').forEach(element => {
    if (element.matches(arguments_selector)) found.push(element);
    if (element.shadowRoot) search(element.shadowRoot);
  });
})(document);
return found.map(element => element.textContent.trim() || element.outerHTML);
"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not CHROMEDRIVER.exists() and "CI" not in os.environ,
        reason="needs Debian's chromium-driver: bash tests/install_chromium",
    ),
]


@contextlib.contextmanager
def tensorboard(directory: Path):
    """Serve ``directory`` on a free loopback port; stop the server by its pid."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", f"--logdir={directory}", f"--port={port}",
         "--host=127.0.0.1", "--load_fast=false"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: b"perf/time/learn_s" in fetch(f"{address}/data/plugin/scalars/tags"))
        yield address
    finally:
        server.terminate()
        server.wait(10)


@contextlib.contextmanager
def browser(profile: Path):
    options = webdriver.ChromeOptions()
    for flag in [*FLAGS.split(), f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.binary_location = "/usr/bin/chromium"
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(CHROMEDRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


def fetch(address: str) -> bytes:
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5) as answer:
        return answer.read()
    return b""


def wait_for(condition, seconds: float = 60.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the page never showed it"
        time.sleep(0.2)
    return value


def find_all(driver, selector: str) -> list[str]:
    return driver.execute_script(FIND_ALL.replace("arguments_selector", repr(selector)))


def coloured_pixels(chart) -> int:
    """Count the pixels of the curve: it has the run's blue, all else in a chart is grey."""
    with Image.open(io.BytesIO(chart.screenshot_as_png)) as image:
        return sum(count for count, (red, _, blue) in image.convert("RGB").getcolors(1 << 20)
                   if blue - red > 20)  # fmt: skip


def test_the_page_shows_a_curve_per_metric(fit, tmp_path):
    run = fit("tensorboard")
    with tensorboard(tmp_path / "run" / "tensorboard") as address, browser(tmp_path / "p") as page:
        page.get(f"{address}/?tagFilter=perf%2Ftime#timeseries")
        wait_for(lambda: "learn_s" in " ".join(find_all(page, "card-view")))
        cards = " ".join(find_all(page, "card-view"))
        times = [name for name in run.episodes[0].metrics if name.startswith("perf/time/")]
        assert len(times) == 5
        assert all(name in cards for name in times)
        for chart in page.find_elements("css selector", "line-chart .series-view")[:2]:
            wait_for(lambda chart=chart: coloured_pixels(chart) > 100)
        if screenshot := os.environ.get("COATI_PERF_SCREENSHOT"):
            page.save_screenshot(screenshot)


def test_the_page_shows_the_config(fit, tmp_path):
    fit("tensorboard")
    with tensorboard(tmp_path / "run" / "tensorboard") as address, browser(tmp_path / "p") as page:
        page.get(f"{address}/#hparams")
        wait_for(lambda: "nested.layers.0" in find_all(page, "paper-checkbox"))
