"""The same plan as `RowPlan` for CUDA devices without our kernels, where every operation of PyTorch
is a launch. Groups are a small matrix of ones for each tile, and means are one product with it.

No sort, no atomic addition, and no result that depends on the order of threads. What is not finite
stays within its tile. On a CPU the sums of `RowPlan` move fewer bytes, so they stay there.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core import fused
from mame_sd.core.buffers import in_place
from mame_sd.core.detail import GROUPS, RANK, Detail, blurred, scaled_directions, slope_of_halves
from mame_sd.core.partition import Positions, constant, counting
from mame_sd.core.plan import RowPlan
from mame_sd.core.similarity import merged_by_keep, nearest_of_tiles, preserved_by_keep, product

DEVICES = {"cuda"}


def on(*tensors: Tensor) -> bool:
    """Whether products of tiles take these tensors."""
    if torch.compiler.is_compiling():  # a compiler joins launches by itself
        return False
    # `is_cuda`, for tensors without values say so too
    here = tensors[0].is_cuda or tensors[0].device.type in DEVICES
    return here and all(t.dtype in fused.DTYPES and in_place(t) for t in tensors)


class TiledPlan(RowPlan):
    """A plan that holds the group of every slot of its tiles.

    Args:
        groups: [B, T, m + n], which of the tokens that `merge` gives the token of each slot goes
            to, or is; negative at padding.
        stay: [B, r] positions of the preserved sources.
        pos, preserved, lead: as `Plan`.
    """

    def __init__(
        self, groups: Tensor, stay: Tensor, pos: Positions, preserved: Tensor, lead: torch.Size
    ) -> None:
        super().__init__(None, pos, preserved, 0, lead, torch.float32)
        self._slots_groups, self._stay = groups, stay
        self._chosen: dict[torch.dtype, Tensor] = {}
        self._counts: Tensor | None = None

    @cached_property
    def _rows(self) -> Tensor:
        """`rows` and `sample_rows` side by side."""
        return self._slots_groups.flatten(1).index_select(1, self.positions.placed)

    @cached_property
    def rows(self) -> Tensor:
        """See `Plan`."""
        return self._rows[:, : self.tokens_in]

    @property
    def sample_rows(self) -> Tensor:
        """See `RowPlan`."""
        return self._rows[:, self.tokens_in :]

    @property
    def sizes(self) -> Tensor:
        """See `Plan`; [B, L']."""
        if self._sizes is None:
            self._count(torch.float32)
        return super().sizes

    def means(self, t: Tensor) -> Tensor:
        """See `RowPlan`."""
        if not on(t):
            return super().means(t)
        y = t.new_empty(t.shape[0], self.tokens_kept, t.shape[2])
        self._fill(t, y)
        return y

    def with_sample(self, t: Tensor) -> Tensor:
        """See `RowPlan`."""
        if not on(t):
            return super().with_sample(t)
        pos, kept = self.positions, self.tokens_kept
        y = t.new_empty(t.shape[0], kept + pos.samples, t.shape[2])
        self._fill(t, y[:, :kept])
        torch.index_select(t, 1, pos.sample, out=y[:, kept:])
        return y

    def pairs(
        self, key: Tensor, value: Tensor, at: Tensor, first: int, after: int
    ) -> tuple[Tensor, Tensor]:
        """Keys [B, H, L, D] and values [B, H, L, D'] merged, and those of all slots.

        Args:
            key, value: of these tokens, and of others around them.
            at: where the tokens of the slots are among them.
            first, after: how many stand before these tokens and after them.

        Returns:
            Both side by side, [B, first + L' + after, H, D + D'] and [B, T * (m + n), H, D + D'].
        """
        tokens, width = (key.transpose(1, 2), value.transpose(1, 2)), key.shape[3]
        batch, heads, last = key.shape[0], key.shape[1], first + self.tokens_kept
        slots = key.new_empty(batch, at.shape[0], heads, width + value.shape[3])
        kept = key.new_empty(batch, last + after, heads, slots.shape[3])
        for t, to, every in zip(tokens, _split(kept, width), _split(slots, width), strict=True):
            torch.index_select(t, 1, at, out=every)
            if first:
                to[:, :first] = t[:, :first]
            if after:
                to[:, last:] = t[:, -after:]
            if self._stay.shape[1]:
                stay = self._slots_of_stay(at)[:, :, None, None].expand(-1, -1, *t.shape[2:])
                torch.gather(t, 1, stay, out=to[:, last - stay.shape[1] : last])
        self._average(slots.flatten(2), kept[:, first : first + self.positions.M].flatten(2))
        return kept, slots

    def _slots_of_stay(self, at: Tensor) -> Tensor:
        """Where the preserved sources are among the tokens that `pairs` is given, [B, r]."""
        return at[self.positions.slot[self._stay]]

    def restore(self, y: Tensor, detail: Detail | None = None) -> Tensor:
        """See `Plan`."""
        if detail is not None or not on(y):
            return super().restore(y, detail)
        y = self._checked(y, self.tokens_kept, "restore")
        return gathered(y, self.rows).view(*self._lead, self.tokens_in, y.shape[2])

    def _restored_with_detail(self, y: Tensor, detail: Detail) -> Tensor:
        """See `RowPlan`: outputs and the inputs' directions side by side, so that both are blurred,
        averaged and restored at once.
        """
        feature, plane, means = detail
        count, channels = min(RANK, self.positions.M // GROUPS), y.shape[2]
        if not count or not on(y, feature):
            return super()._restored_with_detail(y, detail)
        cast = constant(scaled_directions, feature.shape[2], count, y.dtype, y.device)
        means = self.means(feature) if means is None else means
        merged = torch.cat([y, means.to(y.dtype) @ cast], 2)
        x = blurred(gathered(merged, self.rows), plane)
        unexplained = merged.sub_(self.means(x))
        x += gathered(unexplained, self.rows)
        # What is seen in the feature's directions beyond the blur of groups.
        alike, at = feature.to(y.dtype), cast.expand(len(y), -1, -1)
        within = torch.baddbmm(x[..., channels:], alike, at, beta=-1)
        follows = slope_of_halves(unexplained, channels, self.sizes)
        return torch.baddbmm(x[..., :channels], within, follows)

    def _fill(self, t: Tensor, y: Tensor) -> None:
        """Writes t [B, L, C] merged into y [B, L', C]."""
        pos = self.positions
        slots = t.index_select(1, pos.slots.flatten())
        self._average(slots, y[:, : pos.M])
        if self._stay.shape[1]:
            stay = self._stay.unsqueeze(-1).expand(-1, -1, t.shape[2])
            torch.gather(t, 1, stay, out=y[:, pos.M :])

    def _average(self, slots: Tensor, y: Tensor) -> None:
        """Writes the means of tokens of all slots [B, T * (m + n), C] into y [B, M, C]."""
        pos, (batch, _, channels) = self.positions, slots.shape
        chosen = self._count(slots.dtype)
        sums = product(chosen, slots.view(-1, pos.m + pos.n, channels)).view(batch, -1, channels)
        assert self._counts is not None
        if pos.dst_real is None:
            torch.div(sums, self._counts, out=y)
        else:
            torch.index_select((sums / self._counts).to(y.dtype), 1, pos.dst_real, out=y)

    def _count(self, dtype: torch.dtype) -> Tensor:
        """[B * T, m, m + n], 1 where the token of a slot belongs to a destination; and counts."""
        if dtype not in self._chosen:
            pos, groups = self.positions, self._slots_groups.unsqueeze(-2)
            chosen = groups.new_empty(*groups.shape[:2], pos.m, groups.shape[-1], dtype=dtype)
            torch.eq(groups, pos.groups.unsqueeze(-1), out=chosen)
            self._chosen[dtype] = chosen.flatten(0, 1)
            if self._counts is None:
                self._sizes = self._sums_of(chosen)
        return self._chosen[dtype]

    def _sums_of(self, chosen: Tensor) -> Tensor:
        """The sizes [B, L'], and keeps the counts of all slots [B, T * m, 1]."""
        pos, (batch, tiles, m, _) = self.positions, chosen.shape
        if pos.dst_real is None and not self._stay.shape[1]:
            sizes = chosen.sum(-1, dtype=torch.float32).flatten(1)
            self._counts = sizes.unsqueeze(-1)
            return sizes
        sizes = torch.ones(batch, self.tokens_kept, device=chosen.device)
        if pos.dst_real is None:
            counts = sizes[:, : pos.M]
            torch.sum(chosen, -1, dtype=torch.float32, out=counts.unflatten(1, (tiles, m)))
        else:
            counts = chosen.sum(-1, dtype=torch.float32).flatten(1)
            torch.index_select(counts, 1, pos.dst_real, out=sizes[:, : pos.M])
        self._counts = counts.unsqueeze(-1)
        return sizes


def gathered(t: Tensor, index: Tensor) -> Tensor:
    """Rows of t [B, L, C] at `index` [B, k], in one launch."""
    return t.gather(1, index.unsqueeze(-1).expand(-1, -1, t.shape[2]))


def _split(t: Tensor, width: int) -> tuple[Tensor, Tensor]:
    return t[..., :width], t[..., width:]


def tiled_plan(
    x: Tensor, pos: Positions, config: MaMeConfig, lead: torch.Size, leader: Tensor | None
) -> TiledPlan | None:
    """The plan of feature x [B, L, d] by products of tiles; None where another form has to make it.

    Preserved sources come in the order of their similarity, not of their positions. That saves a
    sort, and no one who attends to them can tell.
    """
    if config.keep is None or config.metric != "cosine" or pos.m > fused.LARGEST_TILE or not on(x):
        return None
    merged, width = merged_by_keep(pos, config.keep), pos.m + pos.n
    if not merged:
        return None
    ranked = merged < pos.N
    best, row = nearest_of_tiles(x, pos, ranked, leader)
    groups = row.new_empty(x.shape[0], pos.blocks, width)
    groups[..., : pos.m] = pos.groups
    sources = torch.add(row, pos.groups[:, :1], out=groups[..., pos.m :])
    if pos.src_pad is not None:
        sources.masked_fill_(pos.src_pad, -1)
    preserved = row.new_empty(x.shape[0], 0)
    stay = preserved
    if ranked:
        preserved = preserved_by_keep(best, pos, config.keep, ascending=False)
        stay = pos.src[preserved]
        ranks = constant(counting, pos.L, x.device)[pos.M : pos.M + stay.shape[1]]
        groups.view(len(groups), -1).scatter_(1, pos.slot[stay], ranks.expand(stay.shape))
    return TiledPlan(groups, stay, pos, preserved, lead)
