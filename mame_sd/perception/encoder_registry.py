"""List the vision transformers that merge: the modules of their blocks, and their prefix tokens.

A block must compute x' = x + attention branch(x), then x = x' + MLP branch(x'), where each branch
is a sequence of the block's own modules. `register_encoder` adds a model of your own
(docs/perception.md). This module imports neither transformers nor timm: classes are identified by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mame_sd.refused import ENCODERS, refused_as


@dataclass(frozen=True)
class Encoder:
    """Description of one kind of vision transformer.

    Attributes:
        name: name for reports and errors.
        models: class names of the modules whose forward takes images and runs the blocks.
        block: class name of a block.
        attention: paths of the modules of a block's attention branch, in order: first a norm, then
            the attention. The attention is called with the tokens, and with the block's other
            arguments by name; if it returns a tuple, the first entry is used.
        mlp: paths of the modules of the MLP branch, in order.
        num_prefix_tokens: number of tokens before the patches (class, distillation, register
            tokens), or a function that returns it for a model.
        keys: path of the projection to keys in a block. If None, tokens are compared, not keys.
        joined: True if that projection returns queries, keys and values side by side.
        mask: name of the attention's argument for a mask.
        attend: computes attention with an additive mask [B, 1, 1, L], for attention modules without
            a mask argument: called with the module, the tokens and the mask, returns the module's
            output.
        dense: True if heads read the output of blocks, every token at its position.
        maps: methods of the model that do so.
        adds_mask: True if the attention adds a mask of numbers [B, 1, 1, L] to its logits, so that
            proportional attention is on by default.
        grid: True if patches reach the blocks in row-major order.
    """

    name: str
    models: tuple[str, ...]
    block: str
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    num_prefix_tokens: int | Callable[[Any], int] = 0
    keys: str | None = None
    mask: str = "attention_mask"
    grid: bool = True
    adds_mask: bool = False
    attend: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    dense: bool = False
    maps: tuple[str, ...] = ()
    joined: bool = False

    def prefix_tokens_of(self, model: nn.Module) -> int:
        """Return the number of prefix tokens of `model`."""
        count = self.num_prefix_tokens
        return count if isinstance(count, int) else int(count(model))

    def misfit(self, block: nn.Module) -> str | None:
        """Return why `block` doesn't match this description; None if it does."""
        modules = dict(block.named_modules())
        parts = [*self.attention, *self.mlp]
        read = parts if self.keys is None else [*parts, self.keys]
        missing = [part for part in read if part not in modules]
        if missing:
            return f"it has no {', '.join(missing)}"
        described = {part.partition(".")[0] for part in parts}
        other = [name for name, _ in block.named_children() if name not in described]
        other += [name for name, _ in block.named_parameters(recurse=False)]
        return f"it also has {', '.join(other)}" if other else None


_ENCODERS: list[Encoder] = []


def register_encoder(encoder: Encoder) -> Encoder:
    """Register a vision transformer for `apply_mame`; the latest description is tried first."""
    _ENCODERS.insert(0, encoder)
    return encoder


def encoder_names() -> list[str]:
    """List the class names of all registered models."""
    return sorted({name for encoder in _ENCODERS for name in encoder.models})


def is_encoder(target: Any) -> bool:
    """Return True if `target` contains a registered or refused vision transformer."""
    if not isinstance(target, nn.Module):
        return False
    names = {*encoder_names(), *ENCODERS}
    return any(not names.isdisjoint(_classes(module)) for module in target.modules())


def find_encoder(target: nn.Module) -> tuple[nn.Module, list[nn.Module], Encoder]:
    """Find the vision transformer in `target`.

    Returns:
        The vision transformer, its blocks in order, and its description.

    Raises:
        ValueError: it is refused, unregistered or not the only one, or its blocks don't match
            the description.
    """
    for module in target.modules():
        if (name := refused_as(module, ENCODERS)) is not None:
            raise ValueError(
                "expected a vision transformer whose tokens can merge, got"
                f" {type(module).__name__}: {ENCODERS[name]}"
            )
    registered = set(encoder_names())
    candidates = {
        path: module
        for path, module in target.named_modules()
        if not registered.isdisjoint(_classes(module))
    }
    inner = [
        (path, module)
        for path, module in candidates.items()
        if set(candidates.values()).isdisjoint([*module.modules()][1:])
    ]
    if len(inner) != 1:
        named = (f"{path} ({type(module).__name__})" for path, module in inner)
        what = ", ".join(named) or type(target).__name__
        raise ValueError(
            f"expected one vision transformer ({', '.join(sorted(registered))}), got {what}; give"
            " the model itself, or describe it with"
            " mame_sd.perception.encoder_registry.register_encoder"
        )
    model = inner[0][1]
    return model, *_described(model)


def _described(model: nn.Module) -> tuple[list[nn.Module], Encoder]:
    """Return the blocks of `model` and the description that matches them."""
    reasons = []
    for encoder in _ENCODERS:
        if encoder.models and not set(encoder.models).isdisjoint(_classes(model)):
            blocks = [module for module in model.modules() if encoder.block in _classes(module)]
            misfits = (
                f"{encoder.block}: {misfit}" for misfit in map(encoder.misfit, blocks) if misfit
            )
            reason = next(misfits, None) if blocks else f"there is no {encoder.block}"
            if reason is None:
                return blocks, encoder
            reasons.append(reason)
    raise ValueError(
        f"expected a {type(model).__name__} with blocks of attention and MLP as known, got another"
        f" kind ({'; '.join(reasons)}); describe it with"
        " mame_sd.perception.encoder_registry.register_encoder"
    )


def _classes(module: nn.Module) -> Iterable[str]:
    return [kind.__name__ for kind in type(module).__mro__]


# Models whose heads take a mean over tokens. By default all tokens are restored for them, so that
# the mean weights each token by its size.
MEANS = {
    *("Dinov2ForImageClassification", "Dinov2WithRegistersForImageClassification"),
    *("SiglipForImageClassification", "Siglip2ForImageClassification"),
    *("CLIPForImageClassification", "VideoMAEForVideoClassification"),
}


def takes_mean(target: nn.Module) -> bool:
    """Return True if a head in `target` takes a mean over tokens."""
    pools = ("avg", "avgmax")  # of timm's models
    return any(
        not MEANS.isdisjoint(_classes(module)) or getattr(module, "global_pool", None) in pools
        for module in target.modules()
    )


# The projection to keys in DINOv2 before transformers 5.18, ViT before 5.9, VideoMAE and DPT.
_OLDER_KEYS = "attention.attention.key"


def masked(attention: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Compute attention in the older layout of transformers, [B, L, C].

    There query, key and value are layers of `attention.attention`, and `output.dense` follows.

    Args:
        attention: the module.
        x: normalised tokens [B, L, C].
        mask: added to the logits, [B, 1, 1, L].
    """
    inner, output = attention.attention, attention.output
    heads = (inner.num_attention_heads, -1)
    parts = [inner.query(x), inner.key(x), inner.value(x)]
    # VideoMAE before transformers 5.5 has biases outside of the layers.
    for place, name in ((0, "q_bias"), (2, "v_bias")):
        bias = getattr(inner, name, None)
        parts[place] = parts[place] if bias is None else parts[place] + bias
    q, k, v = (part.unflatten(-1, heads).transpose(1, 2) for part in parts)
    dropout = float(getattr(inner, "dropout_prob", 0.0)) if inner.training else 0.0
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    projected: Tensor = output.dropout(output.dense(y.transpose(1, 2).flatten(2)))
    return projected


def _registers(model: Any) -> int:
    return 1 + int(model.config.num_register_tokens)


def _prefix(model: Any) -> int:
    return int(model.num_prefix_tokens)


def _vit(kind: str, prefix: int, grid: bool = True, model: str = "", dense: bool = False) -> None:
    """Register models of transformers that share the layout of its ViT.

    Before transformers 5.9 that layout had an intermediate layer, and an output module that adds
    its input itself.
    """
    first, second = ("layernorm_before", "attention"), ("layernorm_after",)
    older = first, (*second, "intermediate", "output.dense", "output.dropout")
    newer = (*first, "dropout"), (*second, "mlp", "dropout")
    named = kind, (model or f"{kind}Model",), f"{kind}Layer"
    more: dict[str, Any] = {"adds_mask": True, "grid": grid, "dense": dense}
    register_encoder(Encoder(*named, *older, prefix, _OLDER_KEYS, attend=masked, **more))
    register_encoder(Encoder(*named, *newer, prefix, "attention.k_proj", **more))


def _dino(kind: str, prefix: int | Callable[[Any], int]) -> None:
    """Register DINOv2, which has a scale at the end of each branch."""
    attention = ("norm1", "attention", "layer_scale1", "drop_path")
    mlp = ("norm2", "mlp", "layer_scale2", "drop_path")
    for name, dense in ((f"{kind}Model", False), (f"{kind}Backbone", True)):
        named = kind, (name,), f"{kind}Layer", attention, mlp, prefix
        more: dict[str, Any] = {"adds_mask": True, "dense": dense}
        register_encoder(Encoder(*named, _OLDER_KEYS, attend=masked, **more))
        register_encoder(Encoder(*named, "attention.k_proj", **more))


def _clip(kind: str, prefix: int) -> None:
    """Register the image half of a CLIP of class prefix `kind`; its text half doesn't merge."""
    models = (f"{kind}VisionModel", f"{kind}VisionTransformer")
    branches = ("layer_norm1", "self_attn"), ("layer_norm2", "mlp")
    named = kind, models, f"{kind}EncoderLayer", *branches, prefix, "self_attn.k_proj"
    register_encoder(Encoder(*named, adds_mask=True))


_vit("ViT", prefix=1)
_vit("DeiT", prefix=2)
_vit("ViTMAE", prefix=1, grid=False)  # shuffled
_vit("Vivit", prefix=1)
_vit("VideoMAE", prefix=0)
_vit("DPTViT", prefix=1, model="DPTModel", dense=True)
_dino("Dinov2", prefix=1)
_dino("Dinov2WithRegisters", prefix=_registers)
_clip("CLIP", prefix=1)
_clip("Siglip", prefix=0)
_clip("Siglip2", prefix=0)
register_encoder(
    Encoder(
        "timm",
        ("VisionTransformer",),
        "Block",
        ("norm1", "attn", "ls1", "drop_path1"),
        ("norm2", "mlp", "ls2", "drop_path2"),
        num_prefix_tokens=_prefix,
        keys="attn.qkv",
        joined=True,
        mask="attn_mask",
        adds_mask=True,
        maps=("forward_intermediates", "get_intermediate_layers"),
    )
)
