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
    tools,
    transformers,
    two_denoisers,
    unets,
)
from tests.matrix.checks import check_absent, check_row
from tests.matrix.models.registry import MODELS
from tests.matrix.rows import Absent, Check, Row, in_sweep
from tests.matrix.table import page

ROWS = [*unets.ROWS, *features.ROWS, *transformers.ROWS]
CHECKS = [*tools.CHECKS, *two_denoisers.CHECKS]
# What `make test` leaves to `python -m tests.matrix --sweep`: rows that take the way of another.
LEFT_OUT = {
    "image to image",
    "LoRA: fuse, then unfuse",
    "xformers off",
    "Turbo: one step, no guidance",
    "group offload",
    "model offload",
    "quanto int8",
    "torch.compile, regional, fullgraph",
    "LoRA on Z-Image",
    "LoRA on Wan 2.2",
    "FirstBlockCache on Wan 2.2",
    "torch.compile of Wan 2.2, fullgraph",
}
# test_models.py merges all transformers; those that are rows here too are run once of a kind.
KINDS = ("PixArt", "Stable Diffusion 3", "Flux", "Flux Kontext, `references=0.5`")
KINDS += ("Wan (video)", "Sana", "Z-Image")
LEFT_OUT |= {row.name for row in transformers.ROWS} - set(KINDS)
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


def marked(row: Any, alone: bool, since: str) -> Any:
    """The test's parameter, skipped where diffusers is older than `since`."""
    old = Version(diffusers.__version__) < Version(since)
    skip = pytest.mark.skipif(old, reason=f"needs diffusers {since}")
    param = in_sweep(row, alone)
    compiles = [pytest.mark.compiles] if row.name.startswith("torch.compile") else []
    return pytest.param(row, id=param.id, marks=[*param.marks, *compiles, skip])


def of_pair(pair: Any) -> Any:
    """A pair of a cache and a model, of which `make test` tries each cache once."""
    new = pair.model.name in caches.NEWEST or pair.name.endswith(("SeaCache", "TextKVCache"))
    since = transformers.NEWEST if new else "0"
    return marked(pair, pair.name not in CACHED, since)


@pytest.mark.parametrize("row", [marked(row, row.name in LEFT_OUT, row.since) for row in ROWS])
def test_row(row: Row, tmp_path: Path) -> None:
    check_row(row, tmp_path)


@pytest.mark.parametrize("row", features.ABSENT, ids=lambda row: row.name)
def test_absent(row: Absent) -> None:
    check_absent(row)


@pytest.mark.parametrize("row", [marked(row, row.name in LEFT_OUT, row.since) for row in CHECKS])
def test_check(row: Check) -> None:
    row.check()


@pytest.mark.parametrize("pair", map(of_pair, caches.PAIRS))
def test_cache(pair: caches.Pair) -> None:
    caches.check_pair(pair)


@pytest.mark.parametrize("pair", map(of_pair, caches.ALONE))
def test_cache_that_does_not_work_alone(pair: caches.Pair) -> None:
    caches.check_alone(pair)


@pytest.mark.parametrize(
    "backend", [in_sweep(name, name != "sage") for name in ("sage", "flash", "xformers")]
)
def test_backend(backend: str) -> None:
    backends.check_orders(MODELS["FluxTransformer2DModel"], backend)


@pytest.mark.skipif(
    Version(diffusers.__version__) < Version(transformers.NEWEST),
    reason="the page lists the classes of the newest diffusers",
)
def test_the_page_is_current() -> None:
    committed = (Path(__file__).parents[1] / "docs" / "compatibility.md").read_text(
        encoding="utf-8"
    )
    assert committed == page(), "run: python -m tests.matrix > docs/compatibility.md"


def test_every_cache_of_diffusers_is_tried() -> None:
    tried = {pair.cache.name for pair in caches.PAIRS}
    own = inspect.getsource(CacheMixin.disable_cache)
    configs = {name for name in dir(hooks) if name.endswith("Config") and name in own}
    assert len(configs) >= 5
    assert {name for name in configs if not any(map(name.startswith, tried))} == set()


def test_names_are_told_apart_and_those_left_out_are_there() -> None:
    names = [row.name for row in (*ROWS, *features.ABSENT, *CHECKS)]
    assert len(set(names)) == len(names)
    assert set(names) >= LEFT_OUT
    assert {pair.name for pair in caches.PAIRS} >= CACHED
