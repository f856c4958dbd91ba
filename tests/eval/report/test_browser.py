"""The report in a real Chromium: it fetches nothing, and enlarges pictures.

Skipped if no Chromium can be had: Debian's `chromium`, Google's Chrome, or the one of `playwright
install chromium`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="pip install mame-sd[dev] brings playwright"
    )
    with sync_api.sync_playwright() as driver:
        path = next(filter(None, map(shutil.which, NAMES)), None) or driver.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("no Chromium: install your system's, such as `apt-get install chromium`")
        sandbox = hasattr(os, "geteuid") and os.geteuid() != 0  # Chromium has none for root
        running = driver.chromium.launch(executable_path=path, chromium_sandbox=sandbox)
        yield running
        running.close()


@pytest.fixture
def opened(browser: Any, written: Path) -> Iterator[Any]:
    """Open the page on a screen; it must not complain, nor request an address outside itself."""
    trouble: list[str] = []
    report = (written / "report.html").as_uri()

    def open_page(scheme: str = "light") -> Any:
        page = browser.new_page(color_scheme=scheme)
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: (trouble.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: trouble.append(request.url))
        page.goto(report, timeout=180_000)  # milliseconds, for a busy machine
        return page

    yield open_page
    assert [said for said in trouble if said != report and not said.startswith("data:")] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_of_the_ground_in_either_scheme(opened: Any, scheme: str) -> None:
    colors = opened(scheme).evaluate(
        "[getComputedStyle(document.body).backgroundColor,"
        " getComputedStyle(document.querySelector('.plot svg text')).fill]"
    )
    ground, ink = (sum(int(part) for part in color[4:-1].split(",")) for color in colors)
    assert ground > 600 > 400 > ink if scheme == "light" else ground < 150 < 300 < ink


def test_pictures_enlarge_by_mouse_and_by_keyboard_and_swap_in_place(opened: Any) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    page = opened()
    shots = page.locator(".case").first.locator(".shot")
    dialog, image = page.locator("dialog"), page.locator("dialog img")
    small = shots.first.bounding_box()["width"]
    shots.first.click()
    assert dialog.is_visible()
    assert image.bounding_box()["width"] > 2 * small
    sources = [shot.locator("img").get_attribute("src") for shot in shots.all()]
    place, seen = image.bounding_box(), [image.get_attribute("src")]
    for _ in range(5):
        page.keyboard.press("ArrowRight")
        seen.append(image.get_attribute("src"))
        assert image.bounding_box() == place
    assert seen == [*sources, sources[0]]
    page.keyboard.press("ArrowLeft")
    assert image.get_attribute("src") == sources[-1]
    assert image.get_attribute("alt").startswith("Difference of MaMe (default) from the baseline: ")
    page.locator("dialog .close").click()
    assert not dialog.is_visible()
    # A browser announces after a while that a dialog has closed. Only then does the focus return.
    sync_api.expect(shots.nth(len(sources) - 1)).to_be_focused()
    shots.nth(1).focus()
    page.keyboard.press("Enter")
    assert dialog.is_visible()
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    sync_api.expect(shots.nth(1)).to_be_focused()
