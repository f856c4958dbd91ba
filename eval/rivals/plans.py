"""Plan rivals that ignore the tokens: keys at fixed or random places, means, mean attention.

Each function takes tokens x [B, L, C] that lie in (h, w) and a source of random numbers, and
returns a plan, whose `merge` turns tokens [B, L, C] into [B, L', C].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Size = tuple[int, int]
Draw = Callable[[int, torch.device], Tensor]  # so many uniform numbers of [0, 1) on a device


class RivalPlan:
    """Keep only the tokens of x [B, L, C] at the places `kept` [L']."""

    def __init__(self, x: Tensor, kept: Tensor) -> None:
        self.tokens_in, self.tokens_kept, self.kept = x.shape[1], len(kept), kept

    def merge(self, t: Tensor) -> Tensor:
        """Merge tokens [B, L, C] to [B, L', C]."""
        return t.index_select(1, self.kept)


class Means(RivalPlan):
    """Take means of cells of (rows, columns); cells that the border cuts have fewer tokens."""

    def __init__(self, x: Tensor, size: Size, cell: Size) -> None:
        super().__init__(x, _corners(size, cell, x.device))
        self._size, self._cell = size, cell

    def merge(self, t: Tensor) -> Tensor:
        """Merge tokens [B, L, C] to the means [B, L', C] of cells."""
        image = t.transpose(1, 2).unflatten(2, self._size)  # [B, C, h, w]
        pooled = F.avg_pool2d(image, self._cell, ceil_mode=True, count_include_pad=False)
        # fused attention is slow for keys that aren't contiguous
        return pooled.flatten(2).transpose(1, 2).contiguous()


class MeanAttention(RivalPlan):
    """Keep all tokens, and give each of them the mean of their outputs."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x, torch.arange(x.shape[1], device=x.device))

    def restore(self, y: Tensor) -> Tensor:
        """Replace all outputs [B, L, C] by their mean."""
        return y.mean(1, keepdim=True).expand_as(y)


def todo(x: Tensor, size: Size, draw: Draw, factor: int) -> RivalPlan:
    """Downsample keys and values by nearest neighbours, as ToDo (arXiv 2402.13573).

    Equal to torch.nn.functional.interpolate to h // factor x w // factor with mode "nearest".
    """
    rows, columns = (
        torch.arange(max(n // factor, 1), device=x.device) * n // max(n // factor, 1) for n in size
    )
    return RivalPlan(x, (rows.unsqueeze(1) * size[1] + columns).flatten())


def strided(x: Tensor, size: Size, draw: Draw, cell: Size) -> RivalPlan:
    """Keep the first token of each cell of (rows, columns)."""
    return RivalPlan(x, _corners(size, cell, x.device))


def second_frames(x: Tensor, size: tuple[int, int, int], draw: Draw) -> RivalPlan:
    """Keep the tokens of the first, third, fifth frame and so on; `size` is that of a video."""
    places = torch.arange(x.shape[1], device=x.device).view(size)
    return RivalPlan(x, places[::2].flatten())


def means(x: Tensor, size: Size, draw: Draw, cell: Size) -> RivalPlan:
    """Take the mean of each cell of (rows, columns)."""
    return Means(x, size, cell)


def random_keys(x: Tensor, size: Size, draw: Draw, share: float) -> RivalPlan:
    """Keep a random `share` of all tokens, drawn anew at each call."""
    scores = draw(x.shape[1], x.device)
    return RivalPlan(x, scores.topk(max(1, round(share * x.shape[1]))).indices)


def random_cells(x: Tensor, size: Size, draw: Draw, cell: Size) -> RivalPlan:
    """Keep one random token of each cell of (rows, columns), drawn anew at each call."""
    corners = _corners(size, cell, x.device)
    rows = (size[0] - corners // size[1]).clamp(max=cell[0])  # the border cuts cells
    columns = (size[1] - corners % size[1]).clamp(max=cell[1])
    drawn = (draw(len(corners), x.device) * rows * columns).long()
    place = drawn.minimum(rows * columns - 1)
    return RivalPlan(x, corners + place // columns * size[1] + place % columns)


def mean_attention(x: Tensor, size: Size, draw: Draw) -> RivalPlan:
    """Give every token the mean output, a change that a useful benchmark must detect."""
    return MeanAttention(x)


def _corners(size: Size, cell: Size, device: torch.device) -> Tensor:
    """Return the place of the first token of each cell [cells]."""
    rows = torch.arange(0, size[0], cell[0], device=device)
    columns = torch.arange(0, size[1], cell[1], device=device)
    return (rows.unsqueeze(1) * size[1] + columns).flatten()
