"""Rows of the matrix: diffusers' transformers at tiny size, images that are not square."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline
from peft import LoraConfig
from torch import Tensor

from tests.builders.tiny import seeded
from tests.builders.transformers import TEXT, normal, run
from tests.matrix.models.case import Case, case
from tests.matrix.models.registry import MODELS
from tests.matrix.rows import Row


def row(name: str, model: str | Case, merges: dict[int, int], **fields: Any) -> Row:
    """Make a row of a model of the registry, by its class, or of another case."""
    known = MODELS[model] if isinstance(model, str) else model
    given = {"processor": "error", **fields}
    return Row(name, known.build, partial(run, known.inputs()), merges, **given)


def add_lora(transformer: Any) -> None:
    torch.manual_seed(0)
    targets = r".*(blocks|layers)\.\d+\.(attn1?|attention)\.to_[qkv]"
    transformer.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=targets))


def unload_lora(transformer: Any) -> None:
    transformer.unload_lora()


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
    pipe = WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=MODELS["WanTransformer3DModel"].build(),
        transformer_2=MODELS["WanTransformer3DModel"].build(),
        boundary_ratio=0.8,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run_wan22(pipe: Any) -> Tensor:
    """Latents of 2 x 4 x 4 tokens; each transformer takes half of the steps, of two calls."""
    output: Tensor = pipe(
        prompt_embeds=normal(1, TEXT, 16),
        negative_prompt_embeds=normal(1, TEXT, 16, seed=1),
        height=64,
        width=64,
        num_frames=5,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        return_dict=False,
    )[0]
    return output


SD3 = MODELS["SD3Transformer2DModel"]
SD35 = case(SD3.name, SD3.inputs, sample_size=32, dual_attention_layers=(0,), qk_norm="rms_norm")
NEWEST = "0.42.0"  # the version of diffusers that has the rows of `new`
new = partial(row, modes={"keep": {"keep": 0.5}}, since=NEWEST)
# What `test_models.py` does not run of its classes.
ROWS = [
    row("PixArt", "PixArtTransformer2DModel", {96: 2}, processor=""),
    row("Stable Diffusion 3", "SD3Transformer2DModel", {96: 2}),
    row("Flux", "FluxTransformer2DModel", {96: 4}, loads=True),
    row("Wan (video)", "WanTransformer3DModel", {288: 2}, loads=True),
    new(
        "Flux 2 with a LoRA",
        "Flux2Transformer2DModel",
        {96: 2},
        switch=add_lora,
        undo=unload_lora,
    ),
    new("Z-Image", "ZImageTransformer2DModel", {96: 3}, processor="", loads=True),
    Row("Wan 2.2", wan22, run_wan22, {32: 4}, min_tokens=16),
]
