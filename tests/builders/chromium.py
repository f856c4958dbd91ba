"""A real Chromium for tests of pages, by playwright.

Tests skip where none can be had: Debian's `chromium`, Google's Chrome, or the one of `playwright
install chromium`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser; skips the test that asks for it where there is none."""
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
