"""From similarities to fusion weights W^F, and which sources are preserved (paper, "Adaptive Weight Refining").

Where no gradient is needed everything works in place: at most two buffers of M x N are alive at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.indexing import in_place
from mame_sd.core.partition import Positions

# Refining keeps what exceeds a column's mean. Where that leaves at most this share of the column (a tie, up to
# rounding), the unrefined weights stay: below it, fp32 decides by rounding alone.
REFINE_FLOOR = 1e-5


def fusion_weights(s: Tensor, pos: Positions, config: MaMeConfig) -> tuple[Tensor, Tensor]:
    """W^F [B, T, m, n] and the preserved sources as indices into `pos.src`, ascending: [r] with tau, [B, r] with keep.

    Args:
        s: S [B, T, m, n]; overwritten where no gradient is needed.
        pos: the partition.
        config: `tau` or `keep`, `weights`, `refine`, `variant` and `eps` are read.
    """
    return _weights_by_tau(s, pos, config) if config.keep is None else _weights_by_keep(s, pos, config)


def _weights_by_tau(s: Tensor, pos: Positions, config: MaMeConfig) -> tuple[Tensor, Tensor]:
    """For a fixed threshold: a source is preserved where any sample has no destination above tau for it."""
    assert config.tau is not None
    if config.variant == "paper":
        weights = _paper_weights(_excess(s, config.tau), config.refine, config.eps)
        merges = weights.sum(-2) > 0  # [B, T, n]
    elif config.weights == "best":
        best, row = s.max(-2)
        merges = best > config.tau
        weights = _single(s, row, merges)
    else:
        excess = _excess(s, config.tau)
        total = excess.sum(-2)
        merges = total > 0
        weights = _settled_weights(excess, total, config.refine)
    unmerged, preserved = preserved_by_tau(merges, pos)
    return _masked(weights, unmerged), preserved


def preserved_by_tau(merges: Tensor, pos: Positions) -> tuple[Tensor, Tensor]:
    """Which source slots don't merge in all samples [T, n], padding among them, and the preserved sources [r].

    Args:
        merges: bool [B, T, n], where a source has a destination above tau.
    """
    unmerged = ~merges.all(0)
    if pos.src_pad is not None:
        unmerged = unmerged | pos.src_pad
    return unmerged, unmerged.flatten().index_select(0, pos.src_real).nonzero().squeeze(-1)


def _weights_by_keep(s: Tensor, pos: Positions, config: MaMeConfig) -> tuple[Tensor, Tensor]:
    """For a share of the tokens that is to remain: the most similar sources merge, each sample's own."""
    assert config.keep is not None
    best, row = s.max(-2)  # [B, T, n]
    unmerged, preserved = preserved_by_keep(best, pos, config.keep)
    if preserved.shape[1] == pos.N:
        return torch.zeros_like(s), preserved
    if config.weights == "best":
        return _single(s, row, ~unmerged), preserved
    # The found tau: the least similarity that merges. Where NaN ones are chosen, they set none.
    tau = best.masked_fill(unmerged | best.isnan(), math.inf).flatten(1).min(1).values
    excess = _excess(s, tau.view(-1, 1, 1, 1))
    total = excess.sum(-2)
    single = ~(total > 0) & ~unmerged  # nothing strictly above the found tau: the best one takes it all
    weights = _masked(_settled_weights(excess, total, config.refine), unmerged)
    one, row = single.unsqueeze(-2).to(weights.dtype), row.unsqueeze(-2)
    weights = weights.scatter_add_(-2, row, one) if in_place(weights) else weights.scatter_add(-2, row, one)
    return weights, preserved


def preserved_by_keep(best: Tensor, pos: Positions, keep: float) -> tuple[Tensor, Tensor]:
    """Which source slots don't merge [B, T, n], padding among them, and the preserved sources [B, r].

    Args:
        best: [B, T, n], the largest similarity of every source slot. The highest merge, ties by position, NaN ranks last.
        keep: share of the tokens to keep; all destinations are kept in any case.
    """
    b, merged = best.shape[0], pos.L - max(pos.M, round(keep * pos.L))
    if merged in (0, pos.N):  # nothing to choose
        order = torch.arange(pos.N, device=best.device).expand(b, -1)
    else:
        last = torch.finfo(best.dtype).min
        best = torch.nan_to_num(best.detach(), nan=last, posinf=math.inf, neginf=-math.inf)
        order = best.flatten(1).index_select(1, pos.src_real).argsort(dim=1, descending=True, stable=True)
    unmerged = torch.ones(b, pos.blocks * pos.n, dtype=torch.bool, device=best.device)
    unmerged = unmerged.scatter_(1, pos.src_real[order[:, :merged]], False)
    return unmerged.view_as(best), order[:, merged:].sort(dim=1).values


def _excess(s: Tensor, tau: Tensor | float) -> Tensor:
    """S+ = relu(S - tau). Works in place where no gradient is needed: `s` is gone afterwards."""
    return s.sub_(tau).relu_() if in_place(s) else (s - tau).relu()


def _single(s: Tensor, row: Tensor, columns: Tensor) -> Tensor:
    """Weight 1 for the destination `row` [B, T, n] of every source in `columns` (bool [B, T, n]), else 0. `s` is gone."""
    blank = s.zero_() if in_place(s) else torch.zeros_like(s)
    return blank.scatter_(-2, row.unsqueeze(-2), columns.unsqueeze(-2).to(s.dtype))


def _settled_weights(excess: Tensor, total: Tensor, refine: bool) -> Tensor:
    """Columns of relu(S+ - mean of its positive entries), normalised; total = sum_i S+ [B, T, n].

    The same as normalising S+ first (equations for W, zeta, W~, W_F without eps), in two reductions and one more pass.
    """
    if not refine:
        scale = torch.where(total == 0, 1.0, total).unsqueeze(-2)
        return excess.div_(scale) if in_place(excess) else excess / scale
    lean = in_place(excess)
    refined = torch.empty_like(excess) if lean else None
    mean = (total / _positive(excess, refined).clamp(min=1)).unsqueeze(-2)
    refined = torch.sub(excess, mean, out=refined).relu_() if lean else (excess - mean).relu()
    mass = refined.sum(-2)
    tie = mass <= REFINE_FLOOR * total
    scale = torch.where(tie, total, mass)
    scale = torch.where(scale == 0, 1.0, scale).unsqueeze(-2)
    if lean:
        return torch.where(tie.unsqueeze(-2), excess, refined, out=refined).div_(scale)
    return torch.where(tie.unsqueeze(-2), excess, refined) / scale


def _positive(values: Tensor, out: Tensor | None = None) -> Tensor:
    """Count of the positive entries of each column, as a float; `out` is scratch of the shape of `values`.

    Summing a comparison as it comes would first copy it to int64, which is two buffers of fp32.
    """
    with torch.no_grad():
        return torch.gt(values, 0, out=torch.empty_like(values) if out is None else out).sum(-2)


def _paper_weights(excess: Tensor, refine: bool, eps: float) -> Tensor:
    """The printed equations for W, zeta, W~ and W_F, with C_j counted as in Algorithm 1."""
    lean = in_place(excess)
    total = excess.sum(-2, keepdim=True) + eps
    weights = excess.div_(total) if lean else excess / total
    if not refine:
        return weights
    count = _positive(weights).unsqueeze(-2)
    # W - sum W / (C + eps) in two steps: in fp32, C + eps is C, and eps decides over a source of one candidate.
    mean = weights.sum(-2, keepdim=True) / count.clamp(min=1)
    lift = mean * (eps / (count + eps))
    pruned = weights.sub_(mean).add_(lift).relu_() if lean else (weights - mean + lift).relu()
    total = pruned.sum(-2, keepdim=True) + eps
    return pruned.div_(total) if lean else pruned / total


def _masked(weights: Tensor, columns: Tensor) -> Tensor:
    """`weights` with the columns that are True [..., n] all 0."""
    mask = columns.unsqueeze(-2)
    return weights.masked_fill_(mask, 0) if in_place(weights) else weights.masked_fill(mask, 0)
