"""The plan of one block: the paper's by `tau`, hard groups by `keep`."""

from __future__ import annotations

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.merge import Groups, cells_of, group_tokens, no_autocast
from mame_sd.core.paper import Plan, plan_tokens

GRID, ROW = 0.25, 0.5  # shares of the destinations at most: of 2 x 2 patches one, or every second


class GroupPlan:
    """Groups of tokens behind leading ones that take no part.

    Args:
        found: the groups.
        prefix: how many tokens stand before those of the groups.

    Attributes:
        tokens_in, tokens_kept: L and L', prefix tokens included.
    """

    def __init__(self, found: Groups, prefix: int) -> None:
        self.found, self.prefix = found, prefix
        self.tokens_in = prefix + found.tokens_in
        self.tokens_kept = prefix + found.tokens_kept

    @property
    def sizes(self) -> Tensor:
        """How many tokens each of those that `merge` gives stands for, [B, L']."""
        sizes = self.found.sizes
        return torch.cat([sizes.new_ones(sizes.shape[0], self.prefix), sizes], 1)

    @property
    def kept(self) -> Tensor:
        """LongTensor [B, L'], the positions of the tokens that `merge` gives."""
        return self._after_prefix(self.found.kept)

    @property
    def groups(self) -> Tensor:
        """LongTensor [B, L], which of the tokens that `merge` gives each token went to."""
        return self._after_prefix(self.found.groups)

    def merge(self, t: Tensor) -> Tensor:
        """Average the groups of t [B, L, C], as [B, L', C]."""
        return torch.cat([t[:, : self.prefix], self.found.merge(t[:, self.prefix :])], 1)

    def restore(self, y: Tensor) -> Tensor:
        """Restore all tokens [B, L, C] as copies of their groups' y [B, L', C]."""
        return torch.cat([y[:, : self.prefix], self.found.restore(y[:, self.prefix :])], 1)

    def _after_prefix(self, index: Tensor) -> Tensor:
        first = torch.arange(self.prefix, device=index.device).expand(index.shape[0], -1)
        return torch.cat([first, index + self.prefix], 1)


def plan_block(
    feature: Tensor, config: MaMeConfig, size: tuple[int, int] | None, prefix: int
) -> Plan | GroupPlan:
    """Plan what merges in a block.

    Args:
        feature: what is compared, [B, L, d].
        config: `tau` is the paper's method. By `keep` each token joins the destination of the most
            similar angle (ToMe, arXiv 2210.09461, compares keys so), and the least similar ones
            stay.
        size: (h, w) of the patches; None: they are no grid any more.
        prefix: leading tokens that take no part.
    """
    if config.tau is not None:
        return plan_tokens(feature, config, prefix)
    assert config.keep is not None
    with no_autocast(feature), torch.no_grad():
        body = feature[:, prefix:]
        share = min(config.keep, ROW if size is None else GRID)
        cells = cells_of(size or (body.shape[1],), share, 0, None, body.device)
        dtype = torch.promote_types(body.dtype, torch.float32)
        body = torch.nn.functional.normalize(body.to(dtype), dim=-1)
        stay = max(0, round(config.keep * body.shape[1]) - cells.kept)
        found = group_tokens(body.index_select(1, cells.order), cells, stay=stay)
        found.stay = found.stay.sort(1).values  # later blocks see tokens in their order
    return GroupPlan(found, prefix)
