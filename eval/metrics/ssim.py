"""Compute the SSIM of image pairs (Wang et al., 2004), by torchmetrics.

As in the authors' code, the Gaussian window has 11 x 11 pixels and a sigma of 1.5, K1 = 0.01 and
K2 = 0.03, and only places count where the whole window fits. torchmetrics' own mean includes the
border, where the window covers mirrored pixels: .50 instead of .55 on small images. So we cut the
border off its map. The map is in float64, because variances are differences of nearly equal
numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from ..images import check_pair, to_double

WINDOW = 11  # pixels a side


@torch.no_grad()
def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return the SSIM of each pair, the mean over channels, float64 [n], at most 1.

    Args:
        a: [n, 3, H, W] in [0, 1], with sides of at least 11.
        b: the same shape and range.

    Raises:
        ValueError: shapes differ or are too small, or values are outside [0, 1] or NaN.
    """
    check_pair(a, b)
    if min(a.shape[-2:]) < WINDOW:
        raise ValueError(
            f"expected images of at least {WINDOW} x {WINDOW} for SSIM, got {a.shape[-1]} x"
            f" {a.shape[-2]}"
        )
    _, full = structural_similarity_index_measure(
        to_double(a), to_double(b), data_range=1.0, reduction="none", return_full_image=True
    )
    inside = slice(WINDOW // 2, -(WINDOW // 2))
    return full[..., inside, inside].mean((1, 2, 3)).cpu()
