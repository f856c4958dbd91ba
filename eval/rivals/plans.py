"""Rivals that look at no token: keys at fixed or random places, means of cells; and no attention at
all.

* `strided`: every n-th row and column (of keys and values this is ToDo, arXiv 2402.13573: nearest
  neighbour downsampling);
* `random_keys`, `random_cells`: a share of all tokens, or one of each cell, drawn anew at each call
  or once;
* `means`: the mean of each cell;
* `constant`: each layer's output replaced by its mean over all tokens, or by zero: what an
  instrument must be able to see.

Each function gives a maker of plans for one layer, see `layers.rival_on`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import MakePlan, Run

Size = tuple[int, int]


class RivalPlan:
    """A plan that is no partition into destinations and sources: tokens at `kept` alone.

    Args:
        x: the planned tokens [B, L, C].
        kept: positions of the tokens that stay, or stand for those that do [L'].
        owner: the entry of `kept` whose output each token takes when it is restored [L].
    """

    def __init__(self, x: Tensor, kept: Tensor, owner: Tensor | None = None) -> None:
        self.tokens_in, self.tokens_kept = x.shape[1], len(kept)
        self.kept, self._owner = kept, owner

    def merge(self, t: Tensor) -> Tensor:
        """Tokens [B, L, C] as [B, L', C]."""
        return t.index_select(1, self.kept)

    def restore(self, y: Tensor) -> Tensor:
        """All tokens [B, L, C] from y [B, L', C]."""
        if self._owner is None:
            raise ValueError(
                "restore: expected keys and values, which nobody restores; take merge='kv'"
            )
        return y.index_select(1, self._owner)


class Means(RivalPlan):
    """Means of cells of (rows, columns); those that the border cuts have fewer tokens."""

    def __init__(self, x: Tensor, size: Size, cell: Size) -> None:
        super().__init__(x, *_corners(size, cell, x.device))
        self._size, self._cell = size, cell

    def merge(self, t: Tensor) -> Tensor:
        image = t.transpose(1, 2).unflatten(2, self._size)  # [B, C, h, w]
        pooled = F.avg_pool2d(image, self._cell, ceil_mode=True, count_include_pad=False)
        # Fused attention takes its slow way for keys that don't lie together.
        return pooled.flatten(2).transpose(1, 2).contiguous()


class Constant(RivalPlan):
    """All tokens merge into themselves; the mean of their outputs (or zero) is everyone's."""

    def __init__(self, x: Tensor, scale: float) -> None:
        super().__init__(x, torch.arange(x.shape[1], device=x.device))
        self._scale = scale

    def merge(self, t: Tensor) -> Tensor:
        return t

    def restore(self, y: Tensor) -> Tensor:
        return (y.mean(1, keepdim=True) * self._scale).expand_as(y)


def todo(factor: int) -> MakePlan:
    """ToDo: keys and values by nearest-neighbour downsampling by `factor`.

    As torch.nn.functional.interpolate to h // factor x w // factor with mode "nearest".
    """

    def make(x: Tensor, size: Size, run: Run) -> RivalPlan:
        rows, columns = (
            torch.arange(max(n // factor, 1), device=x.device) * n // max(n // factor, 1)
            for n in size
        )
        return RivalPlan(x, (rows.unsqueeze(1) * size[1] + columns).flatten())

    return make


def strided(cell: Size) -> MakePlan:
    """The first token of each cell; restored, its output is the whole cell's."""
    return lambda x, size, run: RivalPlan(x, *_corners(size, cell, x.device))


def means(cell: Size) -> MakePlan:
    """The mean of each cell; restored, its output is the whole cell's."""
    return lambda x, size, run: Means(x, size, cell)


def random_keys(share: float, redraw: bool) -> MakePlan:
    """A random `share` of all tokens, anew at each call or the same for all calls and layers."""

    def make(x: Tensor, size: Size, run: Run) -> RivalPlan:
        scores = _numbers(x.shape[1], x.device, run, redraw)
        return RivalPlan(x, scores.topk(max(1, round(share * x.shape[1]))).indices)

    return make


def random_cells(cell: Size, redraw: bool) -> MakePlan:
    """One random token of each cell, anew at each call or the same for all calls and layers."""

    def make(x: Tensor, size: Size, run: Run) -> RivalPlan:
        corners, _ = _corners(size, cell, x.device)
        rows = (size[0] - corners // size[1]).clamp(max=cell[0])  # the border cuts cells
        columns = (size[1] - corners % size[1]).clamp(max=cell[1])
        place = (
            (_numbers(len(corners), x.device, run, redraw) * rows * columns)
            .long()
            .minimum(rows * columns - 1)
        )
        return RivalPlan(x, corners + place // columns * size[1] + place % columns)

    return make


def constant(scale: float) -> MakePlan:
    """Mean attention (1) or none (0)."""
    return lambda x, size, run: Constant(x, scale)


def _numbers(count: int, device: torch.device, run: Run, redraw: bool) -> Tensor:
    """Uniform numbers: the next of the run, or without `redraw` the same always."""
    generator = run.generator(device) if redraw else torch.Generator(device).manual_seed(0)
    return torch.rand(count, generator=generator, device=device)


def _corners(size: Size, cell: Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of the first token of each cell [cells], and the cell of each position [h * w]."""
    (h, w), (rows, columns) = size, cell
    across = math.ceil(w / columns)
    corners = torch.arange(0, h, rows, device=device).unsqueeze(1) * w + torch.arange(
        0, w, columns, device=device
    )
    row, column = torch.arange(h, device=device) // rows, torch.arange(w, device=device) // columns
    return corners.flatten(), (row.unsqueeze(1) * across + column).flatten()
