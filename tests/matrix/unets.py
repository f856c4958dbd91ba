"""Rows of the matrix: pipelines around a UNet, and UNets by themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tests.builders.pipelines import SIDE, controlnet, noise, once, sd, sdxl
from tests.builders.tiny import LATENT, tiny_pipeline
from tests.matrix.models.others import KANDINSKY, LATENT_UPSCALER
from tests.matrix.models.registry import MODELS
from tests.matrix.rows import Row
from tests.matrix.transformers import row

LEVELS = {256: 3, 64: 4}  # what tiny_unet merges at its own size
SQUARE = {"sample": noise(1, 4, 3, LATENT, LATENT)}  # whose sides a processor knows
VIDEO = MODELS["UNetMotionModel"]
MOTION = replace(VIDEO, inputs=lambda: {**VIDEO.inputs(), **SQUARE})
SAME: dict[str, Any] = {"processor": "same", "loads": True}

ROWS = [
    Row("Stable Diffusion: text to image", tiny_pipeline, once, LEVELS, **SAME),
    Row(
        "ControlNet",
        lambda: sd("StableDiffusionControlNetPipeline", controlnet=controlnet()),
        partial(once, image=noise(1, 3, SIDE, SIDE)),
        LEVELS,
        **SAME,
    ),
    Row(
        "ControlNet merged too",
        lambda: sd("StableDiffusionControlNetPipeline", controlnet=controlnet()),
        partial(once, image=noise(1, 3, SIDE, SIDE)),
        {256: 1, 64: 2},
        target=lambda pipe: pipe.controlnet,
    ),
    Row("SDXL", sdxl, once, {64: 8}, **SAME),
    row(
        "Kandinsky 2.2 decoder",
        KANDINSKY,
        {64: 4},
        modes={"keep": {"keep": 0.5}},
        processor="",
    ),
    row("Latent upscaler", LATENT_UPSCALER, {24: 4}, processor="", min_tokens=16),
    row("AnimateDiff", MOTION, {256: 3, 64: 1}, processor="same"),
]
