"""Caches and merging on one model: each pair in either order of switching on and off, over runs of
several steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from string import ascii_lowercase
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
            in the others. Or why the cache does not work on the model without any of our code.
        exact: the cache changes nothing but rounding.
    """

    model: Row
    cache: Cache | DeepCache
    steps: Mapping[int, int] | str
    exact: bool = False

    @property
    def name(self) -> str:
        return f"{self.model.name}: {self.cache.name}"


def sampled(inputs: Mapping[str, Any], model: Any, places: bool = False) -> Tensor:
    """The outputs of all steps [STEPS, ...], of one input that fades; with `places` each step tells
    its place, as SeaCache asks.
    """
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


def transformer(name: str) -> Row:
    row = next(row for row in transformers.ROWS if row.name == name)
    return replace(row, run=partial(sampled, row.inputs))


UNET = Row("Stable Diffusion", tiny_pipeline, images, LEVELS)
# FasterCache halves a guided batch of these; the others are distilled, and take no such batch.
HALVED = ("PixArt", "Stable Diffusion 3", "AuraFlow", "Wan (video)", "CogVideoX")
NEWEST = ("Flux 2", "Z-Image", "HunyuanVideo 1.5")
MODELS = [UNET, *map(transformer, (*HALVED, "Flux", "Qwen-Image", *NEWEST))]
# What is raised where one does not work; or it caches nothing, silently.
ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
ONE_BLOCK = "finds one block where it needs two"
UNKNOWN = "diffusers has not registered its blocks"
OTHER_NAME = "looks for an argument of another name"
SPECIAL: dict[tuple[str, str], Mapping[int, int] | str] = {
    (UNET.name, "PyramidAttentionBroadcast"): {3: 7},
    (UNET.name, "FasterCache"): "can't halve a UNet's timestep",
    (UNET.name, "FirstBlockCache"): "finds no blocks",
    (UNET.name, "MagCache"): "finds no blocks",
    ("Stable Diffusion 3", "FirstBlockCache"): "the last block returns no text",
    # FasterCache does not look for the name of AuraFlow's joint blocks.
    ("AuraFlow", "FasterCache"): {4: 1, 2: 1},
    ("AuraFlow", "FirstBlockCache"): ONE_BLOCK,
    ("AuraFlow", "MagCache"): UNKNOWN,
    ("Flux 2", "FirstBlockCache"): "takes the text's list for tokens",
    ("Z-Image", "PyramidAttentionBroadcast"): {4: 1, 2: 2},
    ("Z-Image", "FasterCache"): "can't halve a list of images",
    ("Z-Image", "FirstBlockCache"): OTHER_NAME,
    ("Z-Image", "MagCache"): OTHER_NAME,
    ("HunyuanVideo 1.5", "FirstBlockCache"): ONE_BLOCK,
    ("HunyuanVideo 1.5", "MagCache"): UNKNOWN,
}


def every_pair() -> Iterator[Pair]:
    yield Pair(UNET, DeepCache(), {2: 6, 4: 1})
    halving, distilled, mag = faster(), faster(distilled=True), magnitude(STEPS)
    for model in MODELS:
        n = sum(model.merges.values())
        halves = distilled if model.name in ("Flux", "Qwen-Image", "Flux 2") else halving
        # diffusers' own choice of layers misses attn1
        taylor = taylorseer(r".*\.attention" if model.name == "Z-Image" else r".*\.attn[12]?")
        first = {STEPS: 1, 1: n - 1}
        usual = {PYRAMID: {2: n}, halves: {2: n}, FIRST: first, mag: {2: n}, taylor: {3: n}}
        for cache, steps in usual.items():
            yield Pair(model, cache, SPECIAL.get((model.name, cache.name), steps))


def own_pairs() -> Iterator[Pair]:
    """Caches of diffusers that work on a model or two of their own."""
    new = transformers.NEWEST
    case = TINY["WanTransformer3DModel"]
    wan = Row("Wan", case.build, partial(sampled, case.inputs(), places=True), {288: 2}, since=new)
    yield Pair(wan, SEA, {2: 2})
    case = TINY["NucleusMoEImageTransformer2DModel"]
    nucleus = Row("NucleusMoE", case.build, partial(sampled, case.inputs()), {96: 2}, since=new)
    yield Pair(nucleus, TEXT_KEYS, {STEPS: 2}, exact=True)


OWN = [*own_pairs()]
EVERY = [*every_pair(), *OWN]
PAIRS = [pair for pair in EVERY if not isinstance(pair.steps, str)]
ALONE = [pair for pair in EVERY if isinstance(pair.steps, str)]


def check_pair(pair: Pair) -> None:
    """The two together, switched on in either order, give one result, run after run; the one that
    came first may go first, and leaves what the other gives alone.
    """
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
    """What `subject`, on which the cache is, makes merged; the report and the draws of its steps
    are right.
    """
    handle = apply_mame(subject, **FIELDS)
    with _drawn(handle, subject) as draws:
        made = pair.model.run(subject)
    assert len({tuple(draw.tolist()) for draw in draws}) > 1, (
        "all steps took one draw: choose other timesteps"
    )
    _check_steps(pair, handle)
    return made


def _check_steps(pair: Pair, handle: MaMeHandle) -> None:
    """Each layer was counted in the steps in which it computed, each time with half of the
    tokens.
    """
    report = handle.report()
    layers = [layer for layer in report.layers if layer.merged]
    assert Counter(layer.calls for layer in layers) == Counter(pair.steps), str(report)
    for layer in layers:
        assert layer.tokens_kept == pytest.approx(layer.tokens_in / 2, abs=0.5), str(report)
        assert not layer.reason, str(report)


@contextmanager
def _drawn(handle: MaMeHandle, subject: Any) -> Iterator[list[Tensor]]:
    """Asserts after every step that the layers that computed in it took its timestep's draw; gives
    the draws.
    """
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


def check_alone(pair: Pair) -> None:
    """The cache still does not work on the model: it raises, or caches nothing."""
    subject = pair.model.build()
    plain = pair.model.run(subject)
    with suppress(*ERRORS):
        pair.cache.enable(subject)
        assert torch.equal(pair.model.run(subject), plain), "it caches something now: give steps"


def own_models() -> list[str]:
    """A line for each of the caches that work on a model of their own."""
    return [f"- {pair.cache.name} on {pair.model.name}" for pair in OWN]


def table() -> list[str]:
    """The table of the pairs, as lines of Markdown, and what its letters stand for."""
    reasons = dict.fromkeys(pair.steps for pair in ALONE if isinstance(pair.steps, str))
    letters = dict(zip(reasons, ascii_lowercase, strict=False))
    cells = {(pair.model.name, pair.cache.name): _cell(pair, letters) for pair in EVERY}
    columns = dict.fromkeys(pair.cache.name for pair in every_pair())
    lines = [f"| model | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for model in MODELS:
        row = [cells.get((model.name, name), "") for name in columns]
        lines.append(f"| {model.name} | {' | '.join(row)} |")
    return [*lines, "", *(f"- *{letter}*: {reason}" for reason, letter in letters.items())]


def _cell(pair: Pair, letters: Mapping[str, str]) -> str:
    return f"*{letters[pair.steps]}*" if isinstance(pair.steps, str) else "yes"
