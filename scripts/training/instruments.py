"""Begin the instruments' training, and store their weights and conditions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from mame_sd.eval.instruments.models import SCALE, THUMBNAIL, Instrument

FILE_BYTES = 16 * 2**20  # weights are split into files of at most so much


@torch.no_grad()
def begin_as_identity(instrument: Instrument) -> None:
    """Make each block the identity, from where diffusion transformers are trained."""
    model = instrument.model
    if len(instrument.kind.shape) == 3:
        norms = [n for b in model.transformer_blocks for n in (b.norm1, b.norm1_context)]
        layers: list[nn.Linear] = [*(norm.linear for norm in norms), model.norm_out.linear]
    else:
        for owner in (*model.blocks, model):
            owner.scale_shift_table.zero_()
        layers = [b.attn2.to_out[0] for b in model.blocks] + [model.condition_embedder.time_proj]
    for layer in (*layers, model.proj_out):
        layer.weight.zero_()
        layer.bias.zero_()


def thumbnails_of(samples: Tensor) -> Tensor:
    """Return the condition that belongs to samples [B, *kind.shape]: [B, T, 3, 8, 8]."""
    frames = samples[:, None] if samples.ndim == 4 else samples[:, :, [0, -1]].transpose(1, 2)
    side = frames.shape[-1] // THUMBNAIL
    return F.avg_pool2d(frames.flatten(0, 1), side).unflatten(0, frames.shape[:2])


def quantized(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return matrices as int8 with one scale for each output row, and all else in fp16."""
    small = {}
    for key, value in tensors.items():
        value = value.detach().float().cpu()
        if value.ndim == 2:
            scale = (value.abs().amax(1, keepdim=True) / 127).clamp_min(1e-12)
            small[key + SCALE] = scale
            small[key] = (value / scale).round().clamp(-127, 127).to(torch.int8)
        else:
            small[key] = value.half()
    return {key: value.contiguous() for key, value in small.items()}


def save_weights(name: str, tensors: Mapping[str, Tensor], folder: Path) -> list[Path]:
    """Write weights as NAME-1-of-N.safetensors and so on, each of at most about `FILE_BYTES`.

    Matrices are written in int8 (see `quantized`).

    Args:
        name: name of the instrument.
        tensors: its state dict.
        folder: where to write.

    Returns:
        The paths of the files.
    """
    small = quantized(tensors)
    count = -(-sum(value.nbytes for value in small.values()) // FILE_BYTES)
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    sizes = [0] * count
    for key, value in sorted(small.items(), key=lambda item: -item[1].nbytes):
        least = sizes.index(min(sizes))
        parts[least][key] = value
        sizes[least] += value.nbytes
    files = [folder / f"{name}-{i + 1}-of-{count}.safetensors" for i in range(count)]
    for part, file in zip(parts, files, strict=True):
        save_file(part, file)
    return files


def save_conditions(file: Path, thumbnails: Mapping[str, Tensor]) -> None:
    """Write thumbnails in -1..1 as bytes."""
    arrays: dict[str, Any] = {
        name: ((value + 1) * 127.5).round().clamp(0, 255).byte().numpy()
        for name, value in thumbnails.items()
    }
    np.savez_compressed(file, **arrays)
