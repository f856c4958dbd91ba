"""Rows of the matrix: pipelines around a UNet."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.builders.pipelines import (
    SIDE,
    animatediff,
    controlnet,
    kandinsky,
    noise,
    once,
    run_animatediff,
    run_kandinsky,
    run_stable_video,
    sd,
    sdxl,
    stable_video,
)
from tests.builders.tiny import tiny_pipeline
from tests.matrix.models.registry import MODELS
from tests.matrix.rows import Row

LEVELS = {256: 3, 64: 4}  # what tiny_unet merges at its own size

SAME: dict[str, Any] = {"processor": "same", "loads": True}

ROWS = [
    Row("Stable Diffusion: text to image", tiny_pipeline, once, LEVELS, **SAME),
    Row(
        "12 x 20 latent (no square)",
        tiny_pipeline,
        partial(once, height=24, width=40),
        {240: 3, 60: 4},
        processor="set",
        one_liner="needs `size=(12, 20)`",
    ),
    Row(
        "ControlNet",
        lambda: sd("StableDiffusionControlNetPipeline", controlnet=controlnet()),
        partial(once, image=noise(1, 3, SIDE, SIDE)),
        LEVELS,
        **SAME,
        note="the UNet merges, the ControlNet does not",
    ),
    Row(
        "ControlNet merged too",
        lambda: sd("StableDiffusionControlNetPipeline", controlnet=controlnet()),
        partial(once, image=noise(1, 3, SIDE, SIDE)),
        {256: 1, 64: 2},
        target=lambda pipe: pipe.controlnet,
        note="`apply_mame(pipe.controlnet)`",
    ),
    Row("SDXL", sdxl, once, {64: 8}, **SAME),
    Row(
        "Kandinsky 2.2 decoder",
        kandinsky,
        run_kandinsky,
        {64: 4},
        modes={"keep": {"keep": 0.5}},
        processor="set",
        one_liner="nothing merges",
        note="by `keep` alone: the text's (added) keys stand first",
    ),
    Row(
        "AnimateDiff",
        animatediff,
        run_animatediff,
        LEVELS,
        processor="same",
        note="attention over frames never merges",
    ),
    Row(
        "Stable Video Diffusion",
        lambda: stable_video(MODELS["UNetSpatioTemporalConditionModel"].build()),
        run_stable_video,
        {256: 3, 64: 1},
        note="attention over frames never merges",
    ),
]
