"""Weights and pictures that are the same on every machine, for recorded answers of oracles."""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch
from torch import Tensor


def uniform(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return float32 in [-1, 1) that depends on `name` alone, in every version of NumPy."""
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    numbers = (bits >> np.uint64(40)).astype(np.float64) / 2**23 - 1
    return torch.from_numpy(numbers).float().reshape(shape)


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Make a state dict that keeps activations near 1."""
    tensors = {}
    for name, shape in shapes.items():
        values = uniform(name, shape)
        if name.endswith("num_batches_tracked"):
            values = torch.tensor(0)
        elif len(shape) > 1:
            values *= math.sqrt(6 / math.prod(shape[1:]))
        elif name.endswith(("running_var", "bn.weight")) or name.startswith(("head", "lin")):
            values = 1 + values / 4
        else:
            values /= 4
        tensors[name] = values
    return tensors


def inception_weights(convolutions: dict[str, list[int]]) -> dict[str, Tensor]:
    """Make a state dict of FID's Inception from the shapes of its convolutions."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (1008, 2048), "fc.bias": (1008,)}
    for name, shape in convolutions.items():
        shapes[f"{name}.conv.weight"] = tuple(shape)
        shapes |= {
            f"{name}.bn.{kind}": (shape[0],)
            for kind in ("weight", "bias", "running_mean", "running_var")
        }
    tensors = weights(shapes)
    return tensors | {f"{name}.bn.num_batches_tracked": torch.tensor(0) for name in convolutions}


def picture(name: str, height: int, width: int) -> np.ndarray:
    """Draw uint8 [height, width, 3], smooth with fine noise, in float64 arithmetic."""
    smooth = _stretched(
        _stretched(uniform(name, (5, 7, 3)).numpy().astype(np.float64), height).swapaxes(0, 1),
        width,
    )
    noise = uniform(f"{name} noise", (height, width, 3)).numpy()
    mixed = np.clip(smooth.swapaxes(0, 1) + 0.2 * noise, -1, 1)
    return np.rint((mixed + 1) * 127.5).astype(np.uint8)


def _stretched(values: np.ndarray, length: int) -> np.ndarray:
    """Linear interpolation of the first axis to `length` points, ends on ends."""
    at = np.linspace(0, len(values) - 1, length)
    low = np.minimum(at.astype(int), len(values) - 2)
    share = (at - low)[:, None, None]
    return values[low] * (1 - share) + values[low + 1] * share


def picture_pairs() -> tuple[Tensor, Tensor]:
    """Two batches [2, 3, 70, 86] in [0, 1]: sizes that pools do not divide."""
    batches = [np.stack([picture(f"{side} {i}", 70, 86) for i in range(2)]) for side in "ab"]
    a, b = (torch.from_numpy(batch).permute(0, 3, 1, 2).float() / 255 for batch in batches)
    return a, b


def feature_sets() -> tuple[Tensor, Tensor]:
    """Two sets of features [60, 16] with unlike means and spreads."""
    return uniform("features a", (60, 16)), 1.2 * uniform("features b", (60, 16)) + 0.1
