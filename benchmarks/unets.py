"""UNets of Stable Diffusion 1.5 and XL from their published configurations, with random
weights.

With a token budget, what merging costs and saves does not depend on the weights: shapes alone
decide.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import UNet2DConditionModel

COMMON: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 2,
    "act_fn": "silu",
    "norm_num_groups": 32,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
}
# unet/config.json of stable-diffusion-v1-5 and of stable-diffusion-xl-base-1.0
CONFIGS: dict[str, dict[str, Any]] = {
    "sd1.5": {
        **COMMON,
        "sample_size": 64,
        "block_out_channels": (320, 640, 1280, 1280),
        "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        "cross_attention_dim": 768,
        "attention_head_dim": 8,
    },
    "sdxl": {
        **COMMON,
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "cross_attention_dim": 2048,
        "attention_head_dim": (5, 10, 20),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}
TEXT_TOKENS = 77
POOLED_TEXT = 1280


def build(name: str, device: torch.device, dtype: torch.dtype) -> UNet2DConditionModel:
    """The architecture `name` with seeded random weights, made in `dtype` on `device`."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return UNet2DConditionModel.from_config(CONFIGS[name]).eval()
    finally:
        torch.set_default_dtype(before)


def inputs(unet: UNet2DConditionModel, side: int, batch: int, seed: int) -> dict[str, Any]:
    """Keyword arguments of one forward for images of `side` pixels; another `seed`, other
    values.
    """
    weight = next(unet.parameters())
    generator = None if weight.is_meta else torch.Generator(weight.device).manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=weight.device, dtype=weight.dtype)

    made: dict[str, Any] = {
        "sample": noise(batch, 4, side // 8, side // 8),
        "timestep": torch.tensor(500, device=weight.device),
        "encoder_hidden_states": noise(batch, TEXT_TOKENS, unet.config["cross_attention_dim"]),
    }
    if unet.config["addition_embed_type"] == "text_time":
        time_ids = torch.tensor(
            [[side, side, 0, 0, side, side]] * batch, device=weight.device, dtype=weight.dtype
        )
        made["added_cond_kwargs"] = {"text_embeds": noise(batch, POOLED_TEXT), "time_ids": time_ids}
    return made
