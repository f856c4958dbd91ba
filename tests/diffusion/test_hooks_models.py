"""apply_mame beside what else changes a model (adapters, slicing, PAG, ...), and on video and
transformers: which tokens merge.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import (
    I2VGenXLUNet,
    UNet2DConditionModel,
    UNet3DConditionModel,
)
from diffusers.models.attention_processor import Attention, AttnProcessor2_0, FusedAttnProcessor2_0

from mame_sd import apply_mame, remove_mame
from mame_sd.diffusion.apply_denoiser import has_hooks
from tests.builders.pipelines import SIDE, animatediff
from tests.builders.tiny import (
    generate,
    run_unet,
    seeded,
    tiny_pipeline,
    tiny_unet,
    unet_inputs,
)
from tests.builders.transformers import normal

MERGING = {"tau": 0.2, "min_tokens": 40}
VIDEO: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 8,
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
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


@pytest.mark.parametrize("fields", [{"tau": 0.2}, {"keep": 0.4}], ids=["tau", "keep"])
def test_survives_fused_projections(fields: dict[str, Any]) -> None:
    unet = tiny_unet()
    handle = apply_mame(unet, min_tokens=40, **fields)
    before = run_unet(unet)
    unet.fuse_qkv_projections()
    handle.reset()
    torch.testing.assert_close(run_unet(unet), before, rtol=1e-4, atol=1e-5)
    assert all(layer.merged for layer in handle.report().layers)
    assert all(type(p) is FusedAttnProcessor2_0 for p in unet.attn_processors.values())
    unet.unfuse_qkv_projections()
    assert torch.equal(run_unet(unet), before)


@pytest.mark.parametrize("fields", [{"tau": 0.2}, {"keep": 0.4}], ids=["tau", "keep"])
def test_survives_slicing_and_default_processors(fields: dict[str, Any]) -> None:
    pipe = tiny_pipeline()
    handle = apply_mame(pipe, min_tokens=40, **fields)
    before = run_unet(pipe.unet)
    pipe.enable_attention_slicing()
    torch.testing.assert_close(run_unet(pipe.unet), before, rtol=1e-4, atol=1e-5)
    pipe.disable_attention_slicing()
    torch.testing.assert_close(run_unet(pipe.unet), before, rtol=1e-4, atol=1e-5)
    pipe.unet.set_attn_processor(AttnProcessor2_0())
    assert torch.equal(run_unet(pipe.unet), before)
    assert all(layer.calls == 4 for layer in handle.report().layers)


def test_survives_freeu_and_ip_adapter_and_leaves_cross_attention_alone() -> None:
    pipe = tiny_pipeline()
    handle = apply_mame(pipe, **MERGING)
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    pipe.unet.set_attn_processor({**pipe.unet.attn_processors})
    run_unet(pipe.unet)
    assert all(layer.merged for layer in handle.report().layers)
    pipe.disable_freeu()
    generator = torch.Generator().manual_seed(0)
    adapter: dict[str, torch.Tensor] = {}
    for i, (name, attn) in enumerate(
        (n, m) for n, m in pipe.unet.named_modules() if n.endswith("attn2")
    ):
        for part in ("to_k_ip", "to_v_ip"):
            adapter[f"{2 * i + 1}.{part}.weight"] = torch.randn(
                attn.inner_dim, 16, generator=generator
            )
        assert name
    projection = {
        "proj.weight": torch.randn(4 * 16, 16, generator=generator),
        "proj.bias": torch.zeros(4 * 16),
        "norm.weight": torch.ones(16),
        "norm.bias": torch.zeros(16),
    }
    pipe.unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": adapter}])
    handle.reset()
    with torch.no_grad():
        sample = torch.randn(1, 4, 16, 16, generator=generator)
        text = torch.randn(1, 7, 16, generator=generator)
        image = {"image_embeds": [torch.randn(1, 1, 16, generator=generator)]}
        pipe.unet(sample, torch.tensor(500), text, added_cond_kwargs=image)
    assert all(layer.merged and layer.calls == 1 for layer in handle.report().layers)
    assert sum("IPAdapter" in type(p).__name__ for p in pipe.unet.attn_processors.values()) == 7


def test_pag_merges_perturbed_layers_too() -> None:
    from diffusers import StableDiffusionPAGPipeline

    pipe = StableDiffusionPAGPipeline(
        **tiny_pipeline().components, requires_safety_checker=False, pag_applied_layers=["mid"]
    )
    pipe.set_progress_bar_config(disable=True)
    handle = apply_mame(pipe, keep=0.4, min_tokens=40)
    generate(pipe, pag_scale=2.0)
    assert all(layer.merged for layer in handle.report().layers)


def test_split_inference_of_free_noise_gives_the_same_video() -> None:
    """A chunk of two frames is no guided pair."""
    pipe, videos = animatediff(), []
    pipe.enable_free_noise(context_length=4, context_stride=2)
    apply_mame(pipe, min_tokens=16)
    for split in (False, True):
        if split:
            pipe.enable_free_noise_split_inference(temporal_split_size=2, spatial_split_size=256)
        call = {"num_frames": 4, "num_inference_steps": 1, "output_type": "pt", "height": SIDE}
        generator = torch.Generator().manual_seed(0)
        videos.append(
            pipe("a red key", negative_prompt="a", generator=generator, width=SIDE, **call)
        )
    torch.testing.assert_close(videos[1].frames, videos[0].frames, rtol=0, atol=1e-4)


def test_autoencoder_and_text_encoder_of_a_pipeline_are_not_hooked() -> None:
    pipe = tiny_pipeline()
    apply_mame(pipe, **MERGING)
    assert has_hooks(pipe.unet)
    assert not has_hooks(pipe.vae)
    assert not has_hooks(pipe.text_encoder)


def test_video_unet_merges_pixels_and_never_frames() -> None:
    unet = seeded(UNet3DConditionModel, 0, **VIDEO)
    generator = torch.Generator().manual_seed(0)
    video, text = (
        torch.randn(1, 4, 3, 8, 12, generator=generator),
        torch.randn(1, 7, 16, generator=generator),
    )
    handle = apply_mame(unet, tau=0.1, min_tokens=1)
    with torch.no_grad():
        unet(video, torch.tensor(500), text)
    assert {layer.size for layer in handle.report().layers} == {(8, 12), (4, 6)}


def test_i2vgen_is_hooked_on_pixels_and_never_on_frames() -> None:
    unet = seeded(I2VGenXLUNet, 0, **VIDEO)
    assert any(
        "image_latents_temporal_encoder" in path and isinstance(m, Attention)
        for path, m in unet.named_modules()
    )
    hooked = [layer.name for layer in apply_mame(unet, tau=0.1, min_tokens=1).report().layers]
    assert hooked
    assert all(".attentions." in name and name.endswith("attn1") for name in hooked)


def test_image_tokens_among_others_are_left_alone() -> None:
    unet = tiny_unet(attention_type="gated", cross_attention_dim=16)
    handle = apply_mame(unet, **MERGING)
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


def test_adapters_loaded_after_applying_take_part() -> None:
    peft = pytest.importorskip("peft")
    unet = tiny_unet()
    apply_mame(unet, **MERGING)
    before = run_unet(unet)
    unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"]))
    assert torch.equal(run_unet(unet), before)  # a new adapter adds nothing
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    assert not torch.equal(run_unet(unet), before)


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
