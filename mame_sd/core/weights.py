"""From similarities S to fusion weights W^F, and which sources are preserved (paper, "Adaptive
Weight Refining").

Where no gradient is needed each result takes the place of what it is made from. At most two buffers
of M x N are alive at once. Each column (dimension -2) holds one source.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.buffers import in_place, masked_fill, relu, reuse
from mame_sd.core.partition import Positions
from mame_sd.core.similarity import preserved_by_keep, preserved_by_tau

# Refining keeps what exceeds a column's mean. Where that leaves at most this share of the column (a
# tie, up to rounding), the unrefined weights are taken. Below it, fp32 decides by rounding alone.
REFINE_FLOOR = 1e-5


class Fusion(NamedTuple):
    """W^F [B, T, m, n]; and the preserved sources as indices into `pos.src`, ascending, [r] with
    tau, [B, r] with keep.
    """

    weights: Tensor
    preserved: Tensor


def fusion_weights(s: Tensor, pos: Positions, config: MaMeConfig) -> Fusion:
    """Who merges where, with which weights.

    Args:
        s: S [B, T, m, n]; overwritten where no gradient is needed.
        pos: the partition.
        config: `tau` or `keep`, `refine`, `variant` and `eps` are read.
    """
    return (
        _weights_by_tau(s, pos, config) if config.keep is None else _weights_by_keep(s, pos, config)
    )


def _weights_by_tau(s: Tensor, pos: Positions, config: MaMeConfig) -> Fusion:
    """For a fixed threshold: a source is preserved where any sample has no destination above tau
    for it.
    """
    assert config.tau is not None
    if config.variant == "paper":
        weights = _printed_weights(_above(s, config.tau), config.refine, config.eps)
        merges = weights.sum(-2) > 0
    else:
        above = _above(s, config.tau)
        total = above.sum(-2)
        merges = total > 0
        weights = _settled_weights(above, total, config.refine)
    stays = ~merges.all(0)
    unmerged = stays if pos.src_pad is None else stays | pos.src_pad
    return Fusion(masked_fill(weights, unmerged.unsqueeze(-2), 0), preserved_by_tau(stays, pos))


def _weights_by_keep(s: Tensor, pos: Positions, config: MaMeConfig) -> Fusion:
    """For a share of the tokens that is to remain: the most similar sources merge, each sample's
    own.
    """
    assert config.keep is not None
    best, row = s.max(-2)  # [B, T, n]
    preserved = preserved_by_keep(best, pos, config.keep)
    if preserved.shape[1] == pos.N:
        return Fusion(torch.zeros_like(s), preserved)
    unmerged = unmerged_slots(preserved, pos)
    # The found tau: the least similarity that merges. Where NaN ones are chosen, they set none.
    tau = best.masked_fill(unmerged | best.isnan(), math.inf).flatten(1).min(1).values
    above = _above(s, tau.view(-1, 1, 1, 1))
    total = above.sum(-2)
    single = (
        ~(total > 0) & ~unmerged
    )  # nothing strictly above the found tau: the best one takes it all
    weights = masked_fill(_settled_weights(above, total, config.refine), unmerged.unsqueeze(-2), 0)
    one = single.unsqueeze(-2).to(weights.dtype)
    return Fusion(
        torch.scatter_add(weights, -2, row.unsqueeze(-2), one, out=reuse(weights)), preserved
    )


def unmerged_slots(preserved: Tensor, pos: Positions) -> Tensor:
    """The source slots that don't merge, or are padding, bool [B, T, n], of the preserved sources
    [B, r].
    """
    b = preserved.shape[0]
    unmerged = torch.zeros(b, pos.blocks * pos.n, dtype=torch.bool, device=preserved.device)
    unmerged = unmerged.scatter_(1, pos.src_real[preserved], True).view(b, pos.blocks, pos.n)
    return unmerged if pos.src_pad is None else unmerged | pos.src_pad


def _above(s: Tensor, tau: Tensor | float) -> Tensor:
    """S~ = ReLU(S - tau)."""
    return relu(torch.sub(s, tau, out=reuse(s)))


def _settled_weights(above: Tensor, total: Tensor, refine: bool) -> Tensor:
    """W^F from S~ and its columns' sums [B, T, n], exactly: without eps, and never a column that
    refining empties.

    W~ = ReLU(W - zeta) is proportional to ReLU(S~ - mean of the positive S~ of the column), so W
    itself is not made.
    """
    if not refine:
        return torch.div(above, _no_zero(total).unsqueeze(-2), out=reuse(above))
    scratch = torch.empty_like(above)
    mean = (total / _positive(above, scratch).clamp(min=1)).unsqueeze(-2)
    refined = relu(torch.sub(above, mean, out=scratch if in_place(above) else None))
    mass = refined.sum(-2)
    tie = mass <= REFINE_FLOOR * total
    weights = torch.where(tie.unsqueeze(-2), above, refined, out=reuse(refined))
    return torch.div(
        weights, _no_zero(torch.where(tie, total, mass)).unsqueeze(-2), out=reuse(weights)
    )


def _printed_weights(above: Tensor, refine: bool, eps: float) -> Tensor:
    """W^F from S~ by the printed equations for W, zeta, W~ and W^F, with C_j counted as in
    Algorithm 1.
    """
    W = torch.div(above, above.sum(-2, keepdim=True) + eps, out=reuse(above))
    if not refine:
        return W
    C = _positive(W, torch.empty_like(W)).unsqueeze(-2)
    # W - zeta, zeta = sum W / (C + eps), in two steps. In fp32, C + eps is C, and eps decides over
    # a source of one candidate.
    mean = W.sum(-2, keepdim=True) / C.clamp(min=1)
    pruned = torch.sub(W, mean, out=reuse(W))
    pruned = relu(torch.add(pruned, mean * (eps / (C + eps)), out=reuse(pruned)))  # W~
    return torch.div(pruned, pruned.sum(-2, keepdim=True) + eps, out=reuse(pruned))


@torch.no_grad()
def _positive(values: Tensor, scratch: Tensor) -> Tensor:
    """How many entries of each column are positive, as a float.

    Summing a comparison as it comes would first copy it to int64, which is two buffers of fp32.
    """
    return torch.gt(values, 0, out=scratch).sum(-2)


def _no_zero(divisor: Tensor) -> Tensor:
    """1 instead of 0, for columns that are all 0."""
    return torch.where(divisor == 0, 1.0, divisor)
