"""A blur over the image that tokens lie in, by which restored ones vary as their surroundings do.

Copies of a group's output change at its border and nowhere else. Of their blur, [1, 2, 1] / 4 along rows and columns, each token takes what
differs from its group's mean: of cells of 2 x 2 that is bilinear interpolation, less its mean in each cell.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def blurred(x: Tensor, plane: tuple[int, int]) -> Tensor:
    """Tokens x [B, h * w, C] blurred over their plane (h, w), whose border is repeated.

    Twice the means of 2 x 2, where they reach over the border of what lies within: the same kernel, without a copy of the tokens.
    """
    image = x.unflatten(1, plane).permute(0, 3, 1, 2)
    corners = F.avg_pool2d(image, 2, stride=1, padding=1, count_include_pad=False)
    return F.avg_pool2d(corners, 2, stride=1).permute(0, 2, 3, 1).flatten(1, 2)
