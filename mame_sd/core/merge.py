"""MaMe and MaRe: a plan is computed once from a feature, then merges and restores any tensor.

>>> import torch
>>> from mame_sd import MaMeConfig, plan_merge
>>> x = torch.ones(2, 64, 8)                                    # [B, L, d], a constant 8 x 8 image
>>> plan = plan_merge(x, MaMeConfig(keep=0.5, merge="qkv"), size=(8, 8))
>>> plan.tokens_in, plan.tokens_kept
(64, 32)
>>> y = plan.merge(x)                                           # [B, L', d]
>>> y.shape
torch.Size([2, 32, 8])
>>> torch.equal(plan.restore(y), x)  # every token at its own position again
True
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core import fused, tiled_plan
from mame_sd.core.matrix_plan import MergePlan
from mame_sd.core.partition import Positions, constant, counting, positions
from mame_sd.core.pick_plan import pick_plan
from mame_sd.core.plan import Plan, RowPlan, no_autocast
from mame_sd.core.similarity import (
    merged_by_keep,
    nearest,
    preserved_by_keep,
    preserved_by_tau,
    similarity_of,
)
from mame_sd.core.weights import fusion_weights


def plan_merge(
    x: Tensor,
    config: MaMeConfig,
    size: tuple[int, int] | None = None,
    special: int = 0,
    draw: Tensor | None = None,
    leader: Tensor | None = None,
) -> Plan:
    """Decides what merges, from the similarity of the tokens of x (paper, "Merging Process").

    With `tau` a source that has a NaN similarity is above no threshold and is preserved; with
    `keep` it is the last to merge.

    Args:
        x: the feature that is compared [*, L, d], any leading dimensions, floating point; it need
            not be the tensor that is merged. Similarity and weights are fp32 whatever its dtype,
            under autocast too.
        config: the settings; `merge`, `detail`, `min_tokens` and `size` are for callers and not
            read here.
        size: (h, w) of the tokens without the special ones, needed by tiles and by the grid
            partition (a square is assumed where it fits).
        special: leading tokens that take no part, such as a class token.
        draw: with `redraw`, which of the drawn partitions, a LongTensor [1]
            (`mame_sd.core.partition.draw_at`); None: the first.
        leader: of each sample (all leading dimensions as one) the sample whose tokens decide what
            merges. It is a LongTensor [B] (`mame_sd.core.pairs.leaders`). Each sample decides by
            itself where it is None or of another batch (frames of a video, a part of the samples).

    Raises:
        ValueError: a shape, dtype or size that can't be.
    """
    if x.dim() < 2 or not x.is_floating_point():
        raise ValueError(
            f"x: expected floating point tokens of shape [..., L, d], got {x.dtype} {list(x.shape)}"
        )
    if not 0 <= special < x.shape[-2]:
        raise ValueError(
            f"special: expected fewer than the {x.shape[-2]} tokens of x, got {special}"
        )
    lead = x.shape[:-2]
    feature = x.reshape(math.prod(lead), *x.shape[-2:])[:, special:]
    pos = positions(
        feature.shape[1], config, size, x.device, draw
    )  # "Token Partitioning": I_dst and I_src
    if leader is not None:
        leader = leader.to(x.device) if leader.shape[0] == feature.shape[0] else None
    with no_autocast(x):
        if config.weights == "pick":
            return pick_plan(feature, pos, config, special, lead, leader)
        if config.weights == "best":
            return _row_plan(feature.detach(), pos, config, special, lead, leader)
        feature = feature if leader is None else feature.index_select(0, leader)
        similarity = similarity_of(
            feature, pos, config.metric
        )  # "Similarity-Based Fusion Matrix": S
        fusion = fusion_weights(similarity, pos, config)  # "Adaptive Weight Refining": W^F; X_pres
        return MergePlan(fusion, pos, special, lead, paper=config.variant == "paper")


def _row_plan(
    x: Tensor,
    pos: Positions,
    config: MaMeConfig,
    special: int,
    lead: torch.Size,
    leader: Tensor | None,
) -> RowPlan:
    """The plan in which each source goes whole to its most similar destination, of feature x [B, L,
    d] without special tokens. No gradient comes of it.
    """
    if x.device.type in fused.DEVICES:
        found = fused.groups_and_preserved(x, pos, config, special, leader)
        if found is not None:
            return RowPlan(found[0], pos, found[1], special, lead, torch.float32)
    # `is_cuda`: tensors without values say so too
    if not special and (x.is_cuda or x.device.type in tiled_plan.DEVICES):
        tiled = tiled_plan.tiled_plan(x, pos, config, lead, leader)
        if tiled is not None:
            return tiled
    keep = config.keep
    ranked = keep is None or merged_by_keep(pos, keep) < pos.N
    b = x.shape[0]
    if pos.m == 1 and not ranked:  # one destination in each tile, and every source merges
        best = None
        row = torch.zeros(b, pos.blocks, pos.n, dtype=torch.long, device=x.device)
    elif leader is None:
        best, row = nearest(x, pos, config.metric, ranked)
    else:
        # On a CPU, where nothing waits for a value, it is found once for all that a sample leads.
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            leading, place = leader.unique(return_inverse=True)
            if len(leading) < b:
                x, leader = x.index_select(0, leading), place
        found = nearest(x, pos, config.metric, ranked)
        best, row = (t.index_select(0, leader) for t in found)
    preserved = None
    if best is not None and ranked:
        preserved = preserved_by_keep(best, pos, keep) if keep else preserved_of(best, pos, config)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return row_plan(row, preserved, pos, special, lead, dtype)


def preserved_of(best: Tensor, pos: Positions, config: MaMeConfig) -> Tensor:
    """The preserved sources, as in `Plan`, by the largest similarity `best` [B, T, n] of each."""
    if config.keep is not None:
        return preserved_by_keep(best, pos, config.keep)
    assert config.tau is not None
    return preserved_by_tau(~(best > config.tau).all(0), pos)


def row_plan(
    row: Tensor,
    preserved: Tensor | None,
    pos: Positions,
    special: int,
    lead: torch.Size,
    dtype: torch.dtype,
) -> RowPlan:
    """The plan of sources that each go to destination `row` [B, T, n] of their tile, but for the
    `preserved` ones (None: there are none).
    """
    b = row.shape[0]
    # Destinations of a tile are neighbours among the groups, so that a source's is so many behind
    # the first.
    src = (row + pos.gather[pos.slots[:, :1]]).flatten(1)
    if preserved is None:
        preserved = row.new_empty(b, 0)
    elif torch.compiler.is_compiling() or preserved.shape[-1]:
        # With tau a graph does not know how many.
        stay = preserved.expand(b, -1)
        ranks = torch.arange(pos.M, pos.M + stay.shape[1], device=src.device).expand(b, -1)
        src = src.scatter(1, pos.src_real[stay], ranks)
    every = torch.cat([constant(counting, pos.M, src.device).expand(b, -1), src], 1)
    rows = every.index_select(1, pos.gather)
    if special:
        first = constant(counting, special, src.device).expand(b, -1)
        rows = torch.cat([first, rows + special], 1)
    return RowPlan(rows, pos, preserved, special, lead, dtype)
