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


def sdxl() -> Any:
    """A StableDiffusionXLPipeline; its two text encoders give TEXT_DIM values each."""
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


def one_step(pipe: Any, *args: Any, **call: Any) -> Any:
    """What a call of one step gives, seeded, of SIDE x SIDE pixels."""
    generator = torch.Generator().manual_seed(0)
    size = {"height": SIDE, "width": SIDE, "num_inference_steps": 1, "output_type": "pt"}
    return pipe(*args, generator=generator, **size, **call)


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
    embeds = {
        "image_embeds": noise(1, TEXT_DIM),
        "negative_image_embeds": noise(1, TEXT_DIM, seed=8),
    }
    return one_step(pipe, **embeds).images


def animatediff() -> Any:
    parts = tiny_components()
    del parts["safety_checker"], parts["requires_safety_checker"]
    adapter = seeded(
        diffusers.MotionAdapter,
        5,
        block_out_channels=(16, 32),
        motion_layers_per_block=1,
        motion_num_attention_heads=2,
        motion_norm_num_groups=8,
    )
    return quiet(diffusers.AnimateDiffPipeline(**parts, motion_adapter=adapter))


def run_animatediff(pipe: Any) -> Tensor:
    return one_step(pipe, "a red key", num_frames=4).frames


def stable_video(unet: Any) -> Any:
    """Stable Video Diffusion around a UNet that takes embeddings of 32 values."""
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
        projection_dim=32,
    )
    vae = seeded(
        AutoencoderKLTemporalDecoder,
        1,
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        sample_size=SIDE,
    )
    scheduler = diffusers.EulerDiscreteScheduler(
        prediction_type="v_prediction",
        timestep_type="continuous",
        sigma_min=0.1,
        sigma_max=10.0,
        use_karras_sigmas=True,
        interpolation_type="linear",
    )
    pipe = diffusers.StableVideoDiffusionPipeline(
        vae=vae,
        image_encoder=seeded(CLIPVisionModelWithProjection, 2, vision),
        unet=unet,
        scheduler=scheduler,
        feature_extractor=CLIPImageProcessor(crop_size=32, size=32),
    )
    return quiet(pipe)


def run_stable_video(pipe: Any) -> Tensor:
    return one_step(pipe, noise(1, 3, SIDE, SIDE), num_frames=3).frames
