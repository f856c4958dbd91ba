"""Compute the PSNR of image pairs.

`psnr` is torchmetrics'. `object_psnr` is own code, because torchmetrics takes no masks. Each pair
has its own value, because pooling the errors first hides the worst images.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio

from ..images import check_pair, to_double


@torch.no_grad()
def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Return the PSNR of each pair in dB, float64 [n]; infinite for equal images.

    Args:
        a: [n, 3, H, W] in [0, 1].
        b: the same shape and range.

    Raises:
        ValueError: shapes differ, or values are outside [0, 1] or NaN.
    """
    check_pair(a, b)
    return peak_signal_noise_ratio(
        to_double(a), to_double(b), data_range=1.0, reduction="none", dim=(1, 2, 3)
    ).cpu()


STANDS_OUT = 0.15  # distance from every colour of the border, of colours in [0, 1]
GROUND_COLORS = 64  # of the border, evenly spaced
SMOOTH = 9  # pixels a side of the window in which most have to stand out


@torch.no_grad()
def object_psnr(a: Tensor, b: Tensor) -> Tensor:
    """Return the PSNR in dB within the object of each first image, float64 [n].

    `object_mask` finds the object. If no pixel stands out, the whole image counts. Arguments and
    errors are those of `psnr`.
    """
    check_pair(a, b)
    error = (to_double(a) - to_double(b)).square().mean(1)
    inside = object_mask(a).to(error)
    inside[inside.sum((1, 2)) == 0] = 1
    means = (error * inside).sum((1, 2)) / inside.sum((1, 2))
    return -10 * means.cpu().log10()


def object_mask(images: Tensor) -> Tensor:
    """Find the pixels that differ from all colours of their image's border.

    The embedded models draw one subject on a plain or patterned ground that fills the border. The
    prompts don't say where the subject is, so it is found in the unmerged image.

    Args:
        images: [n, 3, H, W] in [0, 1].

    Returns:
        The mask, bool [n, H, W].
    """
    border = torch.cat(
        [images[:, :, 0], images[:, :, -1], images[:, :, :, 0], images[:, :, :, -1]], 2
    )
    colors = border[:, :, :: max(1, border.shape[2] // GROUND_COLORS)].transpose(1, 2)
    pixels = images.flatten(2).transpose(1, 2)
    far = torch.cdist(pixels.float(), colors.float()).amin(2) > STANDS_OUT
    far = far.unflatten(1, images.shape[2:]).float().unsqueeze(1)
    return F.avg_pool2d(far, SMOOTH, 1, SMOOTH // 2)[:, 0] > 0.5
