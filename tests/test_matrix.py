"""The compatibility matrix: each row is checked as `tests/matrix/rows.py` says."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tomesd
import torch
from diffusers import hooks
from diffusers.models.cache_utils import CacheMixin
from packaging.version import Version

from mame_sd import apply_mame, remove_mame
from tests.builders.pipelines import once
from tests.builders.tiny import tiny_pipeline
from tests.builders.transformers import H, W, normal, run
from tests.matrix import caches, features, transformers, unets
from tests.matrix.models.case import BLC, case
from tests.matrix.rows import Row, check_row, param
from tests.matrix.table import PAGE, page

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


@pytest.mark.parametrize(
    "pair",
    [param(pair, pair.name not in CACHED, pair.model.since) for pair in caches.PAIRS],
)
def test_cache(pair: caches.Pair) -> None:
    caches.check_pair(pair)


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


FLUX = case("FluxTransformer2DModel", image=BLC, num_layers=1)  # one block of each kind


def flux_call(step: int, size: int) -> dict[str, Any]:
    inputs, tokens = FLUX.inputs(), (H * W, 5 * W)[size]
    changed = {
        "hidden_states": normal(2, tokens, 4, seed=step),
        "img_ids": inputs["img_ids"][:tokens],
    }
    return {**inputs, **changed, "timestep": torch.full((2,), step / 10)}


@pytest.mark.compiles
def test_one_graph_for_each_size() -> None:
    """It serves all later steps, guided pairs of the same latents too, also when a size returns."""
    torch.compiler.reset()
    model, steps = FLUX.build(), [flux_call(4, 0), flux_call(6, 1), flux_call(7, 0)]
    steps[2]["hidden_states"][:1] = steps[2]["hidden_states"][1:]
    handle = apply_mame(model, keep=0.5, min_tokens=60)
    expected = [run(step, model) for step in steps]
    handle.reset()
    model.compile(backend="eager", fullgraph=True)
    for size in range(2):
        run(flux_call(1, size), model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step, eager in zip(steps, expected, strict=True):
            torch.testing.assert_close(run(step, model), eager, rtol=1e-4, atol=1e-4)
    assert {(layer.calls, layer.merged) for layer in handle.report().layers} == {(5, True)}


@pytest.mark.parametrize("tomesd_first", [True, False])
def test_tomesd_on_the_same_pipe_is_one_error_that_says_which_to_remove(tomesd_first: bool) -> None:
    pipe = tiny_pipeline()
    before = once(pipe)
    steps = [partial(tomesd.apply_patch, ratio=0.5), partial(apply_mame, keep=0.5, min_tokens=60)]
    for step in steps if tomesd_first else reversed(steps):
        step(pipe)
    with pytest.raises(ValueError, match=r"tomesd\.remove_patch"):
        once(pipe)
    tomesd.remove_patch(pipe)
    assert not torch.equal(once(pipe), before)
    remove_mame(pipe)
    assert torch.equal(once(pipe), before)
