"""Plan what merges in one block: the paper's soft weights with `tau`, hard groups with `keep`."""

from __future__ import annotations

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.groups import Groups, group_tokens, make_cells, no_autocast
from mame_sd.core.paper import Plan, plan_tokens

GRID, ROW = 0.25, 0.5  # largest shares of destinations: one of 2 x 2 patches, every second token


class GroupPlan:
    """Groups of the tokens that follow the prefix tokens, which don't merge.

    Args:
        body: the groups of the other tokens.
        prefix: number of prefix tokens.

    Attributes:
        tokens_in: L, prefix tokens included.
        tokens_kept: L', prefix tokens included.
    """

    def __init__(self, body: Groups, prefix: int) -> None:
        self.body, self.prefix = body, prefix
        self.tokens_in = prefix + body.tokens_in
        self.tokens_kept = prefix + body.tokens_kept

    @property
    def sizes(self) -> Tensor:
        """Return the number of tokens in each group, [B, L']."""
        sizes = self.body.sizes
        return torch.cat([sizes.new_ones(sizes.shape[0], self.prefix), sizes], 1)

    @property
    def kept(self) -> Tensor:
        """Return the positions of the tokens that represent the groups, LongTensor [B, L']."""
        kept = self.body.kept
        first = torch.arange(self.prefix, device=kept.device).expand(kept.shape[0], -1)
        return torch.cat([first, kept + self.prefix], 1)

    def merge(self, t: Tensor) -> Tensor:
        """Average the groups of t [B, L, C] to [B, L', C]."""
        return torch.cat([t[:, : self.prefix], self.body.merge(t[:, self.prefix :])], 1)

    def restore(self, y: Tensor) -> Tensor:
        """Copy each group's y [B, L', C] to all of its tokens, [B, L, C]."""
        return torch.cat([y[:, : self.prefix], self.body.restore(y[:, self.prefix :])], 1)


def plan_block(
    feature: Tensor, config: MaMeConfig, size: tuple[int, int] | None, prefix: int
) -> Plan | GroupPlan:
    """Plan which tokens of a block merge.

    Args:
        feature: what is compared, [B, L, d].
        config: with `tau`, the paper's method. With `keep`, each token joins the destination with
            the highest cosine similarity (ToMe, arXiv 2210.09461, compares keys in the same way),
            and the tokens with the lowest stay unmerged.
        size: (h, w) of the patches. If None, the tokens no longer form a grid.
        prefix: number of leading tokens that don't merge.
    """
    if config.tau is not None:
        return plan_tokens(feature, config.tau, prefix)
    assert config.keep is not None
    with no_autocast(feature), torch.no_grad():
        patches = feature[:, prefix:]
        share = min(config.keep, ROW if size is None else GRID)
        cells = make_cells(size or (patches.shape[1],), share, 0, None, patches.device)
        dtype = torch.promote_types(patches.dtype, torch.float32)
        patches = torch.nn.functional.normalize(patches.to(dtype), dim=-1)
        stay = max(0, round(config.keep * patches.shape[1]) - cells.kept)
        groups = group_tokens(patches.index_select(1, cells.order), cells, stay=stay)
        groups.stay = groups.stay.sort(1).values  # later blocks get the tokens in order
    return GroupPlan(groups, prefix)
