"""The compatibility matrix: each row is checked as `tests/matrix/checks.py` says."""

from __future__ import annotations

import inspect
from pathlib import Path

import diffusers
import pytest
from diffusers import hooks
from diffusers.models.cache_utils import CacheMixin
from packaging.version import Version

from tests.matrix import caches, features, transformers, unets
from tests.matrix.checks import check_row
from tests.matrix.rows import Check, Row, param
from tests.matrix.table import PAGE, page
from tests.matrix.tools import CHECKS

ROWS = [*unets.ROWS, *features.ROWS, *transformers.ROWS]
# The pairs of a cache and a model that `make test` tries: each cache once.
CACHED = {
    "Stable Diffusion: DeepCache",
    "Stable Diffusion: PyramidAttentionBroadcast",
    "Wan (video): FasterCache",
    "Flux: FasterCache",
    "Flux: FirstBlockCache",
    "Flux: MagCache",
    "Flux: TaylorSeer",
    "Z-Image: PyramidAttentionBroadcast",
    "Wan: SeaCache",
    "NucleusMoE: TextKVCache",
}


@pytest.mark.parametrize("row", [param(row, row.sweep, row.since) for row in ROWS])
def test_row(row: Row, tmp_path: Path) -> None:
    check_row(row, tmp_path)


@pytest.mark.parametrize("row", [param(row, row.sweep) for row in CHECKS])
def test_check(row: Check) -> None:
    row.check()


@pytest.mark.parametrize(
    "pair",
    [param(pair, pair.name not in CACHED, pair.model.since) for pair in caches.PAIRS],
)
def test_cache(pair: caches.Pair) -> None:
    caches.check_pair(pair)


@pytest.mark.parametrize("pair", [param(pair, True, pair.model.since) for pair in caches.ALONE])
def test_cache_that_does_not_work_alone(pair: caches.Pair) -> None:
    caches.check_alone(pair)


@pytest.mark.skipif(
    Version(diffusers.__version__) < Version(transformers.NEWEST),
    reason="the page lists the classes of the newest diffusers",
)
def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.matrix"


def test_every_cache_of_diffusers_is_tried() -> None:
    tried = {pair.cache.name for pair in caches.PAIRS}
    own = inspect.getsource(CacheMixin.disable_cache)
    configs = {name for name in dir(hooks) if name.endswith("Config") and name in own}
    assert len(configs) >= 5
    assert {name for name in configs if not any(map(name.startswith, tried))} == set()
    assert {pair.name for pair in caches.PAIRS} >= CACHED
