"""Rows of the matrix: diffusers' transformers at tiny size, images that are not square."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tests.builders.transformers import HEADS, PATCHED, reference_image, run
from tests.matrix.models import refusals
from tests.matrix.models.case import Case, case
from tests.matrix.models.registry import MODELS
from tests.matrix.rows import Row


def row(name: str, model: str | Case, merges: dict[int, int], **kwargs: Any) -> Row:
    """A row of a model of the registry, by its class, or of another one."""
    known = MODELS[model] if isinstance(model, str) else model
    inputs = known.inputs()
    call = partial(run, inputs)
    return Row(name, known.build, call, merges, inputs, **{"processor": "error", **kwargs})


FLUX, SD3 = MODELS["FluxTransformer2DModel"], MODELS["SD3Transformer2DModel"]
KONTEXT = replace(FLUX, inputs=lambda: {**FLUX.inputs(), **reference_image()})
SD35 = case(
    SD3.name,
    SD3.inputs,
    **PATCHED,
    **HEADS,
    joint_attention_dim=16,
    caption_projection_dim=32,
    pooled_projection_dim=8,
    out_channels=4,
    dual_attention_layers=(0,),
    qk_norm="rms_norm",
)
NEWEST = "0.42.0"  # the version of diffusers that has the rows at the end
PASSES_MORE = {
    "processor": "set",
    "one_liner": "error: its attention passes arguments that other processors don't take",
}
ROWS = [
    row("PixArt", "PixArtTransformer2DModel", {96: 2}, processor="set", one_liner="needs `size`"),
    row("DiT", "DiTTransformer2DModel", {256: 2}, processor="none"),
    row("HunyuanDiT", "HunyuanDiT2DModel", {96: 4}, note="keys merge after rotation"),
    row(
        "Lumina-Next",
        "LuminaNextDiT2DModel",
        {96: 2},
        processor="none",
        note="keys merge after rotation",
    ),
    row("Stable Diffusion 3", "SD3Transformer2DModel", {96: 2}, note="text never merges"),
    row("Stable Diffusion 3.5", SD35, {96: 3}, note="its second attention merges too"),
    row(
        "Flux",
        "FluxTransformer2DModel",
        {96: 4},
        loads=True,
        note="double and single blocks; text never merges; keys merge after rotation",
    ),
    row("Flux Kontext", KONTEXT, {96: 4}, note="the reference image's tokens stay as they are"),
    row(
        "Flux Kontext, `references=0.5`",
        KONTEXT,
        {120: 4},
        modes={"keep": {"keep": 0.5, "references": 0.5}},
        processor="set",
        one_liner="error",
        note="the reference image merges on its own grid",
    ),
    row("Chroma", "ChromaTransformer2DModel", {96: 4}, note="its mask is selected too"),
    row(
        "Qwen-Image",
        "QwenImageTransformer2DModel",
        {96: 2},
        note="text never merges; keys merge after rotation",
    ),
    row(
        "AuraFlow",
        "AuraFlowTransformer2DModel",
        {96: 2},
        note="text and register tokens never merge",
    ),
    row(
        "Wan (video)",
        "WanTransformer3DModel",
        {288: 2},
        loads=True,
        note="tiles over time and space; keys merge after rotation",
    ),
    row(
        "LTX-Video",
        "LTXVideoTransformer3DModel",
        {288: 2},
        note="tiles over time and space; keys merge after rotation",
    ),
    row(
        "CogVideoX",
        "CogVideoXTransformer3DModel",
        {288: 2},
        note="tiles over time and space; text never merges; keys merge after rotation",
    ),
    row(
        "Sana",
        refusals.LINEAR[0],
        {},
        processor="set",
        one_liner="never: it cannot see that it replaces linear attention",
        refused="linear in the tokens already",
        note="refused: its attention is linear already",
    ),
    *(
        row(name, model, merges, modes={"keep": {"keep": 0.5}}, since=NEWEST, **told)
        for name, model, merges, told in (
            ("Flux 2", "Flux2Transformer2DModel", {96: 2}, {}),
            ("Z-Image", "ZImageTransformer2DModel", {96: 3}, {"processor": "none", "loads": True}),
            ("Krea 2", "Krea2Transformer2DModel", {96: 2}, {}),
            ("Qwen-Image 2.1", "QwenImage21Transformer2DModel", {96: 2}, PASSES_MORE),
            ("HunyuanVideo 1.5", "HunyuanVideo15Transformer3DModel", {288: 1}, {}),
            ("LTX-2", "LTX2VideoTransformer3DModel", {288: 2}, {}),
        )
    ),
]
