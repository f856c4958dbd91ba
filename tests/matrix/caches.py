"""Caches and merging on one model, switched on and off in either order, over several steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mame_sd import MaMeHandle, apply_mame, remove_mame
from mame_sd.core.cells import DRAWS
from mame_sd.core.guidance import partition_index
from mame_sd.diffusion.denoisers import denoiser_of
from tests.builders.caches import (
    FIRST,
    PYRAMID,
    SEA,
    TEXT_KEYS,
    Cache,
    DeepCache,
    faster,
    magnitude,
    one_run,
    taylorseer,
)
from tests.builders.pipelines import once
from tests.builders.tiny import tiny_pipeline
from tests.matrix import transformers
from tests.matrix.models.registry import MODELS as TINY
from tests.matrix.models.watch import latest_plans
from tests.matrix.rows import Row
from tests.matrix.unets import LEVELS

TIMES = (900.0, 600.0, 500.0, 200.0)
STEPS = len(TIMES)
FIELDS: dict[str, Any] = {"keep": 0.5, "min_tokens": 60}


@dataclass(frozen=True)
class Pair:
    """One cache on one model.

    Attributes:
        model: a row whose `run` is a run of STEPS steps; all that it makes.
        steps: how many layers that merge compute in how many of the run's steps; the cache answers
            in the others.
        exact: the cache changes nothing but rounding.
    """

    model: Row
    cache: Cache | DeepCache
    steps: Mapping[int, int]
    exact: bool = False

    @property
    def name(self) -> str:
        return f"{self.model.name}: {self.cache.name}"


def sampled(inputs: Mapping[str, Any], model: Any, places: bool = False) -> Tensor:
    """Return the outputs [STEPS, ...] of one input that fades, with `places` for SeaCache."""
    outputs = []
    latents, when = ("x", "t") if "x" in inputs else ("hidden_states", "timestep")
    given, images = inputs[when], inputs[latents]
    unit = given.is_floating_point() and float(given.max()) <= 1
    with one_run(model):
        for i, time in enumerate(TIMES):
            timestep = torch.full_like(given, time / 1000 if unit else int(time))
            share = 1 - i / 10
            faded = [one * share for one in images] if isinstance(images, list) else images * share
            place = {"step_index": i, "sigma": time / 1000, "num_inference_steps": STEPS}
            with model.cache_context("run", **place) if places else nullcontext():
                outputs.append(transformers.run({**inputs, latents: faded, when: timestep}, model))
    return torch.stack(outputs)


def images(pipe: Any) -> Tensor:
    with one_run(pipe):
        return once(pipe, num_inference_steps=STEPS)


def transformer(name: str, model: str, layers: int, since: str = "0") -> Row:
    """Make a row of runs of a model of the registry, in which so many layers merge."""
    case = TINY[model]
    return Row(name, case.build, partial(sampled, case.inputs()), {0: layers}, since=since)


NEWEST = transformers.NEWEST
UNET = Row("Stable Diffusion", tiny_pipeline, images, LEVELS)
MODELS = [
    UNET,
    transformer("PixArt", "PixArtTransformer2DModel", 2),
    transformer("Stable Diffusion 3", "SD3Transformer2DModel", 2),
    transformer("AuraFlow", "AuraFlowTransformer2DModel", 2),
    transformer("Wan (video)", "WanTransformer3DModel", 2),
    transformer("CogVideoX", "CogVideoXTransformer3DModel", 2),
    transformer("Flux", "FluxTransformer2DModel", 4),
    transformer("Qwen-Image", "QwenImageTransformer2DModel", 2),
    transformer("Flux 2", "Flux2Transformer2DModel", 2, NEWEST),
    transformer("Z-Image", "ZImageTransformer2DModel", 3, NEWEST),
    transformer("HunyuanVideo 1.5", "HunyuanVideo15Transformer3DModel", 1, NEWEST),
]
# Pairs in which the cache fails or caches nothing without any of our code.
FAILING = {
    "FasterCache": {UNET.name, "Z-Image"},
    "FirstBlockCache": {
        *(UNET.name, "Stable Diffusion 3", "AuraFlow", "Flux 2", "Z-Image"),
        "HunyuanVideo 1.5",
    },
    "MagCache": {UNET.name, "AuraFlow", "Z-Image", "HunyuanVideo 1.5"},
}
SPECIAL: dict[tuple[str, str], Mapping[int, int]] = {
    (UNET.name, "PyramidAttentionBroadcast"): {3: 7},
    # FasterCache does not look for the name of AuraFlow's joint blocks.
    ("AuraFlow", "FasterCache"): {4: 1, 2: 1},
    ("Z-Image", "PyramidAttentionBroadcast"): {4: 1, 2: 2},
}


def every_pair() -> Iterator[Pair]:
    yield Pair(UNET, DeepCache(), {2: 6, 4: 1})
    halving, distilled, mag = faster(), faster(distilled=True), magnitude(STEPS)
    for model in MODELS:
        n = sum(model.merges.values())
        # FasterCache halves a guided batch; distilled models take none.
        halves = distilled if model.name in ("Flux", "Qwen-Image", "Flux 2") else halving
        # diffusers' own choice of layers misses attn1
        taylor = taylorseer(r".*\.attention" if model.name == "Z-Image" else r".*\.attn[12]?")
        first = {STEPS: 1, 1: n - 1}
        usual = {PYRAMID: {2: n}, halves: {2: n}, FIRST: first, mag: {2: n}, taylor: {3: n}}
        for cache, steps in usual.items():
            if model.name not in FAILING.get(cache.name, ()):
                yield Pair(model, cache, SPECIAL.get((model.name, cache.name), steps))


def own_pairs() -> Iterator[Pair]:
    """Yield caches of diffusers that work on one or two models of their own."""
    case = TINY["WanTransformer3DModel"]
    run = partial(sampled, case.inputs(), places=True)
    yield Pair(Row("Wan", case.build, run, {288: 2}, since=NEWEST), SEA, {2: 2})
    nucleus = transformer("NucleusMoE", "NucleusMoEImageTransformer2DModel", 2, NEWEST)
    yield Pair(nucleus, TEXT_KEYS, {STEPS: 2}, exact=True)


PAIRS = [*every_pair(), *own_pairs()]


def check_pair(pair: Pair) -> None:
    """Check that cache and merging give one result in either order, and go without a trace."""
    model, cache = pair.model, pair.cache
    first, second = model.build(), model.build()
    plain = model.run(first)
    cache.enable(first)
    alone = model.run(first)
    if pair.exact:
        torch.testing.assert_close(alone, plain)
    else:
        assert not torch.equal(alone, plain), "nothing was cached"
    both = _merged_run(pair, first)
    assert not torch.equal(both, alone)
    assert torch.equal(model.run(first), both), "cache first: a second run differs"

    handle = apply_mame(second, **FIELDS)
    merged = model.run(second)
    if pair.exact:
        torch.testing.assert_close(both, merged)
    assert {layer.calls for layer in handle.report().layers} == {STEPS}
    cache.enable(second)
    handle.reset()
    assert torch.equal(model.run(second), both), "merging first: not what the cache first gives"
    _check_steps(pair, handle)

    cache.disable(first)
    assert torch.equal(model.run(first), merged), "the cache came first and went first"
    remove_mame(second)
    assert torch.equal(model.run(second), alone), "merging came first and went first"
    remove_mame(first)
    cache.disable(second)
    assert torch.equal(model.run(first), plain)
    assert torch.equal(model.run(second), plain)


def _merged_run(pair: Pair, subject: Any) -> Tensor:
    """Return what a cached model makes merged, and check the report and the draws of its steps."""
    handle = apply_mame(subject, **FIELDS)
    with _drawn(handle, subject) as draws:
        made = pair.model.run(subject)
    assert len({tuple(draw.tolist()) for draw in draws}) > 1, (
        "all steps took one draw: choose other timesteps"
    )
    _check_steps(pair, handle)
    return made


def _check_steps(pair: Pair, handle: MaMeHandle) -> None:
    """Check that each layer was counted in the steps in which it ran, with half of its tokens."""
    report = handle.report()
    layers = [layer for layer in report.layers if layer.merged]
    assert Counter(layer.calls for layer in layers) == Counter(pair.steps), str(report)
    for layer in layers:
        assert layer.tokens_kept == pytest.approx(layer.tokens_in / 2, abs=0.5), str(report)
        assert not layer.reason, str(report)


@contextmanager
def _drawn(handle: MaMeHandle, subject: Any) -> Iterator[list[Tensor]]:
    """Check after every step that the layers that computed took its draw; yield the draws."""
    counts: dict[str, int] = {}
    draws: list[Tensor] = []

    def after(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        named = next((name for name in ("timestep", "t") if name in kwargs), None)
        draws.append(partition_index(args[1] if named is None else kwargs[named]))
        for number, layer in enumerate(handle.report().layers):
            if layer.calls > counts.get(layer.name, 0):
                counts[layer.name] = layer.calls
                groups = plans[layer.name]
                draw = (draws[-1] + number) % DRAWS
                assert torch.equal(groups.dst, groups.cells.dst[int(draw)]), (
                    f"{layer.name}: not the draw of step {len(draws)}"
                )

    hook = denoiser_of(subject).register_forward_hook(after, with_kwargs=True)
    try:
        with latest_plans() as plans:
            yield draws
    finally:
        hook.remove()


def table() -> list[str]:
    """Return the table of the pairs as lines of Markdown."""
    works = {(pair.model.name, pair.cache.name) for pair in PAIRS}
    columns = dict.fromkeys(pair.cache.name for pair in every_pair())
    lines = [f"| model | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for model in MODELS:
        row = ["yes" if (model.name, name) in works else "no" for name in columns]
        lines.append(f"| {model.name} | {' | '.join(row)} |")
    return lines
