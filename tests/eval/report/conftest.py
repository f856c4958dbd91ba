"""Fixtures of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from mame_sd.eval.report import render
from tests.builders.report_example import example
from tests.builders.report_page import Results


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return example(tmp_path)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    return render(example(folder), folder).read_text(encoding="utf-8")
