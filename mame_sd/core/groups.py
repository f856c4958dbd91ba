"""Merging by hard groups: each token joins the nearest destination of its tile, and the farthest
tokens stay alone.

All of it is products of small matrices, one for each tile: similarities, and means as a product
with a matrix of ones. No tokens are sorted and nothing is added atomically, so results don't depend
on the order of threads, and what is not finite stays within its tile.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.core.cells import Cells


class Groups:
    """Which group each token of a grid belongs to.

    Each destination has a group, and so has each token that stays as it is.

    Args:
        cells: the tiles and destinations of the grid.
        dst: LongTensor [T * m], the slots of the destinations.
        row: LongTensor [B, T * P], the number of the destination in its tile that the token of each
            slot joins, -1 for none.
        stay: LongTensor [B, r], the slots of the tokens that stay.
        dtype: of `sizes`.

    Attributes:
        tokens_in, tokens_kept: L and K = T * m + r.
    """

    def __init__(
        self, cells: Cells, dst: Tensor, row: Tensor, stay: Tensor, dtype: torch.dtype
    ) -> None:
        self.cells, self.dst, self.row, self.stay, self.dtype = cells, dst, row, stay, dtype
        self.tokens_in, self.tokens_kept = cells.tokens, cells.kept + stay.shape[1]

    def means(self, *slots: Tensor) -> tuple[list[Tensor], Tensor]:
        """The means of the groups, and how many tokens each has.

        Args:
            slots: tokens [B, T * P, ...] in the order of the slots, all of one dtype.

        Returns:
            [B, K, ...] of each, in its dtype, and the sizes [B, K] in fp32 (fp64 for fp64).
        """
        cells, batch = self.cells, self.row.shape[0]
        least = torch.promote_types(slots[0].dtype, torch.float32)
        # Cards multiply 16 bits and sum in fp32, CPUs hardly do.
        halves = slots[0].is_cuda and slots[0].dtype in (torch.float16, torch.bfloat16)
        dtype = slots[0].dtype if halves else least
        rows = self.row.view(batch * cells.tiles, 1, cells.width)
        belongs = rows == cells.number[: cells.m].view(-1, 1)  # 0, 1, ...
        counts = belongs.sum(-1, keepdim=True, dtype=least)
        # Shares of the mean rather than sums, which leave fp16's range.
        shares = (belongs / counts).to(dtype)
        found = []
        for t in slots:
            exact = t.to(dtype).reshape(batch * cells.tiles, cells.width, math.prod(t.shape[2:]))
            mean = torch.bmm(shares, exact).to(t.dtype).view(batch, cells.kept, *t.shape[2:])
            if self.stay.shape[1]:
                at = self.stay.view(*self.stay.shape, *[1] * (t.dim() - 2))
                mean = torch.cat([mean, t.gather(1, at.expand(-1, -1, *t.shape[2:]))], 1)
            found.append(mean)
        sizes = counts.view(batch, cells.kept)
        return found, F.pad(sizes, (0, self.stay.shape[1]), value=1.0)

    @property
    def sizes(self) -> Tensor:
        """[B, K], how many tokens each group has."""
        return self.means(self.row.new_empty(*self.row.shape, 0, dtype=self.dtype))[1]

    @property
    def kept(self) -> Tensor:
        """LongTensor [B, K], the position of the token that each group formed around."""
        batch, order = self.row.shape[0], self.cells.order
        dst = order.index_select(0, self.dst).expand(batch, -1)
        return torch.cat([dst, order[self.stay]], 1) if self.stay.shape[1] else dst

    @property
    def groups(self) -> Tensor:
        """LongTensor [B, L], the group of each token."""
        cells, device = self.cells, self.row.device
        first = torch.arange(cells.tiles, device=device).view(-1, 1) * cells.m
        found = (self.row.view(-1, cells.tiles, cells.width) + first).flatten(1)
        if self.stay.shape[1]:
            numbers = torch.arange(cells.kept, self.tokens_kept, device=device)
            found = found.scatter(1, self.stay, numbers.expand(self.stay.shape))
        return found.index_select(1, cells.slot)

    def merge(self, t: Tensor) -> Tensor:
        """The means [B, K, C] of the groups of t [B, L, C], in the dtype of t."""
        return self.means(t.index_select(1, self.cells.order))[0][0]

    def restore(self, y: Tensor) -> Tensor:
        """All tokens [B, L, C] as copies of their groups' y [B, K, C]."""
        return y.gather(1, self.groups.unsqueeze(-1).expand(-1, -1, y.shape[-1]))


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b [n, i, k] of a [n, i, j] and b [n, j, k], in fp32 (fp64 for fp64) at least."""
    learns = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16) and not learns:
        return torch.bmm(a, b, out_dtype=torch.float32)
    dtype = torch.promote_types(a.dtype, torch.float32)
    return torch.bmm(a.to(dtype), b.to(dtype))


@torch.no_grad()
def group_tokens(
    slots: Tensor,
    cells: Cells,
    draw: Tensor | None = None,
    leader: Tensor | None = None,
    stay: int = 0,
) -> Groups:
    """Groups of tokens by their Euclidean distance to the destinations of their tile.

    Not by the angle: a logit depends on a key's length too, and keys that much of the attention
    lies on (sinks) are long. The choice has no gradient; means of the groups have.

    Args:
        slots: what is compared, in the order of the slots, [B, T * P, d]; fp32 is computed with
            (fp64 for fp64), whatever its dtype.
        cells: the tiles and destinations.
        draw: LongTensor [1], which of the draws; None: the first.
        leader: LongTensor [B], the sample whose tokens decide for each sample, such as the guided
            half for the unguided one; None, or of another batch: each its own.
        stay: how many of the tokens stay as they are: those farthest from any destination.
    """
    dst = cells.dst[0] if draw is None else cells.dst.index_select(0, draw).view(-1)
    batch, dtype = slots.shape[0], torch.promote_types(slots.dtype, torch.float32)
    place = None
    if leader is not None and leader.shape[0] == batch and batch > 1:
        place = leader
        if slots.device.type == "cpu" and not torch.compiler.is_compiling():
            # Nothing waits here, and samples with one leader are compared once.
            leader, place = leader.unique(return_inverse=True)
            slots = slots if len(leader) == batch else slots.index_select(0, leader)
    squares = torch.linalg.vector_norm(slots, dim=-1, dtype=dtype).square()
    chosen = slots.index_select(1, dst).view(-1, cells.m, slots.shape[2])
    # |x - d|^2 = |x|^2 - 2 (x . d - |d|^2 / 2), of which the last part tells the nearest.
    nearness = product(chosen, slots.view(-1, cells.width, slots.shape[2]).transpose(1, 2))
    of_chosen = squares.index_select(1, dst).view(-1, cells.m, 1)
    best, row = torch.sub(nearness, of_chosen, alpha=0.5).max(1)
    row = row.view(len(slots), cells.tiles * cells.width)
    row = row.index_copy(1, dst, cells.number.expand(len(slots), -1))
    if cells.pad is not None:
        row = row.masked_fill(cells.pad, -1)
    staying = row[:, :0]
    if stay:
        far = torch.sub(squares, best.view_as(row), alpha=2).index_fill(1, dst, -torch.inf)
        if cells.pad is not None:
            far = far.masked_fill(cells.pad, -torch.inf)
        staying = far.topk(stay).indices
        row = row.scatter(1, staying, -1)
    if place is not None:
        row, staying = row.index_select(0, place), staying.index_select(0, place)
    return Groups(cells, dst, row, staying, dtype)
