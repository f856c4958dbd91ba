"""LPIPS of image pairs: how different a person would find them, from 0 for equal images upward.

It depends on the resolution (one pair scores 0.72, 0.70 and 0.54 at 64, 256 and 768 pixels). So
compare at one size and say which.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..images import check_pair
from ..networks import full_precision
from ..networks.lpips import BACKBONES, distance
from ..weights.files import tensors_sha256
from ..weights.load import load

MIN_SIDE = 32  # the smallest that every backbone can pool
_PIXELS_AT_ONCE = 4 * 512 * 512


class Lpips:
    """LPIPS with one backbone. Call it with two batches of images.

    Attributes:
        name: "lpips-alex", "lpips-vgg" or "lpips-squeeze".
        weights_hash: sha256 of its weights.
    """

    def __init__(
        self, net: str, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu"
    ) -> None:
        """`tensors` are named as in `networks.lpips`. Raises ValueError for an unknown net."""
        if net not in BACKBONES:
            raise ValueError(f"expected an LPIPS net of {', '.join(BACKBONES)}, got {net!r}")
        self.name, self.net = f"lpips-{net}", net
        self.weights_hash = tensors_sha256(dict(tensors))
        self.tensors = {name: value.to(device, torch.float32) for name, value in tensors.items()}
        self.device = torch.device(device)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Distance of each pair, float64 [n] on the CPU.

        Args:
            a: [n, 3, H, W] in [0, 1], sides of at least 32.
            b: the same shape and range.

        Raises:
            ValueError: shapes differ, too small, values outside [0, 1] or NaN.
        """
        check_pair(a, b)
        if min(a.shape[-2:]) < MIN_SIDE:
            raise ValueError(
                f"expected images of at least {MIN_SIDE} x {MIN_SIDE} for LPIPS, got {a.shape[-1]}"
                f" x {a.shape[-2]}"
            )
        step = max(1, _PIXELS_AT_ONCE // (a.shape[-2] * a.shape[-1]))
        with full_precision():
            parts = [
                distance(
                    self.net,
                    self.tensors,
                    *(2 * x.to(self.device, torch.float32) - 1 for x in pair),
                )
                for pair in zip(a.split(step), b.split(step), strict=True)
            ]
        return torch.cat(parts)


def load_lpips(
    net: str = "alex",
    weights_dir: Path | None = None,
    offline: bool = False,
    device: torch.device | str = "cpu",
) -> Lpips:
    """LPIPS with published weights.

    Raises UserError or MachineError when they can't be had (`weights.find`).
    """
    return Lpips(net, load(f"lpips-{net}", weights_dir, offline), device)
