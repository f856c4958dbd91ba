"""Photograph a report for the documentation: the top of the page in light, and the page on a phone
in dark.

    python -m benchmarks.report_pictures out/quick/report.html --out docs

Writes report-light.webp and report-phone.webp. Needs playwright and a Chromium (`apt-get install
chromium`).
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SHOTS = {  # name: width, height, scheme, pixels per CSS pixel
    "report-light.webp": (1280, 1480, "light", 1),
    "report-phone.webp": (360, 1480, "dark", 2),
}


def photograph(browser: Browser, report: Path, out: Path) -> None:
    """Write every one of `SHOTS`; the phone's starts at the plot."""
    for name, (width, height, scheme, scale) in SHOTS.items():
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
            device_scale_factor=scale,
        )
        page.goto(report.resolve().as_uri())
        if width < 600:
            page.locator("#frontier-title").evaluate("title => title.scrollIntoView()")
        Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(
            out / name, quality=90, method=6
        )
        page.close()
        print(out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="report.html")
    parser.add_argument(
        "--out", type=Path, default=Path("docs"), help="folder for the pictures (docs)"
    )
    args = parser.parse_args()
    if not args.report.is_file():
        sys.exit(
            f"error: {args.report}: expected a report.html, found none; run mame-sd-eval benchmark"
            " first"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        path = next(filter(None, map(shutil.which, NAMES)), None)
        root = hasattr(os, "geteuid") and os.geteuid() == 0  # Chromium has no sandbox for root
        browser = driver.chromium.launch(executable_path=path, chromium_sandbox=not root)
        photograph(browser, args.report, args.out)
        browser.close()


if __name__ == "__main__":
    main()
