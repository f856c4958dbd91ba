"""diffusers' pipelines around a tiny UNet, and one call of each."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import ControlNetModel
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from mame_sd.pipelines import StableDiffusionMaMePipeline
from tests.builders.tiny import (
    FACTOR,
    LATENT,
    TEXT_DIM,
    generate,
    seeded,
    tiny_components,
    tiny_scheduler,
    tiny_sdxl_unet,
    tiny_text_encoder,
    tiny_tokenizer,
    tiny_unet,
    tiny_vae,
)

SIDE = LATENT * FACTOR  # pixels


def noise(*shape: int, seed: int = 7) -> Tensor:
    """Uniform in [0, 1): images, masks, hints."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sd(name: str, **changes: Any) -> Any:
    """Make diffusers' pipeline of that name around the tiny Stable Diffusion, with `changes`."""
    parts = {**tiny_components(), **changes}
    return quiet(getattr(diffusers, name)(**parts))


def mame_pipeline(scheduler: str = "ddim", **changes: Any) -> StableDiffusionMaMePipeline:
    """Make the tiny Stable Diffusion as one that merges, with `changes`."""
    settings = {"tau": 0.2, "mame_config": {"min_tokens": 40}}
    pipe: StableDiffusionMaMePipeline = quiet(
        StableDiffusionMaMePipeline(**{**tiny_components(scheduler), **settings, **changes})
    )
    return pipe


def sdxl() -> Any:
    """Make a StableDiffusionXLPipeline, whose text encoders give TEXT_DIM values each."""
    tokenizer = tiny_tokenizer()
    text_encoder = tiny_text_encoder(tokenizer)
    config = CLIPTextConfig(**{**text_encoder.config.to_dict(), "projection_dim": TEXT_DIM})
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=tiny_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=seeded(CLIPTextModelWithProjection, 4, config),
        tokenizer_2=tokenizer,
        unet=tiny_sdxl_unet(cross_attention_dim=2 * TEXT_DIM),
        scheduler=tiny_scheduler(),
        add_watermarker=False,
    )
    return quiet(pipe)


def once(pipe: Any, **kwargs: Any) -> Tensor:
    """Images [B, 3, H, W] of one step."""
    return torch.as_tensor(generate(pipe, **{"num_inference_steps": 1, **kwargs}))


def controlnet() -> ControlNetModel:
    net = seeded(
        ControlNetModel.from_unet,
        6,
        tiny_unet(),
        conditioning_channels=3,
        load_weights_from_unet=True,
    )
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        for block in (*net.controlnet_down_blocks, net.controlnet_mid_block):
            block.weight.normal_(std=0.1)  # zero when made, so that it would add nothing
    net.controlnet_cond_embedding = seeded(
        diffusers.models.controlnets.controlnet.ControlNetConditioningEmbedding,
        6,
        16,
        block_out_channels=(4, 8),
    )
    net.register_to_config(conditioning_embedding_out_channels=(4, 8))
    return net
