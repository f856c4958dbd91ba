"""A blur over the image that tokens lie in, by which restored ones vary as their surroundings do.

Copies of a group's output change at its border and nowhere else. Of their blur, [1, 2, 1] / 4 along rows and columns, each token takes what
differs from its group's mean: of cells of 2 x 2 that is bilinear interpolation, less its mean in each cell.
"""

from __future__ import annotations

import torch
from torch import Tensor


def blurred(x: Tensor, plane: tuple[int, int]) -> Tensor:
    """Tokens x [B, h * w, C] blurred over their plane (h, w), whose border is repeated."""
    image = x.unflatten(1, plane)
    return _along(_along(image, 1), 2).flatten(1, 2)


def _along(image: Tensor, dim: int) -> Tensor:
    last = image.shape[dim] - 1
    before = torch.cat([image.narrow(dim, 0, 1), image.narrow(dim, 0, last)], dim)
    after = torch.cat([image.narrow(dim, 1, last), image.narrow(dim, last, 1)], dim)
    return (before + after) / 4 + image / 2
