"""Caches and merging on one model: each pair in either order of switching on and off, over runs of
several steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from string import ascii_lowercase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mame_sd import MaMeHandle, apply_mame, remove_mame
from mame_sd.core.merge import DRAWS, draw_at
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
from tests.builders.plans import latest_plans
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
class Fails:
    """Why a cache does not work on a model without any of our code.

    Attributes:
        reason: for the table.
        error: what it raises, its message matching `match`; None: nothing, and it caches nothing
            either.
    """

    reason: str
    error: type[Exception] | None = None
    match: str = ""


@dataclass(frozen=True)
class Pair:
    """One cache on one model.

    Attributes:
        steps: how many layers that merge compute in how many of the run's steps; the cache answers
            in the others.
        exact: the cache changes nothing but rounding.
    """

    model: Model
    cache: Cache | DeepCache
    steps: Mapping[int, int] | Fails
    exact: bool = False

    @property
    def name(self) -> str:
        return f"{self.model.name}: {self.cache.name}"


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
NEWEST = ("Flux 2", "Z-Image", "HunyuanVideo 1.5")
MODELS = [UNET, *map(transformer, (*HALVED, "Flux", "Qwen-Image", *NEWEST))]
ONE_BLOCK = Fails("finds one block where it needs two", IndexError, "pop from empty")
UNKNOWN = Fails("diffusers has not registered its blocks", ValueError, "not registered")
OTHER_NAME = "looks for an argument of another name"
SPECIAL: dict[tuple[str, str], Mapping[int, int] | Fails] = {
    (UNET.name, "PyramidAttentionBroadcast"): {3: 7},
    (UNET.name, "FasterCache"): Fails(
        "can't halve a UNet's timestep", RuntimeError, "at least a 1-dimensional"
    ),
    (UNET.name, "FirstBlockCache"): Fails("finds no blocks", IndexError, "pop from empty list"),
    (UNET.name, "MagCache"): Fails("finds no blocks"),
    ("Stable Diffusion 3", "FirstBlockCache"): Fails(
        "the last block returns no text", TypeError, "'NoneType' and 'Tensor'"
    ),
    # FasterCache does not look for the name of AuraFlow's joint blocks.
    ("AuraFlow", "FasterCache"): {4: 1, 2: 1},
    ("AuraFlow", "FirstBlockCache"): ONE_BLOCK,
    ("AuraFlow", "MagCache"): UNKNOWN,
    ("Flux 2", "FirstBlockCache"): Fails(
        "takes the text's list for tokens", TypeError, "'Tensor' and 'list'"
    ),
    ("Z-Image", "PyramidAttentionBroadcast"): {4: 1, 2: 2},
    ("Z-Image", "FasterCache"): Fails(
        "can't halve a list of images", AttributeError, "has no attribute"
    ),
    ("Z-Image", "FirstBlockCache"): Fails(OTHER_NAME, ValueError, "not found"),
    ("Z-Image", "MagCache"): Fails(OTHER_NAME, KeyError, "hidden_states"),
    ("HunyuanVideo 1.5", "FirstBlockCache"): ONE_BLOCK,
    ("HunyuanVideo 1.5", "MagCache"): UNKNOWN,
}


def every_pair() -> Iterator[Pair]:
    yield Pair(UNET, DeepCache(), {2: 6, 4: 1})
    halving, distilled, mag = faster(), faster(distilled=True), magnitude(STEPS)
    for model in MODELS:
        n = model.layers
        halves = distilled if model.name in ("Flux", "Qwen-Image", "Flux 2") else halving
        # diffusers' own choice of layers misses attn1
        taylor = taylorseer(r".*\.attention" if model.name == "Z-Image" else r".*\.attn[12]?")
        first = {STEPS: 1, 1: n - 1}
        usual = {PYRAMID: {2: n}, halves: {2: n}, FIRST: first, mag: {2: n}, taylor: {3: n}}
        for cache, steps in usual.items():
            yield Pair(model, cache, SPECIAL.get((model.name, cache.name), steps))


def own_pairs() -> Iterator[Pair]:
    """Caches of diffusers that work on a model or two of their own."""
    wan, nucleus = TINY["WanTransformer3DModel"], TINY["NucleusMoEImageTransformer2DModel"]
    yield Pair(Model("Wan", wan.build, partial(by_steps, wan.inputs()), 2), SEA, {2: 2})
    model = Model("NucleusMoE", nucleus.build, partial(sampled, nucleus.inputs()), 2)
    yield Pair(model, TEXT_KEYS, {STEPS: 2}, exact=True)


OWN = [*own_pairs()]
EVERY = [*every_pair(), *OWN]
PAIRS = [pair for pair in EVERY if not isinstance(pair.steps, Fails)]
ALONE = [pair for pair in EVERY if isinstance(pair.steps, Fails)]


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

    def after(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        named = next((name for name in ("timestep", "t") if name in kwargs), None)
        draws.append(draw_at(args[1] if named is None else kwargs[named]))
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
    """The reason that a cell gives still holds, without our code."""
    why, subject = pair.steps, pair.model.build()
    assert isinstance(why, Fails)
    plain = pair.model.run(subject)
    with nullcontext() if why.error is None else pytest.raises(why.error, match=why.match):
        pair.cache.enable(subject)
        assert torch.equal(pair.model.run(subject), plain), "it caches something now: give steps"
        pair.cache.disable(subject)


def own_models() -> list[str]:
    """A line for each of the caches that work on a model of their own."""
    return [f"- {pair.cache.name} on {pair.model.name}: {_cell(pair, {})}" for pair in OWN]


def table() -> list[str]:
    """The table of the pairs, as lines of Markdown, and what its letters stand for."""
    reasons = dict.fromkeys(pair.steps.reason for pair in ALONE if isinstance(pair.steps, Fails))
    letters = dict(zip(reasons, ascii_lowercase, strict=False))
    cells = {(pair.model.name, pair.cache.name): _cell(pair, letters) for pair in EVERY}
    lines = [f"| model | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for model in MODELS:
        row = [cells.get((model.name, name), "for UNets") for name in COLUMNS]
        lines.append(f"| {model.name} | {' | '.join(row)} |")
    return [*lines, "", *(f"- *{letter}*: {reason}" for reason, letter in letters.items())]


def _cell(pair: Pair, letters: Mapping[str, str]) -> str:
    if isinstance(pair.steps, Fails):
        return f"*{letters[pair.steps.reason]}*"
    if len(pair.steps) == 1:
        return str(*pair.steps)
    return ", ".join(
        f"{steps} ({n} layer{'s' if n > 1 else ''})" for steps, n in pair.steps.items()
    )
