"""Build a published diffusion model from a package registry: a consistency model of terrain.

    model = load_terrain()
    heights = model.denoise(80 * noise, 80.0, difficulty)  # [B, 1, h, w] in -1..1

It is a UNet of guided-diffusion's form (10.4 M parameters, one step, 128 x 128 maps of heights),
trained by the authors of `adaptive-terrain-diffusion` (MIT), here as diffusers' `UNet2DModel`. It
is convolutional: other sides that 16 divides work too. It wasn't trained for this project, so it
can contradict what our own models say about merging.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..weights.load import load

TERRAIN = "terrain-unet"
LEVELS = (32, 32, 64, 96, 128)  # channels
BLOCKS = 4  # at each level, on the way down
FIRST_ATTENTION = 2  # the level of 32 x 32 tokens
_SIGMA_DATA, _SIGMA_MIN = 0.5, 0.002  # arXiv 2303.01469, section 3 and appendix C
_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_ATTENTION = {"norm": "group_norm", "proj_out": "to_out.0"}
_OUTSIDE = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0": "class_embedding.linear_1",
    "label_emb.2": "class_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
_PLACE = re.compile(r"(input|output|middle)_blocks?\.(?:(\d+)\.)?(\d)\.(.+)\.(weight|bias)")


class Terrain(nn.Module):
    """The UNet, and the rest of a consistency model."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import UNet2DModel
        from diffusers.models.embeddings import TimestepEmbedding

        plain = FIRST_ATTENTION
        attentive = len(LEVELS) - plain
        self.unet: Any = UNet2DModel(
            sample_size=128,
            in_channels=1,
            out_channels=1,
            down_block_types=(
                *["ResnetDownsampleBlock2D"] * plain,
                *["AttnDownBlock2D"] * attentive,
            ),
            up_block_types=(*["AttnUpBlock2D"] * attentive, *["ResnetUpsampleBlock2D"] * plain),
            block_out_channels=LEVELS,
            layers_per_block=BLOCKS,
            downsample_type="resnet",
            upsample_type="resnet",
            attention_head_dim=32,
            norm_num_groups=32,
            attn_norm_num_groups=32,
            resnet_time_scale_shift="scale_shift",
            class_embed_type="identity",
        )
        # A label is one number, for which diffusers has no embedding.
        self.unet.class_embedding = TimestepEmbedding(1, 4 * LEVELS[0])

    def denoise(self, noisy: Tensor, sigma: float, difficulty: Tensor) -> Tensor:
        """Compute the clean maps [B, 1, h, w], in -1..1.

        Args:
            noisy: maps in -1..1 plus noise of deviation `sigma` [B, 1, h, w].
            sigma: 80 for noise alone.
            difficulty: 0 to 1 [B].
        """
        deviation = (sigma**2 + _SIGMA_DATA**2) ** 0.5
        time = noisy.new_full((len(noisy),), sigma).log() * 250
        output = self.unet(noisy / deviation, time, difficulty[:, None]).sample
        skip = _SIGMA_DATA**2 / ((sigma - _SIGMA_MIN) ** 2 + _SIGMA_DATA**2)
        scale = (sigma - _SIGMA_MIN) * _SIGMA_DATA / deviation
        return (scale * output + skip * noisy).clamp(-1, 1)


def load_terrain(weights_dir: Path | None = None, offline: bool = False) -> Terrain:
    """Load the trained model in eval mode.

    Raises as `eval.weights.load.load` does.
    """
    model = Terrain().eval().requires_grad_(False)
    tensors = load(TERRAIN, weights_dir, offline)
    renamed: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if ".qkv." in name:
            prefix, _, kind = _here(name.replace(".qkv.", ".norm.")).rpartition(".group_norm.")
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                renamed[f"{prefix}.to_{part}.{kind}"] = rows
        else:
            renamed[_here(name)] = value
    own = model.unet.state_dict()
    model.unet.load_state_dict(
        {name: value.view(own[name].shape) for name, value in renamed.items()}
    )
    return model


def terrain_noise(seed: int, maps: int) -> tuple[Tensor, Tensor]:
    """Draw noise of sigma 80 [maps, 1, 128, 128], and the difficulty of each map [maps]."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(maps, 1, 128, 128, generator=generator)
    return 80 * noise, torch.rand(maps, generator=generator)


def _here(name: str) -> str:
    """Return diffusers' name of a weight of guided-diffusion; `qkv` has three names."""
    layer, _, kind = name.rpartition(".")
    if layer in _OUTSIDE:
        return f"{_OUTSIDE[layer]}.{kind}"
    place = _PLACE.fullmatch(name)
    assert place is not None, name
    side, block, part, inner, kind = place.groups()
    attention = inner in _ATTENTION
    layer = _ATTENTION[inner] if attention else _RESNET[inner]
    if side == "middle":
        where = "mid_block.attentions.0" if attention else f"mid_block.resnets.{int(part) // 2}"
        return f"{where}.{layer}.{kind}"
    down = side == "input"
    level, index = divmod(int(block) - 1, BLOCKS + 1) if down else divmod(int(block), BLOCKS + 1)
    blocks = f"{'down' if down else 'up'}_blocks.{level}"
    if attention:
        return f"{blocks}.attentions.{index}.{layer}.{kind}"
    if down and index == BLOCKS:
        return f"{blocks}.downsamplers.0.{layer}.{kind}"
    if not down and part != "0":  # after a block's attention, if it has one
        return f"{blocks}.upsamplers.0.{layer}.{kind}"
    return f"{blocks}.resnets.{index}.{layer}.{kind}"
