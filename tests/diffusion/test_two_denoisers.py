"""A pipeline with two denoisers: both merge, the report names each, and removal leaves no trace on
either.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline
from torch import Tensor, nn

from mame_sd import apply_mame, mame, remove_mame
from mame_sd.diffusion.apply_denoiser import denoiser_of, has_hooks
from tests.builders.tiny import seeded
from tests.builders.transformers import TEXT, normal
from tests.matrix.transformers import WAN

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
        transformer=WAN(),
        transformer_2=WAN(),
        boundary_ratio=0.8,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def once(pipe: Any) -> Tensor:
    output: Tensor = pipe(
        prompt_embeds=normal(1, TEXT, 16),
        negative_prompt_embeds=normal(1, TEXT, 16, seed=1),
        height=SIDE,
        width=SIDE,
        num_frames=FRAMES,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        return_dict=False,
    )[0]
    return output


def test_both_transformers_of_wan_22_merge() -> None:
    pipe = wan22()
    before = once(pipe)
    handle = apply_mame(pipe, keep=0.5, min_tokens=1)
    merged = once(pipe)
    assert not torch.equal(merged, before)
    report = handle.report()
    assert {layer.name.partition(".")[0] for layer in report.layers if layer.merged} == {
        "transformer",
        "transformer_2",
    }
    assert {layer.calls for layer in report.layers} == {4}  # each has two steps, of two calls
    handle.active = False
    assert torch.equal(once(pipe), before)
    handle.active = True
    assert torch.equal(once(pipe), merged)
    remove_mame(pipe)
    assert not has_hooks(pipe)
    assert torch.equal(once(pipe), before)
    with mame(pipe, keep=0.5, min_tokens=1):
        assert torch.equal(once(pipe), merged)
    assert torch.equal(once(pipe), before)


def test_a_lone_denoiser_is_taken_as_it_is() -> None:
    pipe = wan22()
    assert isinstance(denoiser_of(pipe), nn.ModuleDict)
    pipe.transformer_2 = None
    assert denoiser_of(pipe) is pipe.transformer
