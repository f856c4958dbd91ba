"""Structural similarity of image pairs (Wang et al., 2004).

As in the authors' code: an 11 x 11 Gaussian window of sigma 1.5, no padding, K1 = 0.01, K2 = 0.03.
Colour images are the mean over their channels. In float64, because variances are differences of
nearly equal numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..images import check_pair, to_double

WINDOW, SIGMA = 11, 1.5
C1, C2 = 0.01**2, 0.03**2


@torch.no_grad()
def ssim(a: Tensor, b: Tensor) -> Tensor:
    """SSIM of each pair, float64 [n], at most 1.

    Args:
        a: [n, 3, H, W] in [0, 1], sides of at least 11.
        b: the same shape and range.

    Raises:
        ValueError: shapes differ, too small, values outside [0, 1] or NaN.
    """
    check_pair(a, b)
    if min(a.shape[-2:]) < WINDOW:
        raise ValueError(
            f"expected images of at least {WINDOW} x {WINDOW} for SSIM, got {a.shape[-1]} x"
            f" {a.shape[-2]}"
        )
    a, b = to_double(a), to_double(b)
    mean_a, mean_b, aa, bb, ab = _blur(
        torch.stack((a, b, a * a, b * b, a * b)).flatten(0, 1)
    ).chunk(5)
    variances = aa - mean_a**2 + bb - mean_b**2
    luminance = (2 * mean_a * mean_b + C1) / (mean_a**2 + mean_b**2 + C1)
    structure = (2 * (ab - mean_a * mean_b) + C2) / (variances + C2)
    return (luminance * structure).mean((1, 2, 3)).cpu()


def _blur(x: Tensor) -> Tensor:
    """`x` [n, 3, H, W] under the Gaussian window, where the whole window fits."""
    offsets = torch.arange(WINDOW, dtype=x.dtype, device=x.device) - WINDOW // 2
    window = torch.exp(-(offsets**2) / (2 * SIGMA**2))
    window = (window / window.sum()).expand(3, 1, 1, WINDOW)
    return F.conv2d(F.conv2d(x, window, groups=3), window.transpose(2, 3), groups=3)
