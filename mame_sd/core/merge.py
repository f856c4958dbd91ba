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
from mame_sd.core.matrix_plan import MergePlan
from mame_sd.core.partition import Positions, positions
from mame_sd.core.pick_plan import pick_plan
from mame_sd.core.plan import Plan, fused_plan, row_plan
from mame_sd.core.similarity import nearest, similarity_of
from mame_sd.core.tensors import no_autocast
from mame_sd.core.weights import fusion_weights, merged_by_keep


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
            merges, a LongTensor [B] (`mame_sd.core.pairs.leaders`); None: each its own.

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
    with no_autocast(x):
        if config.weights == "pick":
            return pick_plan(feature, pos, config, special, lead, leader)
        if config.weights == "best":  # of which no gradient comes
            plan = fused_plan(feature.detach(), pos, config, special, lead, leader)
            if plan is not None:
                return plan
            ranked = config.keep is None or merged_by_keep(pos, config.keep) < pos.N
            if (
                pos.m == 1 and not ranked
            ):  # one destination in each tile, and every source merges: nothing to compare
                best, row = _only(feature, pos)
            else:
                best, row = _nearest(feature.detach(), leader, pos, config.metric, ranked)
            return row_plan(best, row, pos, config, special, lead)
        feature = feature if leader is None else feature.index_select(0, leader)
        similarity = similarity_of(
            feature, pos, config.metric
        )  # "Similarity-Based Fusion Matrix": S
        fusion = fusion_weights(similarity, pos, config)  # "Adaptive Weight Refining": W^F; X_pres
        return MergePlan(fusion, pos, special, lead, paper=config.variant == "paper")


def _nearest(
    x: Tensor, leader: Tensor | None, pos: Positions, metric: str, ranked: bool
) -> tuple[Tensor, Tensor]:
    """`nearest` of each sample's leader; on a CPU, where nothing waits for a value, found once for
    all that it leads.
    """
    if leader is None:
        return nearest(x, pos, metric, ranked)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        leading, place = leader.unique(return_inverse=True)
        if len(leading) < len(leader):
            x, leader = x.index_select(0, leading), place
    best, row = nearest(x, pos, metric, ranked)
    return best.index_select(0, leader), row.index_select(0, leader)


def _only(x: Tensor, pos: Positions) -> tuple[Tensor, Tensor]:
    """`nearest` of x [B, L, d] where each tile has one destination and no source is ranked: the
    largest S is not looked at.
    """
    row = torch.zeros(x.shape[0], pos.blocks, pos.n, dtype=torch.long, device=x.device)
    return torch.ones_like(row, dtype=torch.promote_types(x.dtype, torch.float32)), row
