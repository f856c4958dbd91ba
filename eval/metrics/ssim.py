"""Structural similarity of image pairs (Wang et al., 2004) and its multi-scale form (Wang et al.,
2003).

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
SCALES = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)  # weight of each scale, finest first
MS_SSIM_MIN_SIDE = WINDOW * 2 ** (len(SCALES) - 1)  # 176: the coarsest scale still holds a window


@torch.no_grad()
def ssim(a: Tensor, b: Tensor) -> Tensor:
    """SSIM of each pair, float64 [n], at most 1.

    Args:
        a: [n, 3, H, W] in [0, 1], sides of at least 11.
        b: the same shape and range.

    Raises:
        ValueError: shapes differ, too small, values outside [0, 1] or NaN.
    """
    _check(a, b, WINDOW, "SSIM")
    luminance, structure = _similarity(to_double(a), to_double(b))
    return (luminance * structure).mean((1, 2, 3)).cpu()


@torch.no_grad()
def ms_ssim(a: Tensor, b: Tensor) -> Tensor:
    """MS-SSIM of each pair over five scales, float64 [n] in [0, 1]; a negative scale counts as 0,
    since it has no real power.

    Args and errors as for `ssim`; sides of at least 176.
    """
    _check(a, b, MS_SSIM_MIN_SIDE, "MS-SSIM")
    a, b = to_double(a), to_double(b)
    result = torch.ones(a.shape[:2], dtype=torch.float64, device=a.device)  # [n, 3]
    for scale, weight in enumerate(SCALES):
        if scale:
            a, b = F.avg_pool2d(a, 2), F.avg_pool2d(b, 2)
        luminance, structure = _similarity(a, b)
        last = scale == len(SCALES) - 1
        value = (luminance * structure if last else structure).mean((2, 3))
        result = result * value.clamp(min=0) ** weight
    return result.mean(1).cpu()


def _check(a: Tensor, b: Tensor, side: int, name: str) -> None:
    check_pair(a, b)
    if min(a.shape[-2:]) < side:
        raise ValueError(
            f"expected images of at least {side} x {side} for {name}, got {a.shape[-1]} x"
            f" {a.shape[-2]}"
        )


def _similarity(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The luminance and the contrast-structure term at each position, [n, 3, H - 10, W - 10]."""
    mean_a, mean_b, aa, bb, ab = _blur(
        torch.stack((a, b, a * a, b * b, a * b)).flatten(0, 1)
    ).chunk(5)
    variances = aa - mean_a**2 + bb - mean_b**2
    luminance = (2 * mean_a * mean_b + C1) / (mean_a**2 + mean_b**2 + C1)
    structure = (2 * (ab - mean_a * mean_b) + C2) / (variances + C2)
    return luminance, structure


def _blur(x: Tensor) -> Tensor:
    """`x` [n, 3, H, W] under the Gaussian window, where the whole window fits."""
    offsets = torch.arange(WINDOW, dtype=x.dtype, device=x.device) - WINDOW // 2
    window = torch.exp(-(offsets**2) / (2 * SIGMA**2))
    window = (window / window.sum()).expand(3, 1, 1, WINDOW)
    return F.conv2d(F.conv2d(x, window, groups=3), window.transpose(2, 3), groups=3)
