"""apply_mame beside what else changes a model (adapters, slicing, PAG, ...), and on video and
transformers: which tokens merge.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel

from mame_sd import apply_mame, remove_mame
from tests.builders.tiny import seeded, tiny_unet, unet_inputs
from tests.builders.transformers import normal

LATENT_UPSCALER: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 5,
    "act_fn": "gelu",
    "attention_head_dim": 8,
    "norm_num_groups": None,
    "block_out_channels": [32, 64, 64],
    "time_cond_proj_dim": 160,
    "conv_in_kernel": 1,
    "conv_out_kernel": 1,
    "cross_attention_dim": 32,
    "down_block_types": ("KDownBlock2D", "KCrossAttnDownBlock2D", "KCrossAttnDownBlock2D"),
    "mid_block_type": None,
    "resnet_time_scale_shift": "scale_shift",
    "time_embedding_type": "fourier",
    "timestep_post_act": "gelu",
    "up_block_types": ("KCrossAttnUpBlock2D", "KCrossAttnUpBlock2D", "KUpBlock2D"),
    "layers_per_block": 2,
}


def test_image_tokens_among_others_are_left_alone() -> None:
    unet = tiny_unet(attention_type="gated", cross_attention_dim=16)
    handle = apply_mame(unet, tau=0.2, min_tokens=40)
    generator = torch.Generator().manual_seed(0)
    boxes = {
        "boxes": torch.rand(2, 3, 4, generator=generator),
        "positive_embeddings": torch.randn(2, 3, 16, generator=generator),
        "masks": torch.ones(2, 3),
    }
    with torch.no_grad():
        unet(**unet_inputs(unet), cross_attention_kwargs={"gligen": boxes})
    layers = handle.report().layers
    assert {layer.merged for layer in layers if layer.name.endswith("attn1")} == {True}
    grounded = [layer for layer in layers if "fuser" in layer.name]
    assert len(grounded) == 7
    assert {layer.merged for layer in grounded} == {False}
    assert grounded[0].reason == "259 tokens are not those of 16 x 16"


@pytest.mark.parametrize("fields", [{"keep": 0.5}, {"tau": -1.0}], ids=str)
def test_latent_upscaler_merges_where_its_unet_attends_to_itself(fields: dict[str, Any]) -> None:
    """Its blocks hold cross-attention, and self-attention too on the smallest level alone."""
    unet = seeded(UNet2DConditionModel, 0, **LATENT_UPSCALER)
    inputs = {
        "sample": normal(2, 8, 16, 24),
        "timestep": 5,
        "encoder_hidden_states": normal(2, 7, 32),
        "timestep_cond": normal(2, 160),
    }

    def run() -> torch.Tensor:
        with torch.no_grad():
            output: torch.Tensor = unet(**inputs).sample
        return output

    before = run()
    handle = apply_mame(unet, tau=1, min_tokens=1)
    torch.testing.assert_close(run(), before, rtol=1e-4, atol=1e-5)
    handle.set(**fields)
    handle.reset()
    assert not torch.allclose(run(), before, atol=1e-4)
    layers = handle.report().layers
    assert {(layer.size, layer.tokens_in, layer.tokens_kept) for layer in layers} == {
        ((4, 6), 24, 12)
    }
    assert all(layer.name.endswith("attn1") for layer in layers)
    remove_mame(unet)
    assert torch.equal(run(), before)
