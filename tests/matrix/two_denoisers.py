"""Rows of the matrix: Wan 2.2, whose pipeline has two transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline
from torch import Tensor

from mame_sd import apply_mame, remove_mame
from tests.builders.caches import FIRST, PYRAMID, Cache
from tests.builders.tiny import seeded
from tests.builders.transformers import TEXT, normal
from tests.matrix.models.registry import MODELS
from tests.matrix.rows import Check
from tests.matrix.tools import add_lora

FRAMES, SIDE = 5, 64


def wan22() -> Any:
    """Wan 2.2: steps of much noise go to one transformer, steps of little noise to the other."""
    vae = seeded(
        AutoencoderKLWan,
        0,
        base_dim=3,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipe = WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        scheduler=scheduler,
        transformer=MODELS["WanTransformer3DModel"].build(),
        transformer_2=MODELS["WanTransformer3DModel"].build(),
        boundary_ratio=0.8,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def once(pipe: Any, steps: int = 4) -> Tensor:
    output: Tensor = pipe(
        prompt_embeds=normal(1, TEXT, 16),
        negative_prompt_embeds=normal(1, TEXT, 16, seed=1),
        height=SIDE,
        width=SIDE,
        num_frames=FRAMES,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        return_dict=False,
    )[0]
    return output


HALF: dict[str, Any] = {"keep": 0.5, "min_tokens": 16}
STEPS = 8  # four of each transformer, of two calls


def both(pipe: Any) -> tuple[Any, Any]:
    return pipe.transformer, pipe.transformer_2


def compiled() -> None:
    """Against calls that share no plans: guidance takes two a step, and a graph holds none."""
    torch.compiler.reset()
    pipe, whole = wan22(), wan22()
    apply_mame(pipe, **HALF, share_guidance_plan=False)
    handle = apply_mame(whole, **HALF, share_guidance_plan=False)
    for transformer in both(whole):
        transformer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(once(whole), once(pipe), rtol=1e-4, atol=1e-5)
    assert {(layer.calls, layer.merged) for layer in handle.report().layers} == {(4, True)}


def in_either_order(
    enable: Callable[[Any], None], disable: Callable[[Any], None], calls: Mapping[str, int]
) -> None:
    """What `enable` puts on a transformer, before merging or after it, gives the same bits; each
    goes without a trace. `calls`: of each transformer's first layer.
    """
    first, second = wan22(), wan22()
    plain = once(first, STEPS)
    for transformer in both(first):
        enable(transformer)
    alone = once(first, STEPS)
    assert not torch.equal(alone, plain)
    apply_mame(first, **HALF)
    handle = apply_mame(second, **HALF)
    merged = once(second, STEPS)
    for transformer in both(second):
        enable(transformer)
    handle.reset()
    together = once(second, STEPS)
    assert torch.equal(once(first, STEPS), together)
    assert not torch.equal(together, alone)
    assert not torch.equal(together, merged)
    layers = {layer.name: layer for layer in handle.report().layers}
    assert {name: layers[f"{name}.blocks.1.attn1"].calls for name in calls} == calls
    assert all(layer.merged for layer in layers.values())
    remove_mame(first)
    assert torch.equal(once(first, STEPS), alone)
    for transformer in both(second):
        disable(transformer)
    torch.testing.assert_close(once(second, STEPS), merged, rtol=1e-5, atol=1e-5)


def cached(cache: Cache, high: int, low: int) -> None:
    calls = {"transformer": high, "transformer_2": low}
    in_either_order(cache.enable, cache.disable, calls)


put_lora = partial(add_lora, targets=r".*attn1\.to_[qkv]")
EIGHT = {"transformer": 8, "transformer_2": 8}
CALLS = ((PYRAMID, 8, 4), (FIRST, 2, 2))
CHECKS = [
    Check("torch.compile of Wan 2.2, fullgraph", compiled, "one graph each"),
    Check(
        "LoRA on Wan 2.2",
        partial(in_either_order, put_lora, lambda model: model.disable_adapters(), EIGHT),
        "before or after `apply_mame`, the same bits",
    ),
    *[
        Check(
            f"{cache.name} on Wan 2.2",
            partial(cached, cache, high, low),
            f"same bits in either order; the last layers compute in {high} and {low} of 8 calls",
        )
        for cache, high, low in CALLS
    ],
]
