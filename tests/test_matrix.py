"""The compatibility matrix: each row is checked as `tests/matrix/checks.py` says."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import diffusers
import pytest
from diffusers import hooks
from diffusers.models.cache_utils import CacheMixin
from packaging.version import Version

from tests.matrix import (
    backends,
    caches,
    features,
    newest,
    tools,
    transformers,
    two_denoisers,
    unets,
)
from tests.matrix.checks import check_absent, check_row
from tests.matrix.rows import Absent, Check, Row
from tests.matrix.table import page

ROWS = [*unets.ROWS, *features.ROWS, *transformers.ROWS, *newest.ROWS]


def marked(row: Row | Check, since: str = "0") -> Any:
    since = row.since if isinstance(row, Row) else since
    old = Version(diffusers.__version__) < Version(since)
    skip = pytest.mark.skipif(old, reason=f"needs diffusers {since}: {row.note}")
    return pytest.param(row, id=row.name, marks=skip)


@pytest.mark.parametrize("row", map(marked, ROWS))
def test_row(row: Row, tmp_path: Path) -> None:
    check_row(row, tmp_path)


@pytest.mark.parametrize("row", features.ABSENT, ids=lambda row: row.name)
def test_absent(row: Absent) -> None:
    check_absent(row)


@pytest.mark.parametrize(
    "row",
    [
        *map(marked, tools.CHECKS),
        *(marked(row, newest.SINCE) for row in newest.CHECKS),
        *map(marked, two_denoisers.CHECKS),
    ],
)
def test_check(row: Check) -> None:
    row.check()


def paired(pair: caches.Pair | caches.Alone) -> Any:
    old = pair.model in newest.MODELS and Version(diffusers.__version__) < Version(newest.SINCE)
    skip = pytest.mark.skipif(old, reason=f"needs diffusers {newest.SINCE}")
    return pytest.param(pair, id=pair.name, marks=skip)


@pytest.mark.parametrize("pair", map(paired, [*caches.PAIRS, *newest.PAIRS]))
def test_cache(pair: caches.Pair) -> None:
    caches.check_pair(pair)


@pytest.mark.parametrize("pair", map(paired, [*caches.ALONE, *newest.ALONE]))
def test_cache_that_does_not_work_alone(pair: caches.Alone) -> None:
    caches.check_alone(pair)


@pytest.mark.skipif(
    Version(diffusers.__version__) < Version(newest.SINCE),
    reason="the page lists the classes of the newest diffusers",
)
def test_the_page_is_current() -> None:
    committed = (Path(__file__).parents[1] / "docs" / "compatibility.md").read_text(
        encoding="utf-8"
    )
    assert committed == page(), "run: python -m tests.matrix > docs/compatibility.md"


@pytest.mark.parametrize("pair", backends.PAIRS, ids=lambda pair: pair.name)
def test_backend(pair: backends.Pair) -> None:
    backends.check(pair)


def test_every_cache_of_diffusers_is_tried() -> None:
    tried = {pair.cache.name for pair in (*caches.PAIRS, *newest.PAIRS)}
    own = inspect.getsource(CacheMixin.disable_cache)
    configs = {name for name in dir(hooks) if name.endswith("Config") and name in own}
    assert len(configs) >= 5
    assert {name for name in configs if not any(map(name.startswith, tried))} == set()


def test_names_are_told_apart() -> None:
    names = [row.name for row in (*ROWS, *features.ABSENT, *tools.CHECKS, *newest.CHECKS)]
    assert len(set(names)) == len(names)
