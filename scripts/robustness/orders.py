"""Merging and other tools on a tiny model of random weights, in any order.

    python -m scripts.robustness.orders [--seed 0] [--cases 40] [--kinds UNet,ViT]

Each case draws up to four tools, puts merging on before, between or after them, and copies or saves
the model on the way. It is held where the output is that of merging put on last, and after
`remove_mame` that of the tools alone, bit for bit; "refused" where one line of ours says so. "void"
are tools that refuse one another without merging.
"""

from __future__ import annotations

import copy
import io
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic

import mame_sd
from mame_sd import apply_mame, remove_mame
from scripts.robustness.apart import Draw, main
from tests.builders.perception import ROWS
from tests.builders.tiny import one_level_unet, unet_inputs
from tests.matrix.transformers import ROWS as TRANSFORMERS

Model = Any
Tool = Callable[[Model], Model]


def lora(model: Model, around: bool = False) -> Model:
    """Put an adapter on projections of queries and keys, in the model or in one around it."""
    torch.manual_seed(1)
    names = r".*\.(to_q|to_k|q_proj|k_proj)"
    config = LoraConfig(target_modules=names, r=2, init_lora_weights=False)
    adapted = get_peft_model(model, config) if around else inject_adapter_in_model(config, model)
    return adapted.eval()


def compiled(model: Model) -> Model:
    torch._dynamo.reset()
    return torch.compile(model, backend="eager")


def new_processors(model: Model) -> Model:
    model.set_attn_processor({name: type(p)() for name, p in model.attn_processors.items()})
    return model


def method(name: str, *args: Any, **kwargs: Any) -> Tool:
    """Return a method of the model as a tool."""

    def act(model: Model) -> Model:
        getattr(model, name)(*args, **kwargs)
        return model

    act.__name__ = name
    return act


def saved(model: Model) -> Model:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


EVERY: list[Any] = [
    lora,
    partial(lora, around=True),
    partial(quantize_dynamic, qconfig_spec={nn.Linear}, dtype=torch.qint8),
    compiled,
    method("compile", backend="eager"),
    method("half"),
]
DIFFUSERS = [
    *EVERY,
    new_processors,
    method("compile_repeated_blocks", backend="eager"),
    method("fuse_qkv_projections"),
    method("enable_gradient_checkpointing"),
    method("set_attention_backend", "native"),
    method("enable_layerwise_casting", torch.float8_e4m3fn, torch.float32),
]
UNET = [*DIFFUSERS, method("set_attention_slice", 1), method("set_default_attn_processor")]
VIT = [*EVERY, method("gradient_checkpointing_enable"), method("set_attn_implementation", "eager")]
COPIES: list[Tool] = [copy.deepcopy, saved, lambda model: pickle.loads(pickle.dumps(model))]


def run(build: Callable[[], Model], steps: list[Tool], call: Any) -> tuple[Model, Tensor]:
    """Return the model after `steps`, and its output."""
    model = build()
    for step in steps:
        model = step(model)
    return model, output(model, call)


def output(model: Model, call: dict[str, Any]) -> Tensor:
    half = any(p.dtype == torch.float16 for p in model.parameters())
    given = {k: v.half() if half and torch.is_floating_point(v) else v for k, v in call.items()}
    return model(**given, return_dict=False)[0]


def check(build: Callable[[], Model], call: Any, tools: list[Tool], least: Any, draw: Draw) -> str:
    """One case: draws its steps, and raises AssertionError with them where they fail."""
    fields = {**draw.choice(({"keep": 0.5}, {"keep": 0.25}, {"tau": 0.3})), **least}

    def merge(model: Model) -> Model:
        """By way of other settings that are taken off again."""
        apply_mame(model, keep=0.8, **least)
        remove_mame(model)
        apply_mame(model, **fields)
        return model

    torch._dynamo.reset()
    chosen = draw.sample(tools, draw.randint(1, 4))
    plain = again = None
    steps = [*chosen]
    for made in draw.sample(COPIES, draw.randint(0, 2)):
        steps.insert(draw.randint(0, len(steps)), made)
    with suppress(Exception):
        plain, again = run(build, chosen, call)[1], run(build, steps, call)[1]
    if plain is None or again is None or not torch.equal(plain, again):
        return "void"
    steps.insert(draw.randint(0, len(steps)), merge)
    told = " > ".join(str(getattr(step, "__name__", step)) for step in steps)
    try:
        want = run(build, [*chosen, merge], call)[1]
        model, got = run(build, steps, call)
    except Exception as error:
        last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if Path(mame_sd.__file__).parent not in last.parents or "\n" in str(error):
            raise AssertionError(f"{told}: {last.name}: {error!r}") from error
        return "refused"
    gap = float((got - want).abs().max() / want.abs().max())
    assert gap <= 1e-4, f"{told}: {gap:.2g} off"
    assert not torch.equal(got, plain), f"{told}: nothing merges"
    remove_mame(model)
    assert torch.equal(output(model, call), plain), f"{told}: other after remove_mame"
    return "held"


SD3: Any = next(row for row in TRANSFORMERS if row.name == "Stable Diffusion 3")
ENCODER = next(row for row in ROWS if row.name == "ViTForImageClassification")
LEAST = {"min_tokens": 16}
KINDS: dict[str, Callable[[Draw], str]] = {
    "UNet": partial(check, one_level_unet, unet_inputs(one_level_unet()), UNET, LEAST),
    "SD3": partial(check, SD3.build, SD3.run.args[0], DIFFUSERS, LEAST),
    "ViT": partial(check, ENCODER.build, ENCODER.batch(), VIT, {}),
}

if __name__ == "__main__":
    sys.exit(main(__doc__ or "", KINDS, 40))
