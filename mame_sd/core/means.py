"""Means of groups of tokens, without a matrix that says who belongs where."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.core.tensors import in_place


class Groups(NamedTuple):
    """Which rows of a [n, C] tensor belong together, group after group."""

    order: Tensor  # LongTensor [n]: the rows, those of one group side by side
    starts: Tensor  # LongTensor [groups]: where each one's begin in `order`


def groups_of(rows: Tensor, count: int) -> Groups:
    """The groups of tokens [B * L, C], `count` of each sample, of which token l of sample b belongs
    to number rows[b, l].

    Without waiting for a device. Every group has a token.
    """
    samples = rows.shape[0]
    group = (rows + torch.arange(samples, device=rows.device).unsqueeze(1) * count).flatten()
    sizes = torch.zeros(samples * count, dtype=torch.long, device=rows.device)
    sizes = sizes.scatter_add_(0, group, torch.ones_like(group))
    return Groups(group.argsort(stable=True), sizes.cumsum(0) - sizes)


def of_heads(groups: Groups, samples: int, heads: int) -> Groups:
    """The groups of tokens [B * H * L, D], alike in all heads of a sample, from those of [B * L,
    C].
    """

    def spread(t: Tensor) -> Tensor:
        sample = torch.arange(samples, device=t.device).view(-1, 1, 1)
        head = torch.arange(heads, device=t.device).view(1, -1, 1)
        return (
            t.view(samples, 1, t.shape[0] // samples) + (sample * (heads - 1) + head) * length
        ).flatten()

    length = groups.order.shape[0] // samples
    return Groups(spread(groups.order), spread(groups.starts))


def can_group(t: Tensor) -> bool:
    """Whether `means` takes tokens like `t`: no gradient is needed, and the device has the
    operation.
    """
    return in_place(t) and t.device.type in ("cpu", "cuda", "mps")


def means(t: Tensor, groups: Groups) -> Tensor:
    """The mean of each group of t [n, C], as [groups, C], up to rounding; a group of one as it
    is.
    """
    wide = (
        t.float() if t.device.type == "cpu" and t.dtype == torch.float16 else t
    )  # there a sum is rounded to its range
    return F.embedding_bag(groups.order, wide, groups.starts, mode="mean").to(t.dtype)


def means_with_gradients(t: Tensor, rows: Tensor, sizes: Tensor) -> Tensor:
    """The same of t [B, L, C] as [B, count, C], with gradients and on any device.

    Args:
        rows: the group of each token [B, L], of `count` of each sample.
        sizes: how many tokens each group has [B, count].
    """
    exact = torch.promote_types(t.dtype, torch.float32)
    index = rows.unsqueeze(-1).expand(t.shape)
    sums = t.new_zeros(*sizes.shape, t.shape[2], dtype=exact).scatter_add(1, index, t.to(exact))
    return (sums / sizes.to(exact).unsqueeze(-1)).to(t.dtype)
