"""What the sweep knows of one model class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from tests.builders.transformers import IMAGE, STEP, TEXT, H, W, flux_inputs, model, normal

BLC = "hidden_states BLC"  # tokens of an image or a video


@dataclass(frozen=True)
class Case:
    """One class of diffusers.

    Attributes:
        name: the class.
        build: a tiny model of it.
        inputs: gives the arguments of a call.
        image: the argument that holds the image or video, and its dimensions: "hidden_states BCHW".
            L are tokens, row after row (behind the text: 7L), N items of which the last is
            generated, F one frame. Empty: no probe, for convolutions
            and norms over the image spread a change, frames are samples, or there is no family.
        text: the argument, where the model takes it, that holds text tokens along its second
            dimension, which stay in their place; empty: none does.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    image: str = "hidden_states BCHW"
    text: str = "encoder_hidden_states"


# What transformers are built with where a case gives nothing else, as far as their classes take it;
# other arguments whose names end as those of `AT_MOST` are at most so large.
AT_MOST = {"_dim": 16, "_channels": 16, "heads": 2, "layers": 1, "blocks": 1}
SMALL: dict[str, Any] = {
    "attention_head_dim": 16,
    "axes_dims": (4, 4, 8),
    "axes_dims_rope": (4, 4, 8),
    "cap_feat_dim": 16,
    "caption_channels": 16,
    "caption_projection_dim": 32,
    "cross_attention_dim": 32,
    "ff_dim": 32,
    "ffn_dim": 32,
    "freq_dim": 16,
    "hidden_size": 32,
    "in_channels": 4,
    "in_visual_dim": 4,
    "intermediate_size": 32,
    "joint_attention_dim": 16,
    "model_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_single_layers": 1,
    "out_channels": 4,
    "out_visual_dim": 4,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (4, 4, 8),
    "text_dim": 16,
    "text_embed_dim": 16,
    "time_dim": 16,
    "time_embed_dim": 8,
}


T = 3  # frames
WORDS = normal(2, TEXT, 16)
VIDEO = normal(2, 4, T, 2 * H, 2 * W)
# What models are called with where a case gives nothing else, as far as their classes take it.
USUAL = {
    **flux_inputs(),
    **STEP,
    "controlnet_cond": IMAGE,
    "height": H,
    "num_frames": T,
    "padding_mask": torch.zeros(1, 1, 2 * H, 2 * W),
    "pooled_projections": normal(2, 8),
    "width": W,
}
LATENTS = {
    "BCHW": IMAGE,
    "BCTHW": VIDEO,
    "BLC": normal(2, H * W, 4),
    "BTCHW": VIDEO.transpose(1, 2).contiguous(),
    "BTHWC": VIDEO.permute(0, 2, 3, 4, 1).contiguous(),
}


def rotations(tokens: int, width: int = 16) -> tuple[Tensor, Tensor]:
    """Two of an argument `image_rotary_emb`."""
    return normal(tokens, width), normal(tokens, width, seed=2)


def case(
    name: str,
    inputs: Callable[[], dict[str, Any]] = dict,
    image: str = "hidden_states BCHW",
    text: str = "encoder_hidden_states",
    small: dict[str, Any] = SMALL,
    **more: Any,
) -> Case:
    """Make a case of a class; `small` are values for the arguments that the class takes."""

    def build() -> Any:
        return model(name, **{**_sizes(small, getattr(diffusers, name)), **more})()

    def call() -> dict[str, Any]:
        latents, _, dims = image.partition(" ")
        usual = {**USUAL, latents: LATENTS.get(dims)}
        kind = getattr(diffusers, name, None)  # the oldest that is supported lacks the newest ones
        return {**(_taken(usual, kind.forward) if kind else {}), **inputs()}

    return Case(name, build, call, image, text)


def _sizes(small: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Small values for the arguments of a class."""
    sizes = {}
    for name, argument in inspect.signature(kind).parameters.items():
        if name in small:
            sizes[name] = small[name]
        elif type(argument.default) is int:
            limits = (most for end, most in AT_MOST.items() if name.endswith(end))
            sizes[name] = min(argument.default, next(limits, argument.default))
    return sizes


def _taken(values: dict[str, Any], by: Callable[..., Any]) -> dict[str, Any]:
    """Those of `values` whose names are arguments."""
    names = inspect.signature(by).parameters
    return {name: value for name, value in values.items() if name in names}
