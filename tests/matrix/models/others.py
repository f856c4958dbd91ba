"""UNets and ControlNets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.builders.tiny import TEXT_DIM, tiny_unet, unet_inputs
from tests.builders.transformers import TEXT, H, W, normal
from tests.matrix.models import images
from tests.matrix.models.case import BLC, STEP, Case, T, case
from tests.matrix.models.images import HALF

# What UNets and their ControlNets are built with where a case gives nothing else.
SMALL: dict[str, Any] = {
    "block_out_channels": (32, 32),
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
    "attention_head_dim": 8,
    "motion_num_attention_heads": 2,
    "conditioning_embedding_out_channels": (16, 16),
}
LATENTS = {"sample": normal(2, 4, H, W), "encoder_hidden_states": normal(2, TEXT, 32)}


def unet(
    name: str, inputs: Callable[[], dict[str, Any]] = lambda: LATENTS, kind: str = "2D", **more: Any
) -> Case:
    """Make a case of two levels, with attention in the first; `kind` ends its blocks' names."""
    blocks = {
        "down_block_types": (f"CrossAttnDownBlock{kind}", f"DownBlock{kind}"),
        "up_block_types": (f"UpBlock{kind}", f"CrossAttnUpBlock{kind}"),
    }
    return case(name, inputs, "", small={**SMALL, **blocks}, **more)


def tiny(more: dict[str, Any], **config: Any) -> Case:
    """Make a case of `tiny_unet`, called with `more` over its usual inputs."""
    build = partial(tiny_unet, **config)
    inputs = {**unet_inputs(tiny_unet()), **more}
    return Case("UNet2DConditionModel", build, lambda: inputs, "")


# The UNet of Kandinsky 2.2's decoder: the text's keys stand before the image's.
KANDINSKY = tiny(
    {"encoder_hidden_states": None, "added_cond_kwargs": {"image_embeds": normal(2, TEXT_DIM)}},
    down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    mid_block_type="UNetMidBlock2DSimpleCrossAttn",
    addition_embed_type="image",
    encoder_hid_dim=TEXT_DIM,
    encoder_hid_dim_type="image_proj",
    resnet_time_scale_shift="scale_shift",
    attention_head_dim=8,
)


def controlled(**more: Any) -> Any:
    return lambda: {**LATENTS, "controlnet_cond": normal(2, 3, 2 * H, 2 * W), **STEP, **more}


def video_unet(**more: Any) -> Any:
    return lambda: {
        "sample": normal(1, 4, T, H, W),
        "encoder_hidden_states": normal(1, TEXT, 32),
        "timestep": torch.tensor([5.0]),
        **more,
    }


# Its blocks hold cross-attention, and self-attention too on the smallest level alone.
LATENT_UPSCALER = case(
    "UNet2DConditionModel",
    lambda: {
        "sample": normal(2, 8, 16, 24),
        "timestep": 5,
        "encoder_hidden_states": normal(2, TEXT, 32),
        "timestep_cond": normal(2, 160),
    },
    "",
    small={},
    in_channels=8,
    out_channels=5,
    act_fn="gelu",
    attention_head_dim=8,
    norm_num_groups=None,
    block_out_channels=[32, 64, 64],
    time_cond_proj_dim=160,
    conv_in_kernel=1,
    conv_out_kernel=1,
    cross_attention_dim=32,
    down_block_types=("KDownBlock2D", "KCrossAttnDownBlock2D", "KCrossAttnDownBlock2D"),
    mid_block_type=None,
    resnet_time_scale_shift="scale_shift",
    time_embedding_type="fourier",
    timestep_post_act="gelu",
    up_block_types=("KCrossAttnUpBlock2D", "KCrossAttnUpBlock2D", "KUpBlock2D"),
    layers_per_block=2,
)
BLOCKS: dict[str, Any] = {  # of Transformer2DModel and DreamLite's
    "in_channels": 32,
    "cross_attention_dim": 16,
    "norm_num_groups": 8,
    "out_channels": None,
    "num_layers": 1,
}

CASES = [
    tiny({}),
    case(
        "Transformer2DModel",
        lambda: {"hidden_states": normal(2, 32, H, W)},
        "",
        **BLOCKS,
    ),
    case(
        "DreamLiteTransformer2DModel",
        lambda: {"hidden_states": normal(2, 32, H, W)},
        "",
        **BLOCKS,
        num_kv_heads=2,
    ),
    unet("DreamLiteUNetModel"),
    unet(
        "UNet2DModel",
        lambda: {"sample": normal(2, 3, H, W)},
        down_block_types=("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D"),
    ),
    unet(
        "Kandinsky3UNet",
        lambda: {
            "sample": normal(2, 4, 2 * H, 2 * W),
            "encoder_attention_mask": torch.ones(2, TEXT),
            "encoder_hidden_states": normal(2, TEXT, 16),
            "timestep": torch.tensor(5),
        },
        groups=4,
        attention_head_dim=4,
        layers_per_block=2,
        block_out_channels=(8, 8, 8, 8),
    ),
    unet(
        "StableCascadeUNet",
        lambda: {
            "sample": normal(2, 4, H, W),
            "timestep_ratio": torch.tensor([0.5, 0.5]),
            "clip_text_pooled": normal(2, 1, 16),
        },
        in_channels=4,
        num_attention_heads=(0, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        block_types_per_layer=(("SDCascadeResBlock",), ("SDCascadeResBlock", "SDCascadeAttnBlock")),
        switch_level=(False,),
        dropout=(0.0, 0.0),
    ),
    case(
        "UVit2DModel",
        lambda: {
            "input_ids": torch.arange(H * W).view(1, H, W).repeat(2, 1, 1) % 16,
            "pooled_text_emb": normal(2, 16),
            "micro_conds": torch.ones(2, 5),
        },
        "",
        micro_cond_encode_dim=4,
        micro_cond_embed_dim=20,
        encoder_hidden_size=16,
        vocab_size=17,
        codebook_size=16,
        num_hidden_layers=2,
    ),
    unet("UNet3DConditionModel", video_unet(), "3D"),
    unet(
        "I2VGenXLUNet",
        video_unet(
            fps=torch.tensor([16]),
            image_latents=normal(1, 4, T, H, W),
            image_embeddings=normal(1, 32),
        ),
        "3D",
        num_attention_heads=2,
    ),
    unet("UNetMotionModel", video_unet(encoder_hidden_states=normal(T, TEXT, 32)), "Motion"),
    unet(
        "UNetSpatioTemporalConditionModel",
        lambda: {
            "sample": normal(1, T, 8, H, W),
            "encoder_hidden_states": normal(1, 1, 32),
            "added_time_ids": torch.ones(1, 3),
            "timestep": torch.tensor([5.0]),
        },
        "SpatioTemporal",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
        num_attention_heads=(2, 2),
        num_frames=T,
    ),
    unet(
        "UNetControlNetXSModel",
        controlled(),
        ctrl_conditioning_embedding_out_channels=(16, 16),
        ctrl_block_out_channels=(8, 16),
    ),
    unet(
        "AudioLDM2UNet2DConditionModel",
        lambda: {**LATENTS, "encoder_hidden_states_1": normal(2, TEXT, 32)},
        cross_attention_dim=[[None, 32, 32]] * 2,
    ),
    unet("ControlNetModel", controlled()),
    unet(
        "ControlNetUnionModel",
        controlled(
            controlnet_cond=[normal(2, 3, 2 * H, 2 * W)],
            control_type=torch.eye(6)[:1].repeat(2, 1),
            control_type_idx=[0],
            conditioning_scale=[1.0],
        ),
        num_trans_channel=32,
        num_proj_channel=32,
        addition_time_embed_dim=8,
    ),
    unet(
        "SparseControlNetModel",
        controlled(
            sample=normal(1, 4, T, H, W),
            controlnet_cond=normal(1, 4, T, H, W),
            conditioning_mask=torch.ones(1, 1, T, H, W),
            encoder_hidden_states=normal(T, TEXT, 32),
            timestep=torch.tensor([5.0]),
        ),
        "Motion",
    ),
    case(
        "FluxControlNetModel",
        lambda: {"controlnet_cond": normal(2, H * W, 4), **HALF},
        BLC,
        num_layers=1,
    ),
    case("SD3ControlNetModel"),
    case(
        "QwenImageControlNetModel",
        lambda: {
            "controlnet_cond": normal(2, H * W, 4),
            "encoder_hidden_states_mask": torch.ones(2, TEXT),
            "img_shapes": [(1, H, W)] * 2,
            **HALF,
        },
        BLC,
        patch_size=1,
        num_layers=1,
    ),
    case(
        "HunyuanDiT2DControlNetModel",
        images.hunyuan_dit,
        transformer_num_layers=4,
        **images.HUNYUAN_DIT,
    ),
]
