"""The report in a real Chromium: it fits the screen, fetches nothing, and enlarges pictures.

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

from mame_sd.eval.report import render
from mame_sd.eval.results.read import parse
from tests.builders.report_example import PROMPTS, example, row

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
OUTSIDE = """() => [...document.querySelectorAll('body *')].filter((node) => {
  if (node.closest('.scroll, pre, dialog, svg, .sr')) return false;
  const box = node.getBoundingClientRect();
  return box.width && (box.right > document.documentElement.clientWidth + 1 || box.left < -1);
}).map((node) => node.tagName + '.' + node.className)"""


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


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    results = example(folder, prompts=(*PROMPTS, "a" * 300))
    row(results, "tomesd-50")["label"] = "ToMeSD with quite a long label, 50 %"
    results["manifest"]["digest"] = "0123456789abcdef" * 16
    return render(parse(results), folder).as_uri()


@pytest.fixture
def opened(browser: Any, report: str) -> Iterator[Any]:
    """Open the page on a screen; it must not complain, nor request an address outside itself."""
    trouble: list[str] = []

    def open_page(width: int = 1280, scheme: str = "light") -> Any:
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: (trouble.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: trouble.append(request.url))
        page.goto(report, timeout=180_000)  # milliseconds, for a busy machine
        return page

    yield open_page
    assert [said for said in trouble if said != report and not said.startswith("data:")] == []


@pytest.mark.parametrize("width", [390, 1280])
def test_names_in_the_plot_cover_neither_one_another_nor_its_axes(opened: Any, width: int) -> None:
    boxes = opened(width).evaluate(
        """() => [...document.querySelectorAll('#frontier svg text')]
          .filter((node) => node.getClientRects().length)
          .map((node) => [node.textContent, node.getBoundingClientRect().toJSON()])"""
    )
    assert len(boxes) > 8
    for number, (one, a) in enumerate(boxes):
        assert a["left"] >= 0, one
        assert a["right"] <= width, one
        for other, b in boxes[:number]:
            apart = (a["right"] <= b["left"] + 1 or b["right"] <= a["left"] + 1) or (
                a["bottom"] <= b["top"] + 3 or b["bottom"] <= a["top"] + 3
            )
            assert apart, f"{one} covers {other}"


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_nothing_overflows_and_colors_follow_the_scheme(
    opened: Any, width: int, scheme: str
) -> None:
    page = opened(width, scheme)
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate(OVERFLOW) == 0
    assert page.evaluate(OUTSIDE) == []
    boxes = page.locator(".scroll").evaluate_all(
        "nodes => nodes.map(n => [n.scrollWidth, n.clientWidth])"
    )
    # wide tables scroll in their own box
    assert all(inner > outer for inner, outer in boxes) or width > 360
    plots = page.locator(".plot svg:visible")
    assert plots.count() == 1
    assert plots.first.bounding_box()["width"] <= width
    colors = page.evaluate(
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
    page.locator("dialog .previous").click()
    assert dialog.locator(".label").inner_text().startswith("Difference of ToMeSD")
    page.locator("dialog .close").click()
    assert not dialog.is_visible()
    # A browser announces after a while that a dialog has closed. Only then does the focus return.
    sync_api.expect(shots.nth(len(sources) - 2)).to_be_focused()
    shots.nth(1).focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.closest('dialog') !== null")
    once = image.bounding_box()["width"]
    page.keyboard.press("z")
    assert image.bounding_box()["width"] == pytest.approx(2 * once, rel=0.01)
    assert page.locator("dialog .twice").get_attribute("aria-pressed") == "true"
    for _ in range(6):  # Tab never leaves the open dialog for the page behind it
        page.keyboard.press("Tab")
        assert page.evaluate(
            "document.activeElement === document.body || document.activeElement.closest('dialog')"
            " !== null"
        )
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    sync_api.expect(shots.nth(1)).to_be_focused()
