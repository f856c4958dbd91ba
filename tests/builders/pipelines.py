"""diffusers' pipelines around a tiny UNet, and one call of each."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKLTemporalDecoder, ControlNetModel, VQModel
from torch import Tensor
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

from tests.builders.tiny import (
    FACTOR,
    LATENT,
    TEXT_DIM,
    generate,
    seeded,
    tiny_components,
    tiny_motion_adapter,
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
    """diffusers' pipeline class of that name around the parts of the tiny Stable Diffusion,
    `changes` over them.
    """
    parts = {**tiny_components(), **changes}
    return quiet(getattr(diffusers, name)(**parts))


def tiny_text_encoder_2(tokenizer: Any) -> CLIPTextModelWithProjection:
    """SDXL's second text encoder, projecting to TEXT_DIM."""
    config = CLIPTextConfig(
        **{**tiny_text_encoder(tokenizer).config.to_dict(), "projection_dim": TEXT_DIM}
    )
    return seeded(CLIPTextModelWithProjection, 4, config)


def sdxl(name: str, **changes: Any) -> Any:
    """The SDXL pipeline class of that name."""
    tokenizer = tiny_tokenizer()
    unet = tiny_sdxl_unet(
        cross_attention_dim=2 * TEXT_DIM,
        projection_class_embeddings_input_dim=6 * 4 + TEXT_DIM,
        **changes.pop("unet", {}),
    )
    return quiet(
        getattr(diffusers, name)(
            vae=tiny_vae(),
            text_encoder=tiny_text_encoder(tokenizer),
            tokenizer=tokenizer,
            text_encoder_2=tiny_text_encoder_2(tokenizer),
            tokenizer_2=tokenizer,
            unet=unet,
            scheduler=tiny_scheduler("dpm++"),
            add_watermarker=False,
            **changes,
        )
    )


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


def kandinsky() -> Any:
    movq = seeded(
        VQModel,
        1,
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        num_vq_embeddings=8,
        norm_type="spatial",
        vq_embed_dim=4,
    )
    unet = tiny_unet(
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        addition_embed_type="image",
        encoder_hid_dim=TEXT_DIM,
        encoder_hid_dim_type="image_proj",
        out_channels=8,
        resnet_time_scale_shift="scale_shift",
        class_embed_type=None,
        attention_head_dim=8,
    )
    return quiet(diffusers.KandinskyV22Pipeline(unet=unet, scheduler=tiny_scheduler(), movq=movq))


def run_kandinsky(pipe: Any) -> Tensor:
    return pipe(
        image_embeds=noise(1, TEXT_DIM),
        negative_image_embeds=noise(1, TEXT_DIM, seed=8),
        height=SIDE,
        width=SIDE,
        num_inference_steps=1,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    ).images


def animatediff() -> Any:
    parts = {
        k: v
        for k, v in tiny_components().items()
        if k not in ("safety_checker", "requires_safety_checker")
    }
    return quiet(diffusers.AnimateDiffPipeline(**parts, motion_adapter=tiny_motion_adapter()))


def run_animatediff(pipe: Any) -> Tensor:
    call = {
        "num_frames": 4,
        "num_inference_steps": 1,
        "output_type": "pt",
        "height": SIDE,
        "width": SIDE,
    }
    return pipe("a red key", generator=torch.Generator().manual_seed(0), **call).frames


def stable_video() -> Any:
    unet = seeded(
        diffusers.UNetSpatioTemporalConditionModel,
        0,
        sample_size=LATENT,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=TEXT_DIM,
        num_attention_heads=(2, 4),
        projection_class_embeddings_input_dim=96,
        addition_time_embed_dim=32,
        num_frames=4,
    )
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
        projection_dim=TEXT_DIM,
    )
    return quiet(
        diffusers.StableVideoDiffusionPipeline(
            vae=seeded(
                AutoencoderKLTemporalDecoder,
                1,
                block_out_channels=(32, 32),
                down_block_types=("DownEncoderBlock2D",) * 2,
                latent_channels=4,
                layers_per_block=1,
                sample_size=SIDE,
            ),
            image_encoder=seeded(CLIPVisionModelWithProjection, 2, vision),
            unet=unet,
            scheduler=diffusers.EulerDiscreteScheduler(
                prediction_type="v_prediction",
                timestep_type="continuous",
                sigma_min=0.1,
                sigma_max=10.0,
                use_karras_sigmas=True,
                interpolation_type="linear",
            ),
            feature_extractor=CLIPImageProcessor(crop_size=32, size=32),
        )
    )


def run_stable_video(pipe: Any) -> Tensor:
    call = {
        "height": SIDE,
        "width": SIDE,
        "num_frames": 4,
        "num_inference_steps": 1,
        "output_type": "pt",
    }
    return pipe(noise(1, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(0), **call).frames
