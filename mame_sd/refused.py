"""List models that can't merge by class name, each with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Denoisers of diffusers.
_LINEAR = "its self-attention is linear in the tokens already, so merging has nothing to save"
_SPARSE = (
    "its attention goes by blocks of keys that the model picks (flex attention): no softmax over"
    " all of them"
)
_NEIGHBOURS = "its attention is over a window around each pixel already, by a block mask"
_SOUND = "its tokens are sound, in a row: there is no image"
_NO_IMAGE = "its tokens are no image's"

DIFFUSERS = {
    "SanaTransformer2DModel": _LINEAR,
    "SanaVideoTransformer3DModel": _LINEAR,
    "SanaControlNetModel": _LINEAR,
    "SanaWMTransformer3DModel": (
        "three of four of its layers are linear in the tokens, and the fourth takes no hidden"
        " states"
    ),
    "AnyFlowFARTransformer3DModel": _SPARSE,
    "Kandinsky6SRTransformer3DModel": _SPARSE,
    "WanAnimate2Transformer3DModel": _SPARSE,
    "LTX2VideoDiffusionDecoderModel": _NEIGHBOURS,
    "AceStepTransformer1DModel": _SOUND,
    "LongCatAudioDiTTransformer": _SOUND,
    "MiniMaxMusic3RVQDepthDecoder": _SOUND,
    "MiniMaxMusic3Transformer1DModel": _SOUND,
    "StableAudio3DiTModel": _SOUND,
    "StableAudioDiTModel": _SOUND,
    "T5FilmDecoder": _SOUND,
    "UNet1DModel": _SOUND,
    "PriorTransformer": _NO_IMAGE,
    "RFD4ProteinaTransformer": _NO_IMAGE,
    "TransformerTemporalModel": "its attention is over the frames of each pixel",
}

# Vision transformers that can't work with fewer tokens.
_WINDOWS = "its attention works in windows of the image, which needs every token"
_BIAS = "its attention adds a bias for each pair of positions, and merged tokens have no position"
_ROTARY = (
    "its attention rotates queries and keys by position, and a merged token has no single position"
)
_DECODER = "its decoder needs every token; apply to its encoder, model.{}, alone"
_DENSE = "its output puts every token at its place in the image"
_PYRAMID = (
    "its stages fold tokens by their positions in the image and apply convolutions to them, which"
    " needs every token"
)
_DIVIDED = "it attends over frames and over positions separately, which needs every token"
ENCODERS = {
    name: reason
    for names, reason in (
        ("SwinModel SwinBackbone Swinv2Model Swinv2Backbone MaskFormerSwinModel", _WINDOWS),
        ("DonutSwinModel Mask2FormerSwinModel HieraModel HieraBackbone", _WINDOWS),
        ("SwinTransformer SwinTransformerV2 SwinTransformerV2Cr", _WINDOWS),
        ("BeitModel BeitBackbone Data2VecVisionModel Beit VisionTransformerRelPos", _BIAS),
        ("DINOv3ViTModel DINOv3ViTBackbone Eva PixtralVisionModel VJEPA2Model", _ROTARY),
        ("ViTForMaskedImageModeling DeiTForMaskedImageModeling", _DENSE),
        ("ViTMAEForPreTraining", _DECODER.format("vit")),
        ("VideoMAEForPreTraining", _DECODER.format("videomae")),
        ("SegformerModel SegformerEncoder PvtModel PvtV2Model GLPNModel", _PYRAMID),
        ("TimesformerModel", _DIVIDED),
    )
    for name in names.split()
}

# Language models that read images, whose visual tokens can't get fewer.
_QUERIES = "its language model reads a fixed number of queries already"
_FOLDED = "it folds neighbouring patches into one, which needs every patch"
CAPTIONERS = {
    f"{name}ForConditionalGeneration": reason
    for name, reason in {
        "Qwen3VL": "first layers of its language model add its tower's features to image tokens",
        "Blip2": _QUERIES,
        "InstructBlip": _QUERIES,
        "LlavaOnevision": "it resizes its grid of patches, and merged patches form no grid",
        "VideoLlava": "it has two vision towers",
        "PaliGemma": "its mask for image tokens is made for all of them",
        "Idefics3": _FOLDED,
        "SmolVLM": _FOLDED,
    }.items()
}

# Models of ComfyUI: the usual name, and the reason.
UNKNOWN_PLACE = "the node does not know yet where the image is in its sequence"
_HIDDEN = "ComfyUI lets no node change its attention"
_CAUSAL = "its frames attend to a cache of the keys of earlier frames"
COMFYUI = {
    "CausalWanModel": ("Wan CausVid and Self-Forcing", _CAUSAL),
    "WanAnimate2Model": ("Wan Animate 2", "its attention works in windows of frames"),
    "PixArtMS": ("PixArt", _HIDDEN),
    "HunYuanDiT": ("HunyuanDiT", _HIDDEN),
    "ErnieImageModel": ("ERNIE-Image", _HIDDEN),
    "StageC": ("Stable Cascade", UNKNOWN_PLACE),
    "StageB": ("Stable Cascade", UNKNOWN_PLACE),
    "PixDiT_T2I": ("PixelDiT", UNKNOWN_PLACE),
    "HiDreamO1Transformer": ("HiDream O1", "it computes its prompt in a separate pass"),
}


def refused_as(model: Any, table: Mapping[str, Any]) -> str | None:
    """Return the class name under which a table refuses a model, or one of its bases; else None."""
    return next((kind.__name__ for kind in type(model).__mro__ if kind.__name__ in table), None)


def known_as(kind: str) -> str:
    """Return a model's usual name for its class: "Flux2Transformer2DModel" is Flux 2."""
    name = re.sub(r"(?<!^)(Transformer|UNet|DiT)([123]D)?(Model)?$", "", kind)
    return re.sub(r"(?<=[a-zA-Z])(?=\d)(?!\dD)|(?<=\d)(?=[A-CE-Z])", " ", name)
