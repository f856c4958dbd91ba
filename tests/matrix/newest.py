"""Rows of the matrix: today's models, at the size of the sweep."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from mame_sd import apply_mame
from tests.builders.caches import one_run, sea, taylorseer, text_keys
from tests.builders.transformers import run
from tests.matrix.caches import (
    DISTILLED,
    FASTER,
    FIRST,
    MAGNITUDE,
    PYRAMID,
    STEPS,
    TAYLOR,
    TIMES,
    UNKNOWN,
    Alone,
    Model,
    Pair,
    sampled,
)
from tests.matrix.models.registry import MODELS as TINY
from tests.matrix.rows import Check, Row
from tests.matrix.transformers import row

NAMES = {
    "Flux 2": "Flux2Transformer2DModel",
    "Z-Image": "ZImageTransformer2DModel",
    "Krea 2": "Krea2Transformer2DModel",
    "Qwen-Image 2.1": "QwenImage21Transformer2DModel",
    "HunyuanVideo 1.5": "HunyuanVideo15Transformer3DModel",
    "LTX-2": "LTX2VideoTransformer3DModel",
}
MERGES = {"Z-Image": {96: 3}, "HunyuanVideo 1.5": {288: 1}, "LTX-2": {288: 2}}
SINCE = "0.42.0"
HALF: dict[str, Any] = {"keep": 0.5, "min_tokens": 60}


def _row(name: str) -> Row:
    told: dict[str, Any] = {"modes": {"keep": {"keep": 0.5}}, "since": SINCE}
    if name == "Z-Image":
        told |= {"processor": "none", "loads": True}
    if name == "Qwen-Image 2.1":
        told |= {
            "processor": "set",
            "one_liner": "error: its attention passes arguments that other processors don't take",
        }
    return row(name, NAMES[name], MERGES.get(name, {96: 2}), **told)


ROWS = [_row(name) for name in NAMES]


def with_lora(name: str) -> None:
    """A LoRA put on before merging, after it, and switched off again."""
    case = TINY[NAMES[name]]
    before, after = case.build(), case.build()
    apply_mame(after, **HALF)
    plain = run(case.inputs(), after)
    outputs: list[Tensor] = []
    for model in (before, after):
        torch.manual_seed(0)
        targets = r".*(blocks|layers)\.\d+\.(attn1?|attention)\.to_[qkv]"
        model.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=targets))
        if model is before:
            apply_mame(model, **HALF)
        outputs.append(run(case.inputs(), model))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], plain)
    after.disable_adapters()
    torch.testing.assert_close(
        run(case.inputs(), after), plain, rtol=1e-5, atol=1e-5
    )  # an idle LoRA rounds otherwise


CHECKS = [
    Check(
        f"LoRA on {name}", partial(with_lora, name), "before or after `apply_mame`, the same bits"
    )
    for name in ("Flux 2", "Z-Image")
]
MODELS = [
    Model(
        name,
        TINY[kind].build,
        partial(sampled, TINY[kind].inputs()),
        sum(MERGES.get(name, {96: 2}).values()),
    )
    for name, kind in NAMES.items()
    if name in ("Flux 2", "Z-Image", "HunyuanVideo 1.5")
]


def cache_pairs() -> Iterator[Pair | Alone]:
    flux, listed, hunyuan = MODELS
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
    blocks = taylorseer(2, before=2, layers=[r".*\.attention"])
    yield Pair(listed, blocks, {3: listed.layers})


def by_steps(model: Any, inputs: dict[str, Any]) -> Tensor:
    """A run of which each step tells its place, as SeaCache asks."""
    outputs = []
    with one_run(model):
        for i, time in enumerate(TIMES):
            sigma = time / 1000
            given = {**inputs, "hidden_states": inputs["hidden_states"] * (1 - i / 10)}
            given["timestep"] = torch.full_like(inputs["timestep"], int(time))
            with model.cache_context("run", step_index=i, sigma=sigma, num_inference_steps=STEPS):
                outputs.append(run(given, model))
    return torch.stack(outputs)


def own_caches() -> Iterator[Pair]:
    """Caches of diffusers that work on a model or two of their own."""
    wan = TINY["WanTransformer3DModel"]
    model = Model("Wan", wan.build, partial(by_steps, inputs=wan.inputs()), 2)
    yield Pair(model, sea(threshold=10.0), {2: model.layers})
    case = TINY["NucleusMoEImageTransformer2DModel"]
    model = Model("NucleusMoE", case.build, partial(sampled, case.inputs()), 2)
    yield Pair(model, text_keys(), {STEPS: 2}, exact=True)


OWN = list(own_caches())
EVERY = [*cache_pairs(), *OWN]
PAIRS = [pair for pair in EVERY if isinstance(pair, Pair)]
ALONE = [pair for pair in EVERY if isinstance(pair, Alone)]
