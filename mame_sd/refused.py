"""List models that can't merge by class name, each with the reason.

Denoisers of diffusers are in `mame_sd.diffusion.families.refused`.
"""

from __future__ import annotations

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
    "StageC": ("Stable Cascade", UNKNOWN_PLACE),
    "StageB": ("Stable Cascade", UNKNOWN_PLACE),
    "PixDiT_T2I": ("PixelDiT", UNKNOWN_PLACE),
    "HiDreamO1Transformer": ("HiDream O1", "it computes its prompt in a separate pass"),
}
