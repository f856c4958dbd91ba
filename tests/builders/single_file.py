"""A tiny pipeline as one file in the original Stable Diffusion layout, for `from_single_file`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING
from safetensors.torch import save_file

RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
UNET_ENDS = DIFFUSERS_TO_LDM_MAPPING["unet"]["layers"]
VAE = {
    "conv_norm_out": "norm_out",
    "conv_shortcut": "nin_shortcut",
    "mid_block.attentions.0": "mid.attn_1",
    "downsamplers.0": "downsample",
    "upsamplers.0": "upsample",
    "resnets.": "block.",
    "attn_1.group_norm.": "attn_1.norm.",
    "attn_1.to_out.0.": "attn_1.proj_out.",
    "attn_1.to_": "attn_1.",
}


def unet_key(key: str, layers: int) -> str:
    """Return the original name of a UNet2DConditionModel's weight with `layers` per block."""
    if key in UNET_ENDS:
        return str(UNET_ENDS[key])
    match = re.match(r"(down|mid|up)_blocks?\.(?:(\d+)\.)?(\w+)\.(\d+)\.(.*)", key)
    assert match, key
    side, level, kind, index, rest = match[1], int(match[2] or 0), match[3], int(match[4]), match[5]
    if kind == "resnets":
        name, _, end = rest.partition(".")
        rest = f"{RESNET[name]}.{end}"
    if side == "mid":
        return f"middle_block.{1 if kind == 'attentions' else 2 * index}.{rest}"
    slot = {"resnets": 0, "attentions": 1, "downsamplers": 0, "upsamplers": 2}[kind]
    block = level * (layers + 1) + (layers if kind.endswith("samplers") else index)
    if side == "up":
        return f"output_blocks.{block}.{slot}.{rest}"
    if kind == "downsamplers":
        rest = "op." + rest.removeprefix("conv.")
    return f"input_blocks.{block + 1}.{slot}.{rest}"


def vae_key(key: str, levels: int) -> str:
    """Return the original name of an AutoencoderKL's weight."""
    key = re.sub(r"down_blocks\.(\d+)\.", r"down.\1.", key)
    key = re.sub(r"up_blocks\.(\d+)\.", lambda m: f"up.{levels - 1 - int(m[1])}.", key)
    key = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", key)
    for ours, theirs in VAE.items():
        key = key.replace(ours, theirs)
    return key


def save_single_file(pipe: Any, path: Path) -> Path:
    """Write UNet, VAE and text encoder of `pipe` into one .safetensors file; return its path."""
    layers, levels = pipe.unet.config.layers_per_block, len(pipe.vae.config.block_out_channels)
    weights: dict[str, torch.Tensor] = {}
    for key, value in pipe.unet.state_dict().items():
        weights["model.diffusion_model." + unet_key(key, layers)] = value
    for key, value in pipe.vae.state_dict().items():
        name = vae_key(key, levels)
        square = "attn_1" in name and value.dim() == 2
        weights["first_stage_model." + name] = value[:, :, None, None] if square else value
    for key, value in pipe.text_encoder.state_dict().items():
        name = key.removeprefix("text_model.")  # which went with transformers 5.6
        weights[f"cond_stage_model.transformer.text_model.{name}"] = value
    save_file({name: value.contiguous() for name, value in weights.items()}, path)
    return path
