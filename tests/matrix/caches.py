"""Caches and merging on one model: each pair in either order of switching on and off, over runs of
several steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from string import ascii_lowercase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mame_sd import MaMeHandle, apply_mame, remove_mame
from mame_sd.core.merge import DRAWS, draw_at
from mame_sd.diffusion.apply_denoiser import denoiser_of
from tests.builders.caches import (
    AnyCache,
    DeepCache,
    faster,
    first_block,
    magnitude,
    one_run,
    pyramid,
    sea,
    taylorseer,
    text_keys,
)
from tests.builders.pipelines import once
from tests.builders.tiny import tiny_pipeline
from tests.matrix import transformers
from tests.matrix.models.registry import MODELS as TINY
from tests.matrix.unets import LEVELS

TIMES = (900.0, 600.0, 500.0, 200.0)
STEPS = len(TIMES)
COLUMNS = (
    "DeepCache",
    "PyramidAttentionBroadcast",
    "FasterCache",
    "FirstBlockCache",
    "MagCache",
    "TaylorSeer",
)
FIELDS: dict[str, Any] = {"keep": 0.5, "min_tokens": 60}


@dataclass(frozen=True)
class Model:
    """A row of the table.

    Attributes:
        name: as in the matrix's own rows.
        build: a pipeline or model that was never touched, the same each time.
        run: a run of STEPS steps; all that it makes.
        layers: how many layers merge.
    """

    name: str
    build: Callable[[], Any]
    run: Callable[[Any], Tensor]
    layers: int


@dataclass(frozen=True)
class Pair:
    """One cache on one model.

    Attributes:
        steps: how many layers that merge compute in how many of the run's steps; the cache answers
            in the others.
        exact: the cache changes nothing but rounding.
    """

    model: Model
    cache: AnyCache
    steps: Mapping[int, int]
    exact: bool = False

    @property
    def name(self) -> str:
        return f"{self.model.name}: {self.cache.name}"


@dataclass(frozen=True)
class Alone:
    """A cache that does not work on a model without any of our code.

    Attributes:
        error: what it raises, its message matching `match`; None: nothing, and it caches nothing
            either.
        reason: for the table.
    """

    model: Model
    cache: AnyCache
    reason: str
    error: type[Exception] | None = None
    match: str = ""

    @property
    def name(self) -> str:
        return f"{self.model.name}: {self.cache.name}, which does not work there"


def sampled(inputs: Mapping[str, Any], model: Any) -> Tensor:
    """The outputs of all steps [STEPS, ...], of one input that fades."""
    outputs = []
    with one_run(model):
        for i, time in enumerate(TIMES):
            latents, when = ("x", "t") if "x" in inputs else ("hidden_states", "timestep")
            given = inputs[when]
            unit = given.is_floating_point() and float(given.max()) <= 1
            timestep = torch.full_like(given, time / 1000 if unit else int(time))
            images = inputs[latents]
            faded = (
                [image * (1 - i / 10) for image in images]
                if isinstance(images, list)
                else images * (1 - i / 10)
            )
            outputs.append(transformers.run({**inputs, latents: faded, when: timestep}, model))
    return torch.stack(outputs)


def images(pipe: Any) -> Tensor:
    with one_run(pipe):
        return once(pipe, num_inference_steps=STEPS)


def transformer(name: str) -> Model:
    row = next(row for row in transformers.ROWS if row.name == name)
    inputs = row.inputs
    return Model(row.name, row.build, partial(sampled, inputs), sum(row.merges.values()))


def by_steps(inputs: Mapping[str, Any], model: Any) -> Tensor:
    """A run of which each step tells its place, as SeaCache asks."""
    outputs = []
    with one_run(model):
        for i, time in enumerate(TIMES):
            given = {**inputs, "hidden_states": inputs["hidden_states"] * (1 - i / 10)}
            given["timestep"] = torch.full_like(inputs["timestep"], int(time))
            place = {"step_index": i, "sigma": time / 1000, "num_inference_steps": STEPS}
            with model.cache_context("run", **place):
                outputs.append(transformers.run(given, model))
    return torch.stack(outputs)


UNET = Model("Stable Diffusion", tiny_pipeline, images, sum(LEVELS.values()))
# FasterCache halves a guided batch of these; the others are distilled, and take no such batch.
HALVED = ("PixArt", "Stable Diffusion 3", "AuraFlow", "Wan (video)", "CogVideoX")
TRANSFORMERS = [transformer(name) for name in (*HALVED, "Flux", "Qwen-Image")]
NEWEST = [transformer(name) for name in ("Flux 2", "Z-Image", "HunyuanVideo 1.5")]
MODELS = [UNET, *TRANSFORMERS, *NEWEST]
LAYERS = [r".*\.attn[12]?"]  # diffusers' own choice of layers misses attn1
PYRAMID, FASTER, DISTILLED = pyramid(), faster(), faster(distilled=True)
FIRST, MAGNITUDE = first_block(10.0), magnitude(STEPS)
TAYLOR = taylorseer(LAYERS)
UNKNOWN = "diffusers has not registered its blocks"


def unet_pairs() -> Iterator[Pair | Alone]:
    yield Pair(UNET, DeepCache(), {2: 6, 4: 1})
    yield Pair(UNET, PYRAMID, {3: 7})
    whole = "can't halve a UNet's timestep"
    yield Alone(UNET, FASTER, whole, RuntimeError, "at least a 1-dimensional")
    yield Alone(UNET, FIRST, "finds no blocks", IndexError, "pop from empty list")
    yield Alone(UNET, MAGNITUDE, "finds no blocks")
    yield Pair(UNET, TAYLOR, {3: UNET.layers})


def transformer_pairs() -> Iterator[Pair | Alone]:
    for model in TRANSFORMERS:
        n = model.layers
        yield Pair(model, PYRAMID, {2: n})
        # FasterCache does not look for the name of AuraFlow's joint blocks.
        halves = {4: 1, 2: 1} if model.name == "AuraFlow" else {2: n}
        yield Pair(model, FASTER if model.name in HALVED else DISTILLED, halves)
        yield Pair(model, TAYLOR, {3: n})
        if model.name == "AuraFlow":
            one = "finds one block where it needs two"
            yield Alone(model, FIRST, one, IndexError, "pop from empty list")
            yield Alone(model, MAGNITUDE, UNKNOWN, ValueError, "not registered")
            continue
        yield Pair(model, MAGNITUDE, {2: n})
        if model.name == "Stable Diffusion 3":
            no_text = "the last block returns no text"
            yield Alone(model, FIRST, no_text, TypeError, "'NoneType' and 'Tensor'")
        else:
            yield Pair(model, FIRST, {STEPS: 1, 1: n - 1})


def newest_pairs() -> Iterator[Pair | Alone]:
    flux, listed, hunyuan = NEWEST
    for model in (flux, hunyuan):
        yield Pair(model, PYRAMID, {2: model.layers})
        yield Pair(model, TAYLOR, {3: model.layers})
    yield Pair(flux, DISTILLED, {2: flux.layers})
    yield Alone(flux, FIRST, "takes the text's list for tokens", TypeError, "'Tensor' and 'list'")
    yield Pair(flux, MAGNITUDE, {2: flux.layers})
    yield Pair(hunyuan, FASTER, {2: hunyuan.layers})
    yield Alone(hunyuan, FIRST, "finds one block where it needs two", IndexError, "pop from empty")
    yield Alone(hunyuan, MAGNITUDE, UNKNOWN, ValueError, "not registered")
    yield Pair(listed, PYRAMID, {4: 1, 2: 2})
    yield Alone(listed, FASTER, "can't halve a list of images", AttributeError, "has no attribute")
    other = "looks for an argument of another name"
    yield Alone(listed, FIRST, other, ValueError, "not found")
    yield Alone(listed, MAGNITUDE, other, KeyError, "hidden_states")
    blocks = taylorseer([r".*\.attention"])
    yield Pair(listed, blocks, {3: listed.layers})


def own_pairs() -> Iterator[Pair]:
    """Caches of diffusers that work on a model or two of their own."""
    wan, nucleus = TINY["WanTransformer3DModel"], TINY["NucleusMoEImageTransformer2DModel"]
    model = Model("Wan", wan.build, partial(by_steps, wan.inputs()), 2)
    yield Pair(model, sea(10.0), {2: model.layers})
    model = Model("NucleusMoE", nucleus.build, partial(sampled, nucleus.inputs()), 2)
    yield Pair(model, text_keys(), {STEPS: 2}, exact=True)


OWN = [*own_pairs()]
EVERY = [*unet_pairs(), *transformer_pairs(), *newest_pairs(), *OWN]
PAIRS = [pair for pair in EVERY if isinstance(pair, Pair)]
ALONE = [pair for pair in EVERY if isinstance(pair, Alone)]


def check_pair(pair: Pair) -> None:
    """The two together, switched on in either order, give one result, run after run; each comes off
    and leaves what the other gives alone.
    """
    model, cache = pair.model, pair.cache
    first, second = model.build(), model.build()
    cache.enable(first)
    alone = model.run(first)
    both = _merged_run(pair, first)
    assert not torch.equal(both, alone)
    assert torch.equal(model.run(first), both), "cache first: a second run differs"
    remove_mame(first)
    assert torch.equal(model.run(first), alone), "cache first, merging removed"
    cache.disable(first)
    plain = model.run(first)
    if pair.exact:
        torch.testing.assert_close(alone, plain)
    else:
        assert not torch.equal(alone, plain), "nothing was cached"

    handle = apply_mame(second, **FIELDS)
    merged = model.run(second)
    if pair.exact:
        torch.testing.assert_close(both, merged)
    assert {layer.calls for layer in handle.report().layers} == {STEPS}
    cache.enable(second)
    handle.reset()
    assert torch.equal(model.run(second), both), "merging first: not what the cache first gives"
    _check_steps(pair, handle)
    cache.disable(second)
    assert torch.equal(model.run(second), merged), "merging first, cache removed"


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
    handle.capture()

    def after(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        named = next((name for name in ("timestep", "t") if name in kwargs), None)
        draws.append(draw_at(args[1] if named is None else kwargs[named]))
        plans = handle.plans()
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
        yield draws
    finally:
        hook.remove()
        handle.capture(False)


def check_alone(alone: Alone) -> None:
    """The reason that a cell gives still holds, without our code."""
    subject = alone.model.build()
    plain = alone.model.run(subject)
    if alone.error is None:
        alone.cache.enable(subject)
        assert torch.equal(alone.model.run(subject), plain), (
            "it caches something now: make it a Pair"
        )
        alone.cache.disable(subject)
        return
    with pytest.raises(alone.error, match=alone.match):
        _cached_run(alone, subject)


def _cached_run(alone: Alone, subject: Any) -> None:
    alone.cache.enable(subject)
    alone.model.run(subject)


def own_models(pairs: Sequence[Pair]) -> list[str]:
    """A line for each of the caches that work on a model of their own."""
    return [
        f"- {pair.cache.name} on {pair.model.name}: {_cell(pair)}"
        for pair in pairs
        if pair.cache.name not in COLUMNS
    ]


def table(models: Sequence[Model], pairs: Sequence[Pair | Alone]) -> list[str]:
    """The table of these pairs, as lines of Markdown, and what its letters stand for."""
    reasons = dict.fromkeys(pair.reason for pair in pairs if isinstance(pair, Alone))
    letters = dict(zip(reasons, ascii_lowercase, strict=False))
    cells = {
        (pair.model.name, pair.cache.name): (
            f"*{letters[pair.reason]}*" if isinstance(pair, Alone) else _cell(pair)
        )
        for pair in pairs
        if pair.cache.name in COLUMNS
    }
    lines = [f"| model | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for model in models:
        row = [cells.get((model.name, name), "for UNets") for name in COLUMNS]
        lines.append(f"| {model.name} | {' | '.join(row)} |")
    return [*lines, "", *(f"- *{letter}*: {reason}" for reason, letter in letters.items())]


def _cell(pair: Pair) -> str:
    if len(pair.steps) == 1:
        return str(*pair.steps)
    return ", ".join(
        f"{steps} ({n} layer{'s' if n > 1 else ''})" for steps, n in pair.steps.items()
    )
