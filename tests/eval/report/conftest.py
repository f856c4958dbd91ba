"""Fixtures of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from mame_sd.eval.report import render
from tests.builders.report_example import Results, example, parsed


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return example(tmp_path)


@pytest.fixture
def unplotted(results: Results) -> Results:
    """Return the example without what plots show, because plots take most of a report's time."""
    for entry in results["rows"]:
        entry["values"].pop("speedup", None)
    return results


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the example's report, which no test changes."""
    folder = tmp_path_factory.mktemp("report")
    render(parsed(example(folder)), folder)
    return folder


@pytest.fixture(scope="session")
def page(written: Path) -> str:
    return (written / "report.html").read_text(encoding="utf-8")
