"""Rivals that look at no token: keys at fixed or random places, means of cells; and no attention at
all.

Each function takes tokens x [B, L, C] that lie in (h, w), and where numbers are drawn from, and
gives a plan: what has `merge`, which makes [B, L', C] of tokens [B, L, C].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Size = tuple[int, int]
Draw = Callable[[int, torch.device], Tensor]  # so many uniform numbers of [0, 1) on a device


class RivalPlan:
    """The tokens of x [B, L, C] at the positions `kept` [L'] alone."""

    def __init__(self, x: Tensor, kept: Tensor) -> None:
        self.tokens_in, self.tokens_kept, self.kept = x.shape[1], len(kept), kept

    def merge(self, t: Tensor) -> Tensor:
        """Tokens [B, L, C] as [B, L', C]."""
        return t.index_select(1, self.kept)


class Means(RivalPlan):
    """Means of cells of (rows, columns); those that the border cuts have fewer tokens."""

    def __init__(self, x: Tensor, size: Size, cell: Size) -> None:
        super().__init__(x, _corners(size, cell, x.device))
        self._size, self._cell = size, cell

    def merge(self, t: Tensor) -> Tensor:
        image = t.transpose(1, 2).unflatten(2, self._size)  # [B, C, h, w]
        pooled = F.avg_pool2d(image, self._cell, ceil_mode=True, count_include_pad=False)
        # Fused attention takes its slow way for keys that don't lie together.
        return pooled.flatten(2).transpose(1, 2).contiguous()


class MeanAttention(RivalPlan):
    """All tokens stay, and the mean of their outputs is everyone's."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x, torch.arange(x.shape[1], device=x.device))

    def restore(self, y: Tensor) -> Tensor:
        """Outputs [B, L, C] of the merged tokens, each as the mean of them all."""
        return y.mean(1, keepdim=True).expand_as(y)


def todo(x: Tensor, size: Size, draw: Draw, factor: int) -> RivalPlan:
    """ToDo (arXiv 2402.13573): keys and values by nearest-neighbour downsampling by `factor`.

    As torch.nn.functional.interpolate to h // factor x w // factor with mode "nearest".
    """
    rows, columns = (
        torch.arange(max(n // factor, 1), device=x.device) * n // max(n // factor, 1) for n in size
    )
    return RivalPlan(x, (rows.unsqueeze(1) * size[1] + columns).flatten())


def strided(x: Tensor, size: Size, draw: Draw, cell: Size) -> RivalPlan:
    """The first token of each cell of (rows, columns)."""
    return RivalPlan(x, _corners(size, cell, x.device))


def means(x: Tensor, size: Size, draw: Draw, cell: Size) -> RivalPlan:
    """The mean of each cell of (rows, columns)."""
    return Means(x, size, cell)


def random_keys(x: Tensor, size: Size, draw: Draw, share: float) -> RivalPlan:
    """A random `share` of all tokens, anew at each call."""
    scores = draw(x.shape[1], x.device)
    return RivalPlan(x, scores.topk(max(1, round(share * x.shape[1]))).indices)


def random_cells(x: Tensor, size: Size, draw: Draw, cell: Size) -> RivalPlan:
    """One random token of each cell of (rows, columns), anew at each call."""
    corners = _corners(size, cell, x.device)
    rows = (size[0] - corners // size[1]).clamp(max=cell[0])  # the border cuts cells
    columns = (size[1] - corners % size[1]).clamp(max=cell[1])
    drawn = (draw(len(corners), x.device) * rows * columns).long()
    place = drawn.minimum(rows * columns - 1)
    return RivalPlan(x, corners + place // columns * size[1] + place % columns)


def mean_attention(x: Tensor, size: Size, draw: Draw) -> RivalPlan:
    """What an instrument must be able to see: each output is the mean over all tokens."""
    return MeanAttention(x)


def _corners(size: Size, cell: Size, device: torch.device) -> Tensor:
    """Positions of the first token of each cell [cells]."""
    rows = torch.arange(0, size[0], cell[0], device=device)
    columns = torch.arange(0, size[1], cell[1], device=device)
    return (rows.unsqueeze(1) * size[1] + columns).flatten()
