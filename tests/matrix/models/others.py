"""UNets and ControlNets."""

from __future__ import annotations

from typing import Any

import torch

from tests.builders.tiny import tiny_unet, unet_inputs
from tests.builders.transformers import HEADS, IMAGE, TEXT, H, W, flux_inputs, model, normal
from tests.matrix.models import images
from tests.matrix.models.case import PLAIN, STEP, Case, T, case
from tests.matrix.models.images import HALF

UNET = "a UNet's convolutions spread a change"
WIDTHS = (32, 32)


def unet(name: str, **config: Any) -> Case:
    return case(
        name,
        lambda: {"sample": normal(2, 4, H, W), "encoder_hidden_states": normal(2, TEXT, 32)},
        "",
        unprobed=UNET,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        cross_attention_dim=32,
        norm_num_groups=8,
        **config,
    )


def of_unet(name: str = "UNet2DConditionModel") -> Case:
    return Case(name, tiny_unet, lambda: unet_inputs(tiny_unet()), "", unprobed=UNET)


DOWN = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
UP = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
CONTROL: dict[str, Any] = {"conditioning_embedding_out_channels": (16, 16), **DOWN}


def controlled(**more: Any) -> Any:
    return lambda: {
        "sample": normal(2, 4, H, W),
        "encoder_hidden_states": normal(2, TEXT, 32),
        "controlnet_cond": normal(2, 3, 2 * H, 2 * W),
        **STEP,
        **more,
    }


def video_unet(**more: Any) -> Any:
    return lambda: {
        "sample": normal(1, 4, T, H, W),
        "encoder_hidden_states": normal(1, TEXT, 32),
        "timestep": torch.tensor([5.0]),
        **more,
    }


FLUX_CONTROL = {
    "num_layers": 1,
    "num_single_layers": 1,
    **HEADS,
    "in_channels": 4,
    "joint_attention_dim": 16,
}

CASES = [
    of_unet(),
    case(
        "Transformer2DModel",
        lambda: {
            "hidden_states": normal(2, 32, H, W),
            "encoder_hidden_states": normal(2, TEXT, 16),
        },
        "",
        unprobed=PLAIN,
        in_channels=32,
        cross_attention_dim=16,
        norm_num_groups=8,
        out_channels=None,
        num_layers=1,
        caption_channels=None,
    ),
    case(
        "DreamLiteTransformer2DModel",
        lambda: {
            "hidden_states": normal(2, 32, H, W),
            "encoder_hidden_states": normal(2, TEXT, 16),
        },
        "",
        unprobed="its group norm spreads a change",
        in_channels=32,
        cross_attention_dim=16,
        norm_num_groups=8,
        num_kv_heads=2,
        out_channels=None,
        num_layers=1,
    ),
    unet("DreamLiteUNetModel", **DOWN, **UP, attention_head_dim=2),
    case(
        "UNet2DModel",
        lambda: {"sample": normal(2, 3, H, W)},
        "",
        unprobed=UNET,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D"),
    ),
    case(
        "Kandinsky3UNet",
        lambda: {
            "sample": normal(2, 4, 2 * H, 2 * W),
            "encoder_attention_mask": torch.ones(2, TEXT),
            "timestep": torch.tensor(5),
        },
        "",
        unprobed=UNET,
        time_embedding_dim=32,
        groups=4,
        attention_head_dim=4,
        layers_per_block=2,
        block_out_channels=(8, 8, 8, 8),
        cross_attention_dim=16,
        encoder_hid_dim=16,
    ),
    case(
        "StableCascadeUNet",
        lambda: {
            "sample": normal(2, 4, H, W),
            "timestep_ratio": torch.tensor([0.5, 0.5]),
            "clip_text_pooled": normal(2, 1, 16),
        },
        "",
        unprobed=UNET,
        in_channels=4,
        out_channels=4,
        conditioning_dim=16,
        block_out_channels=(16, 16),
        num_attention_heads=(0, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        down_blocks_repeat_mappers=(1, 1),
        up_blocks_repeat_mappers=(1, 1),
        block_types_per_layer=(("SDCascadeResBlock",), ("SDCascadeResBlock", "SDCascadeAttnBlock")),
        clip_text_pooled_in_channels=16,
        clip_seq=2,
        patch_size=1,
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
        unprobed=UNET,
        hidden_size=32,
        cond_embed_dim=16,
        micro_cond_encode_dim=4,
        micro_cond_embed_dim=20,
        encoder_hidden_size=16,
        vocab_size=17,
        codebook_size=16,
        in_channels=32,
        block_out_channels=32,
        num_res_blocks=1,
        block_num_heads=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    ),
    case(
        "UNet3DConditionModel",
        video_unet(),
        "",
        unprobed=UNET,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        cross_attention_dim=32,
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    ),
    case(
        "I2VGenXLUNet",
        video_unet(
            fps=torch.tensor([16]),
            image_latents=normal(1, 4, T, H, W),
            image_embeddings=normal(1, 32),
        ),
        "",
        unprobed=UNET,
        block_out_channels=(64, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        norm_num_groups=8,
        attention_head_dim=8,
        num_attention_heads=2,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    ),
    case(
        "UNetMotionModel",
        video_unet(encoder_hidden_states=normal(T, TEXT, 32)),
        "",
        unprobed=UNET,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        cross_attention_dim=32,
        norm_num_groups=8,
        motion_num_attention_heads=2,
        num_attention_heads=2,
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
    ),
    case(
        "UNetSpatioTemporalConditionModel",
        lambda: {
            "sample": normal(1, T, 8, H, W),
            "encoder_hidden_states": normal(1, 1, 32),
            "added_time_ids": torch.ones(1, 3),
            "timestep": torch.tensor([5.0]),
        },
        "",
        unprobed=UNET,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        cross_attention_dim=32,
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
        num_attention_heads=(2, 2),
        num_frames=T,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    ),
    case(
        "UNetControlNetXSModel",
        controlled(),
        "",
        unprobed=UNET,
        block_out_channels=WIDTHS,
        cross_attention_dim=32,
        norm_num_groups=8,
        num_attention_heads=2,
        ctrl_conditioning_embedding_out_channels=(16, 16),
        ctrl_block_out_channels=(8, 16),
        ctrl_num_attention_heads=2,
        ctrl_max_norm_num_groups=4,
        **DOWN,
        **UP,
    ),
    case(
        "AudioLDM2UNet2DConditionModel",
        lambda: {
            "sample": normal(2, 4, H, W),
            "encoder_hidden_states": normal(2, TEXT, 32),
            "encoder_hidden_states_1": normal(2, TEXT, 32),
        },
        "",
        unprobed=UNET,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        cross_attention_dim=[[None, 32, 32]] * 2,
        norm_num_groups=8,
        attention_head_dim=8,
        **DOWN,
        **UP,
    ),
    case(
        "ControlNetModel",
        controlled(),
        "",
        unprobed=UNET,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        cross_attention_dim=32,
        norm_num_groups=8,
        **CONTROL,
    ),
    case(
        "ControlNetUnionModel",
        controlled(
            controlnet_cond=[normal(2, 3, 2 * H, 2 * W)],
            control_type=torch.eye(6)[:1].repeat(2, 1),
            control_type_idx=[0],
            conditioning_scale=[1.0],
        ),
        "",
        unprobed=UNET,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        cross_attention_dim=32,
        norm_num_groups=8,
        num_trans_channel=32,
        num_trans_head=2,
        num_proj_channel=32,
        addition_time_embed_dim=8,
        **CONTROL,
    ),
    case(
        "SparseControlNetModel",
        controlled(
            sample=normal(1, 4, T, H, W),
            controlnet_cond=normal(1, 4, T, H, W),
            conditioning_mask=torch.ones(1, 1, T, H, W),
            encoder_hidden_states=normal(T, TEXT, 32),
            timestep=torch.tensor([5.0]),
        ),
        "",
        unprobed=UNET,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        cross_attention_dim=32,
        norm_num_groups=8,
        attention_head_dim=8,
        motion_num_attention_heads=2,
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        concat_conditioning_mask=True,
    ),
    case(
        "FluxControlNetModel",
        lambda: {
            **flux_inputs(),
            "controlnet_cond": normal(2, H * W, 4),
            "pooled_projections": normal(2, 8),
            **HALF,
        },
        "hidden_states BLC",
        text="encoder_hidden_states",
        **FLUX_CONTROL,
        axes_dims_rope=(4, 4, 8),
        pooled_projection_dim=8,
        guidance_embeds=False,
    ),
    case(
        "SD3ControlNetModel",
        lambda: {"controlnet_cond": IMAGE, "pooled_projections": normal(2, 8)},
        text="encoder_hidden_states",
        sample_size=16,
        in_channels=4,
        num_layers=2,
        **HEADS,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=16,
        extra_conditioning_channels=0,
    ),
    case(
        "QwenImageControlNetModel",
        lambda: {
            "controlnet_cond": normal(2, H * W, 4),
            "encoder_hidden_states_mask": torch.ones(2, TEXT),
            "img_shapes": [(1, H, W)] * 2,
            **HALF,
        },
        "hidden_states BLC",
        text="encoder_hidden_states",
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        **HEADS,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
        extra_condition_channels=0,
    ),
    Case(
        "HunyuanDiT2DControlNetModel",
        model(
            "HunyuanDiT2DControlNetModel",
            sample_size=32,
            patch_size=2,
            in_channels=4,
            transformer_num_layers=4,
            **images.HUNYUAN_DIT,
        ),
        lambda: {
            **next(case for case in images.CASES if case.name == "HunyuanDiT2DModel").inputs(),
            "controlnet_cond": IMAGE,
        },
    ),
]
