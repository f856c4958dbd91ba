"""Taking rows of token tensors by index, and when a result may overwrite its input."""

from __future__ import annotations

import torch
from torch import Tensor


def blocks_of(t: Tensor, slots: Tensor) -> Tensor:
    """Rows of t [B, L, C] at `slots` [T, k], as [B * T, k, C]."""
    blocks, k = slots.shape
    return t.index_select(1, slots.flatten()).reshape(t.shape[0] * blocks, k, t.shape[2])


def rows_of(t: Tensor, index: Tensor) -> Tensor:
    """Rows of t [B, L, C] at `index`, [k] for every sample or [B, k] for each its own, as [B, k, C]."""
    if index.dim() == 1:
        return t.index_select(1, index)
    b, length, c = t.shape
    flat = index + torch.arange(0, b * length, length, device=index.device).unsqueeze(-1)
    return t.reshape(b * length, c).index_select(0, flat.flatten()).view(b, index.shape[1], c)


def in_place(t: Tensor) -> bool:
    """Whether a result computed from `t` may overwrite it: no gradient is needed."""
    return not (torch.is_grad_enabled() and t.requires_grad)
