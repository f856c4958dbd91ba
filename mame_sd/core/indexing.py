"""Taking rows of token tensors by index."""

from __future__ import annotations

import torch
from torch import Tensor


def blocks_of(t: Tensor, slots: Tensor) -> Tensor:
    """Rows of t [B, L, C] at `slots` [T, k], as [B * T, k, C]; always a copy."""
    blocks, k = slots.shape
    every = slots.flatten().expand(t.shape[0], -1)
    return rows_of(t, every).view(t.shape[0] * blocks, k, t.shape[2])


def rows_of(t: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows of t [B, L, C] at `index`, [k] for every sample or [B, k] for each its own, as [B, k,
    C]; into `out`, contiguous, where given.
    """
    if index.dim() == 1:
        return torch.index_select(t, 1, index, out=out)
    b, length, c = t.shape
    into = None if out is None else out.view(-1, c)
    return torch.index_select(t.reshape(b * length, c), 0, flat_rows(index, length), out=into).view(
        b, index.shape[1], c
    )


def gathered(t: Tensor, index: Tensor) -> Tensor:
    """`rows_of` with an index [B, k] in one launch, where launches are what counts."""
    return t.gather(1, index.unsqueeze(-1).expand(-1, -1, t.shape[2]))


def flat_rows(index: Tensor, length: int) -> Tensor:
    """Rows [B * k] of a [B * length, C] tensor, of each sample's rows `index` [B, k]: the faster
    way to take them.
    """
    first = torch.arange(0, index.shape[0] * length, length, device=index.device)
    return (index + first.unsqueeze(-1)).flatten()
