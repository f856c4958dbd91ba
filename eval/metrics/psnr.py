"""Peak signal-to-noise ratio of image pairs, one value a pair: pooling the error first would hide
the worst images. Of the whole image, or of the object that stands on a plain or patterned ground.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


STANDS_OUT = 0.15  # distance from every colour of the border, of colours in [0, 1]
GROUND_COLORS = 64  # of the border, evenly spaced
SMOOTH = 9  # pixels a side of the window in which most have to stand out


@torch.no_grad()
def object_psnr(a: Tensor, b: Tensor) -> Tensor:
    """PSNR in dB within the object of each first image, float64 [n]; see `object_mask`.

    Where no pixel stands out it is that of the whole image.

    Args and errors as `psnr` has them.
    """
    check_pair(a, b)
    error = (to_double(a) - to_double(b)).square().mean(1)
    inside = object_mask(a).to(error)
    inside[inside.sum((1, 2)) == 0] = 1
    means = (error * inside).sum((1, 2)) / inside.sum((1, 2))
    return -10 * means.cpu().log10()


def object_mask(images: Tensor) -> Tensor:
    """Return where images [n, 3, H, W] in [0, 1] differ from all colours of their border: bool
    [n, H, W].

    The embedded models draw one subject on a ground that fills the border, plain or with a
    pattern. No prompt says where the subject is, so its place is read off the unmerged image.
    """
    border = torch.cat(
        [images[:, :, 0], images[:, :, -1], images[:, :, :, 0], images[:, :, :, -1]], 2
    )
    colors = border[:, :, :: max(1, border.shape[2] // GROUND_COLORS)].transpose(1, 2)
    pixels = images.flatten(2).transpose(1, 2)
    far = torch.cdist(pixels.float(), colors.float()).amin(2) > STANDS_OUT
    far = far.unflatten(1, images.shape[2:]).float().unsqueeze(1)
    return F.avg_pool2d(far, SMOOTH, 1, SMOOTH // 2)[:, 0] > 0.5
