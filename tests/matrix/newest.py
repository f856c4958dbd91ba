"""Rows of the matrix: today's models, at the size of the sweep."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from benchmarks.caching import one_run, sea, taylorseer, text_keys
from mame_sd import apply_mame
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
from tests.matrix.models import images, videos
from tests.matrix.models.case import Case
from tests.matrix.rows import Check, Row
from tests.matrix.transformers import ROWS as ROWS_BEFORE
from tests.matrix.transformers import row

_CASES = {case.name: case for case in (*images.CASES, *videos.CASES)}
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


def _case(name: str) -> Case:
    return _CASES[NAMES[name]]


def _row(name: str) -> Row:
    case = _case(name)
    told: dict[str, Any] = {"modes": {"keep": {"keep": 0.5}}, "since": SINCE}
    if name == "Z-Image":
        told["processor"] = "none"
    if name == "Qwen-Image 2.1":
        told |= {
            "processor": "set",
            "one_liner": "error: its attention passes arguments that other processors don't take",
        }
    return row(name, case.build, case.inputs(), MERGES.get(name, {96: 2}), **told)


ROWS = [_row(name) for name in NAMES]


def with_lora(name: str) -> None:
    """A LoRA put on before merging, after it, and switched off again."""
    case = _case(name)
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
    *[
        Check(
            f"LoRA on {name}",
            partial(with_lora, name),
            "before or after `apply_mame`, the same bits",
        )
        for name in NAMES
    ],
]
MODELS = [
    Model(
        name,
        _CASES[kind].build,
        partial(sampled, _CASES[kind].inputs()),
        sum(MERGES.get(name, {96: 2}).values()),
    )
    for name, kind in NAMES.items()
]


def cache_pairs() -> Iterator[Pair | Alone]:
    for model in MODELS:
        n = model.layers
        if model.name == "Z-Image":
            yield Pair(model, PYRAMID, {4: 1, 2: 2})
            yield Alone(
                model, FASTER, "can't halve a list of images", AttributeError, "has no attribute"
            )
            yield Alone(
                model, FIRST, "looks for an argument of another name", ValueError, "not found"
            )
            yield Alone(
                model, MAGNITUDE, "looks for an argument of another name", KeyError, "hidden_states"
            )
            yield Pair(model, taylorseer(2, before=2, layers=[r".*\.attention"]), {3: n})
            continue
        yield Pair(model, PYRAMID, {2: n})
        yield Pair(model, FASTER if model.name == "HunyuanVideo 1.5" else DISTILLED, {2: n})
        if model.name == "Flux 2":
            yield Alone(
                model, FIRST, "takes the text's list for tokens", TypeError, "'Tensor' and 'list'"
            )
            yield Pair(model, MAGNITUDE, {2: n})
        elif model.name == "HunyuanVideo 1.5":
            yield Alone(
                model, FIRST, "finds one block where it needs two", IndexError, "pop from empty"
            )
            yield Alone(model, MAGNITUDE, UNKNOWN, ValueError, "not registered")
        else:
            yield Alone(model, FIRST, UNKNOWN, ValueError, "not registered")
            yield Alone(model, MAGNITUDE, UNKNOWN, ValueError, "not registered")
        yield Pair(model, TAYLOR, {3: n})


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
    wan = next(row for row in ROWS_BEFORE if row.name == "Wan (video)")
    inputs = wan.run.args[0]  # type: ignore[attr-defined]
    model = Model("Wan", wan.build, partial(by_steps, inputs=inputs), sum(wan.merges.values()))
    yield Pair(model, sea(threshold=10.0), {2: model.layers})
    case = _CASES["NucleusMoEImageTransformer2DModel"]
    model = Model("NucleusMoE", case.build, partial(sampled, case.inputs()), 2)
    yield Pair(model, text_keys(), {STEPS: 2}, exact=True)


OWN = list(own_caches())
EVERY = [*cache_pairs(), *OWN]
PAIRS = [pair for pair in EVERY if isinstance(pair, Pair)]
ALONE = [pair for pair in EVERY if isinstance(pair, Alone)]
