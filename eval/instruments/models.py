"""Define the instruments' models: their conditions and their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from mame_sd.errors import UserError

THUMBNAIL = 8  # pixels a side of the thumbnails that are the condition
CONDITIONS = Path(__file__).with_name("conditions.npz")
WEIGHTS = Path(__file__).with_name("weights")  # in a clone of the repository, not in a wheel
SCALE = ".int8_scale"  # ends the name of the scales of a matrix in int8


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What an instrument computes.

    Attributes:
        shape: of a sample: [3, height, width], or [3, frames, height, width].
        thumbnails: how many are the condition: the image's, or the first and last frame's.
        heads: number of heads, of 64 channels each.
        blocks: number of blocks.
    """

    name: str
    shape: tuple[int, ...]
    thumbnails: int
    heads: int = 6
    blocks: int = 6

    @property
    def context_width(self) -> int:
        """Count the features of a token of the condition: colour, row, column, which thumbnail."""
        return 3 + 2 * THUMBNAIL + self.thumbnails


KINDS = {
    "photographs": Kind(name="photographs", shape=(3, 64, 64), thumbnails=1),
    "video": Kind(name="video", shape=(3, 8, 32, 32), thumbnails=2, heads=4, blocks=5),
}


class Instrument(nn.Module):
    """A diffusion transformer and how to ask it.

    Attributes:
        kind: what it computes.
        model: diffusers' `SD3Transformer2DModel` or `WanTransformer3DModel`.
    """

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.model: Any = _new_sd3(kind) if len(kind.shape) == 3 else _new_wan(kind)

    def forward(
        self,
        noisy: Tensor,
        time: Tensor,
        thumbnails: Tensor,
        known: Tensor,
        corner: tuple[int, int] = (0, 0),
    ) -> Tensor:
        """Return the velocity, noise less the clean sample.

        Args:
            noisy: (1 - time) * clean + time * noise [B, *kind.shape]; clean pixels are in -1..1.
                A clip can be a window of all its frames, [B, 3, frames, side, side].
            time: share of the noise, 0 to 1 [B].
            thumbnails: the condition [B, kind.thumbnails, 3, 8, 8], in -1..1.
            known: 1 where the model is given the condition, 0 where it has none [B].
            corner: row and column of a window in its clip.
        """
        context = self.context(thumbnails) * known[:, None, None]
        timestep = 1000 * time
        if len(self.kind.shape) == 4:
            row, column = corner
            height, width = noisy.shape[-2:]
            frames = self.known_frames(thumbnails) * known[:, None, None, None, None]
            frames = frames[..., row : row + height, column : column + width].to(noisy.dtype)
            given = torch.cat([noisy, frames], 1)
            return self.model(given, timestep, context.to(noisy.dtype), return_dict=False)[0]
        colour = context[..., :3].mean(1)
        states = (noisy, context.to(noisy.dtype), colour.to(noisy.dtype), timestep)
        return self.model(*states, return_dict=False)[0]

    def context(self, thumbnails: Tensor) -> Tensor:
        """Return a token for each pixel of the thumbnails: [B, T * 64, context_width]."""
        batch, count = thumbnails.shape[:2]
        place = torch.eye(THUMBNAIL, device=thumbnails.device)
        grid = (batch, count, THUMBNAIL, THUMBNAIL, -1)
        row = place[None, None, :, None].expand(grid)
        column = place[None, None, None].expand(grid)
        which = torch.eye(count, device=thumbnails.device)[None, :, None, None].expand(grid)
        colour = thumbnails.float().movedim(2, -1)
        return torch.cat([colour, row, column, which], -1).flatten(1, 3)

    def known_frames(self, thumbnails: Tensor) -> Tensor:
        """Return the first and last thumbnail at a clip's size, as Wan's image-to-video models do.

        Args:
            thumbnails: [B, 2, 3, 8, 8].

        Returns:
            [B, 4, frames, height, width]: colours, and a mask that is 1 in the first and last
            frame. All else is zero.
        """
        _, count, height, width = self.kind.shape
        large = F.interpolate(thumbnails.flatten(0, 1).float(), (height, width))
        large = F.pad(large, (0, 0, 0, 0, 0, 1), value=1.0)
        first, last = large.unflatten(0, thumbnails.shape[:2]).unsqueeze(3).unbind(1)
        between = torch.zeros_like(first).expand(-1, -1, count - 2, -1, -1)
        return torch.cat([first, between, last], 2)


def _new_sd3(kind: Kind) -> nn.Module:
    from diffusers import SD3Transformer2DModel

    _, height, _ = kind.shape
    return SD3Transformer2DModel(
        sample_size=height,
        patch_size=2,
        in_channels=3,
        out_channels=3,
        num_layers=kind.blocks,
        attention_head_dim=64,
        num_attention_heads=kind.heads,
        joint_attention_dim=kind.context_width,
        caption_projection_dim=64 * kind.heads,
        pooled_projection_dim=3,
        pos_embed_max_size=height // 2,
        qk_norm="rms_norm",
    )


def _new_wan(kind: Kind) -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        in_channels=3 + 4,  # see `known_frames`
        out_channels=3,
        num_layers=kind.blocks,
        attention_head_dim=64,
        num_attention_heads=kind.heads,
        text_dim=kind.context_width,
        freq_dim=256,
        ffn_dim=256 * kind.heads,
        rope_max_seq_len=64,
    )


def dequantized(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights in fp32: matrices from int8 with a scale for each row, all else from fp16."""
    return {
        key: value.float() * tensors[key + SCALE] if key + SCALE in tensors else value.float()
        for key, value in tensors.items()
        if not key.endswith(SCALE)
    }


def load_instrument(name: str, folder: Path = WEIGHTS) -> Instrument:
    """Return a trained instrument in fp32 and eval mode.

    Args:
        name: "photographs" or "video".
        folder: where `NAME-1-of-N.safetensors` and so on are.

    Raises:
        UserError: no such instrument, or files that are missing or don't fit.
    """
    if name not in KINDS:
        raise UserError(f"expected an instrument of {', '.join(KINDS)}, got {name!r}")
    instrument = Instrument(KINDS[name])
    tensors = dequantized(join_files(name, folder))
    own = instrument.model.state_dict()
    if {k: v.shape for k, v in own.items()} != {k: v.shape for k, v in tensors.items()}:
        raise UserError(f"expected the weights of {name!r} in {folder}, got those of another model")
    instrument.model.load_state_dict(tensors)
    return instrument.eval().requires_grad_(False)


def join_files(name: str, folder: Path) -> dict[str, Tensor]:
    """Return the tensors of `NAME-1-of-N.safetensors` to `NAME-N-of-N.safetensors`."""
    there = sorted(folder.glob(f"{name}-*-of-*.safetensors"))
    if not there:
        raise UserError(
            f"expected {name}-1-of-N.safetensors in {folder}, got no such file; a clone of the"
            " repository has them in eval/instruments/weights, a wheel does not"
        )
    count = int(there[0].stem.rpartition("-")[2])
    files = [folder / f"{name}-{i + 1}-of-{count}.safetensors" for i in range(count)]
    missing = [file.name for file in files if not file.exists()]
    if missing or len(there) != count:
        wrong = f"no {', '.join(missing)}" if missing else f"{len(there)}"
        raise UserError(f"expected {count} files of {name!r} in {folder}, got {wrong}")
    return {key: value for file in files for key, value in load_file(file).items()}


def conditions(name: str, file: Path = CONDITIONS) -> Tensor:
    """Return thumbnails of pictures that no training saw: [128, kind.thumbnails, 3, 8, 8]."""
    with np.load(file) as arrays:
        return torch.from_numpy(arrays[name]).float() / 127.5 - 1
