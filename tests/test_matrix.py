"""The compatibility matrix: each row is checked as `tests/matrix/checks.py` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix import features, transformers, unets
from tests.matrix.checks import check_absent, check_row
from tests.matrix.rows import Absent, Row

ROWS = [*unets.ROWS, *features.ROWS, *transformers.ROWS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(row: Row, tmp_path: Path) -> None:
    check_row(row, tmp_path)


@pytest.mark.parametrize("row", features.ABSENT, ids=lambda row: row.name)
def test_absent(row: Absent) -> None:
    check_absent(row)
