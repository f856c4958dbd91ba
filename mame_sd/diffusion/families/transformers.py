"""The families of diffusers' transformers, and the models that are left alone on purpose.

UNets, DiT and PixArt need none: their self-attention has nothing beside its tokens (`unet.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.diffusion.families.family import REGISTERED, Family, Rows
from mame_sd.diffusion.shipped import shipped_with
from mame_sd.diffusion.tokens import Call, Tokens

# Of image transformers with text beside whose tokens carry their positions: nearer than a quarter of the keys, and as fast or faster
# (docs/results.md). With rotary positions, which a merged query would have one of, that was not measured.
WHOLE = 0.625
DECIDES = ("tau", "keep", "merge", "weights", "variant", "preset")
# Models for which merging is refused, with the reason.
EXCLUDED = {
    "SanaTransformer2DModel": "its self-attention is linear in the tokens already, so merging has nothing to save",
    "SanaVideoTransformer3DModel": "its self-attention is linear in the tokens already, so merging has nothing to save",
    "SanaControlNetModel": "its self-attention is linear in the tokens already, so merging has nothing to save",
    "Lumina2Transformer2DModel": "captions of unequal length put the image's tokens at other positions in each sample",
    "StableCascadeUNet": "each attention takes image and text together as its keys",
    "ZImageTransformer2DModel": "captions of unequal length put the image's tokens at other positions in each sample",
}


def patches(model: Any, call: Call) -> Tokens:
    """An image [B, C, H, W] in square patches."""
    side = model.config["patch_size"]
    return Tokens((call["hidden_states"].shape[-2] // side, call["hidden_states"].shape[-1] // side))


def video_patches(model: Any, call: Call) -> Tokens:
    """A video [B, C, T, H, W] in patches of the model's own (t, h, w)."""
    sides = model.config["patch_size"]
    return Tokens(tuple(n // side for n, side in zip(call["hidden_states"].shape[-3:], sides, strict=True)))


def packed(model: Any, call: Call) -> Tokens:
    """Flux: tokens [B, L, C] with their (image, row, column) in `img_ids`; tokens of further images stay as they are. Rows and
    columns are unknown where those of the first image are no grid, row after row.

    Reading the ids waits for the device once per forward of the model.
    """
    ids = call["img_ids"]
    ids = (ids[0] if ids.dim() == 3 else ids).cpu().long()  # [L, 3]
    same = ids[:, 0] == ids[0, 0]
    places = ids[: int(same.sum()), 1:3]
    places = places - places.amin(0)
    h, w = (int(n) + 1 for n in places.amax(0))
    mode = int(getattr(model, "union", False))  # a ControlNet-Union puts a token of its mode before the text
    before = mode + call["encoder_hidden_states"].shape[1]
    grid = len(places) == h * w and bool(same[: h * w].all())
    if grid and torch.equal(places, torch.cartesian_prod(*(torch.arange(n, device="cpu") for n in (h, w)))):
        return Tokens((h, w), before=before, after=ids.shape[0] - h * w)
    if same[: len(places)].all():
        return Tokens((len(places),), before=before, after=ids.shape[0] - len(places))
    return Tokens((ids.shape[0],), before=before)


def shapes_given(model: Any, call: Call) -> Tokens:
    """Qwen-Image: `img_shapes`, one (t, h, w) for each sample, or a list of them, the generated image's first."""
    first = call["img_shapes"][0]
    t, h, w = first[0] if isinstance(first, list) else first
    text, image = call["encoder_hidden_states"].shape[1], call["hidden_states"].shape[1]
    return Tokens((t, h, w) if t > 1 else (h, w), before=text, after=image - t * h * w)


def sides_given(model: Any, call: Call) -> Tokens | None:
    """LTX: the sides are arguments; `video_coords` alone do not tell them."""
    sides: list[Any] = [call.get(name) for name in ("num_frames", "height", "width")]
    return None if None in sides else Tokens(tuple(sides))


def frames_first(model: Any, call: Call) -> Tokens:
    """CogVideoX: a video [B, T, C, H, W]; text has a call of its own in each attention."""
    t, _, h, w = call["hidden_states"].shape[-4:]
    side, depth = model.config["patch_size"], model.config["patch_size_t"] or 1
    return Tokens((t // depth, h // side, w // side))


def with_registers(model: Any, call: Call) -> Tokens:
    """AuraFlow: its last blocks see register tokens, text and image in one sequence."""
    text = call["encoder_hidden_states"].shape[1] + model.register_tokens.shape[1]
    return Tokens(patches(model, call).size, before=text)


def cos_sin(name: str, dim: int) -> Any:
    """A `select` for rotary positions given as (cos, sin), stacked or not, one row per token along `dim`, or None."""

    def select(call: Call, rows: Rows) -> dict[str, Any]:
        pair = call.get(name)
        return {} if pair is None else {name: tuple(rows(part, dim) for part in pair)}

    return select


def lumina_rows(call: Call, rows: Rows) -> dict[str, Any]:
    names = ("query_rotary_emb", "key_rotary_emb", "attention_mask")
    return {name: rows(call[name], 1) for name in names if call.get(name) is not None}


def qwen_rows(call: Call, rows: Rows) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if call.get("image_rotary_emb") is not None:
        image, text = call["image_rotary_emb"]
        changed["image_rotary_emb"] = rows(image, 0), text
    if call.get("attention_mask") is not None:  # of text and image: diffusers before 0.38
        changed["attention_mask"] = rows(call["attention_mask"], -1)
    return changed


def chroma_rows(call: Call, rows: Rows) -> dict[str, Any]:
    changed: dict[str, Any] = cos_sin("image_rotary_emb", 0)(call, rows)
    mask: Tensor | None = call.get("attention_mask")  # [B, 1, S, S]
    return changed if mask is None else {**changed, "attention_mask": rows(rows(mask, 2), 3)}


BUILT_IN = (
    Family(
        "HunyuanDiT",
        ("HunyuanDiT2DModel", "HunyuanDiT2DControlNetModel"),
        ("Attention.attn1",),
        patches,
        cos_sin("image_rotary_emb", 0),
    ),
    Family(
        "Lumina",
        ("LuminaNextDiT2DModel",),
        ("Attention.attn1",),
        patches,
        lumina_rows,
        inputs=("hidden_states", "encoder_hidden_states"),
        mask=True,
    ),
    Family(
        "Stable Diffusion 3",
        ("SD3Transformer2DModel", "SD3ControlNetModel"),
        ("Attention.attn", "Attention.attn2"),
        patches,
        cross=True,
        text_last=True,
        whole=WHOLE,
    ),
    Family(
        "Flux",
        ("FluxTransformer2DModel", "FluxControlNetModel"),
        ("FluxAttention",),
        packed,
        cos_sin("image_rotary_emb", 0),
        outputs=(0, 2),
        cross=True,
        text_last=False,
        eager=True,
    ),
    Family(
        "Chroma",
        ("ChromaTransformer2DModel",),
        ("FluxAttention",),
        packed,
        chroma_rows,
        mask=True,
        cross=True,
        text_last=False,
        eager=True,
    ),
    Family(
        "Qwen-Image",
        ("QwenImageTransformer2DModel", "QwenImageControlNetModel"),
        ("Attention.attn",),
        shapes_given,
        qwen_rows,
        mask=True,
        cross=True,
        text_last=False,
    ),
    Family(
        "AuraFlow",
        ("AuraFlowTransformer2DModel",),
        ("Attention.attn",),
        with_registers,
        cross=True,
        text_last=False,
        whole=WHOLE,
    ),
    Family(
        "Wan",
        ("WanTransformer3DModel", "WanVACETransformer3DModel"),
        ("WanAttention.attn1",),
        video_patches,
        cos_sin("rotary_emb", 1),
    ),
    Family(
        "LTX", ("LTXVideoTransformer3DModel",), ("LTXAttention.attn1",), sides_given, cos_sin("image_rotary_emb", 1)
    ),
    Family(
        "CogVideoX",
        ("CogVideoXTransformer3DModel",),
        ("Attention.attn1",),
        frames_first,
        cos_sin("image_rotary_emb", 0),
        cross=True,
        text_last=False,
    ),
)
_MODELS = {model: family for family in BUILT_IN for model in family.models}


def family_of(model: nn.Module) -> Family | None:
    """The family of a model by its class name, or that of a class it derives from; None for an unknown one.

    Families that users have registered come before the built-in ones.
    """
    for kind in type(model).__mro__:
        for known in (REGISTERED, _MODELS):
            if kind.__name__ in known:
                return known[kind.__name__]
    return None


def suited(model: nn.Module, config: MaMeConfig) -> MaMeConfig:
    """`config`; where it leaves open what merges (`DECIDES`, none of them given), with the settings that lie beside the model's
    weights, else with what its family merges best."""
    if config.layers is None and config.given.keys().isdisjoint(DECIDES):
        shipped = shipped_with(model)
        if shipped is not None:
            return shipped.replace(**config.given)
    return _of_family(model, config)


def uniform(model: nn.Module, config: MaMeConfig) -> MaMeConfig:
    """As `suited`, the same in all layers: without the settings that lie beside the model's weights."""
    config = _of_family(model, config.replace(layers=None, made_for=None))
    return config.replace(merge=config.merge)  # given, so that nothing else decides


def _of_family(model: nn.Module, config: MaMeConfig) -> MaMeConfig:
    if config.given.keys().isdisjoint(DECIDES):
        for family in filter(None, map(family_of, model.modules())):
            if family.whole is not None:
                return config.replace(keep=family.whole, merge="qkv")
    return config


def family_names() -> list[str]:
    """Class names of all models that are known."""
    return sorted({*REGISTERED, *_MODELS})
