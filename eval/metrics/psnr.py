"""Peak signal-to-noise ratio of image pairs, one value a pair: pooling the error first would hide
the worst images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..images import check_pair, to_double


@torch.no_grad()
def psnr(a: Tensor, b: Tensor) -> Tensor:
    """-10 log10(mean squared error) in dB, float64 [n]; infinite for equal images.

    Args:
        a: [n, 3, H, W] in [0, 1].
        b: the same shape and range.

    Raises:
        ValueError: shapes differ, values outside [0, 1] or NaN.
    """
    check_pair(a, b)
    error = (to_double(a) - to_double(b)).square().mean((1, 2, 3)).cpu()
    return -10 * error.log10()
