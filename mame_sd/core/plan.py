"""A plan of merging: `merge` (MaMe) and `restore` (MaRe) of any tensor.

Where each source goes whole to its most similar destination (`weights="best"`) a plan knows who
went where, and needs no matrix (`RowPlan`): merging takes means of groups, restoring takes rows.
What is not finite stays within its group (with detail, its sample).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core import fused, means
from mame_sd.core.detail import GROUPS, RANK, Detail, blurred, directions, slope
from mame_sd.core.partition import Positions
from mame_sd.core.tensors import constant, counting, in_place, no_autocast, rows_of
from mame_sd.core.weights import merged_by_keep, preserved_by_keep, preserved_by_tau


class Plan:
    """Which tokens merge, with which weights: a value, made by `mame_sd.plan_merge`, that holds no
    tokens.

    Below, `*` are the leading dimensions of the planned tensor, T is the number of tiles (1 without
    tiles), m and n destinations and sources of one tile (padded to the largest tile), M and N those
    of all tiles, r the preserved sources.

    Args:
        pos: where destinations and sources are.
        preserved: the sources that are preserved, as indices into `pos.src`: [r], or [B, r] where
            samples have their own.
        special: leading tokens that take no part.
        lead: the leading dimensions *, B in all.

    Attributes:
        positions: `pos`.
        special: `special`.
        tokens_in: L, special tokens included.
        tokens_kept: L', special tokens included.
    """

    def __init__(self, pos: Positions, preserved: Tensor, special: int, lead: torch.Size) -> None:
        self.positions = pos
        self.special = special
        self.tokens_in = special + pos.L
        self.tokens_kept = special + pos.M + preserved.shape[-1]
        self._preserved = preserved
        self._lead = lead

    @property
    def weights(self) -> Tensor:
        """W^F [*, T, m, n] fp32 (fp64 when planned from fp64): a column sums to 1 where its source
        merges, else it is all 0.
        """
        raise NotImplementedError

    @property
    def counts(self) -> Tensor:
        """R_i = 1 + sum_j W^F_ij [*, M] in the weights' dtype, in the order of `positions.dst`."""
        slots = self._slot_counts()
        real = self.positions.dst_real
        return slots if real is None else slots.index_select(-1, real)

    @property
    def uneven(self) -> bool:
        """Whether some of the tokens that `merge` gives may stand for themselves where others stand
        for groups: always with tau, for a graph does not know how many are preserved.
        """
        return self._preserved.dim() == 1 or self._preserved.shape[-1] > 0

    @property
    def sizes(self) -> Tensor:
        """How many tokens each of those that `merge` gives stands for, in its order: [L'], or [B,
        L']; L in all.
        """
        counts = self.counts
        counts = counts.flatten(0, -2) if counts.dim() > 1 else counts
        ones = (
            counts.new_ones(*counts.shape[:-1], self.special),
            counts.new_ones(*counts.shape[:-1], self._preserved.shape[-1]),
        )
        return torch.cat([ones[0], counts, ones[1]], -1)

    def summed(self, t: Tensor) -> Tensor:
        """What each of the tokens that `merge` gives holds of t [*, L] in all, as [*, L'] in its
        order: shared out by the weights, summed up.

        Raises ValueError as `merge`.
        """
        merged = self.merge(t.unsqueeze(-1)).squeeze(-1)
        return merged * self.sizes.expand(math.prod(self._lead), -1).view(merged.shape)

    @property
    def preserved(self) -> Tensor:
        """bool [*, N], True where a source is preserved, in the order of `positions.src`."""
        mask = torch.zeros(
            math.prod(self._lead), self.positions.N, dtype=torch.bool, device=self._preserved.device
        )
        return mask.scatter_(1, self._preserved.expand(len(mask), -1), True).view(
            *self._lead, self.positions.N
        )

    @property
    def kept(self) -> Tensor:
        """Positions of the tokens that `merge` gives, in its order: [L'], or [B, L'] where samples
        keep their own.
        """
        kept = self._body_kept()
        if not self.special:
            return kept
        first = constant(counting, self.special, kept.device).expand(*kept.shape[:-1], -1)
        return torch.cat([first, kept + self.special], -1)

    @property
    def rows(self) -> Tensor:
        """Which of the tokens that `merge` gives each token mainly went to, [B, L]: its index among
        them.
        """
        return self._found_rows()

    def _found_rows(self) -> Tensor:
        pos, b = self.positions, math.prod(self._lead)
        dst = pos.gather[pos.dst_slots]  # [T, m] rows of the destinations
        src = dst.expand(b, -1, -1).gather(2, self._heaviest()).flatten(1)
        preserved = self._preserved.expand(b, -1)
        ranks = torch.arange(pos.M, pos.M + preserved.shape[1], device=src.device).expand(b, -1)
        src = src.scatter(1, pos.src_real[preserved], ranks)
        first = torch.arange(self.special, device=src.device).expand(b, -1)
        body = torch.cat([torch.arange(pos.M, device=src.device).expand(b, -1), src], 1)[
            :, pos.gather
        ]
        return torch.cat([first, body + self.special], 1)

    def merge(self, t: Tensor) -> Tensor:
        """X' = concat(X_spec, X''_dst, X_pres) of t [*, L, C], as [*, L', C] in its dtype
        (Algorithm 1).

        Raises ValueError when `t` has not the leading dimensions and tokens that were planned for.
        """
        raise NotImplementedError

    def restore(self, y: Tensor, detail: Detail | None = None) -> Tensor:
        """X^rec: all tokens from y [*, L', C], at their original positions, as [*, L, C] (Algorithm
        2).

        Args:
            y: merged tokens.
            detail: by what tokens of one group are to differ (`mame_sd.core.detail`), where each
                token went to one group whole (weights "best"); other plans do not read it. None:
                they are equal copies.

        Raises:
            ValueError: `y` has not the leading dimensions and tokens that `merge` gives, or
                `detail` is of other tokens.
        """
        raise NotImplementedError

    def _slot_counts(self) -> Tensor:
        """`counts` of every destination slot, padding too, [*, T * m]."""
        return 1 + self.weights.sum(-1).flatten(-2)

    def _heaviest(self) -> Tensor:
        """The destination of its tile that each source slot mainly goes to, LongTensor [B, T,
        n].
        """
        heaviest = self.weights.argmax(-2)
        return heaviest.view(math.prod(self._lead), *heaviest.shape[-2:])

    def _body_kept(self) -> Tensor:
        """`kept` without special tokens, which are not counted either: [M + r] or [B, M + r]."""
        pos, stay = self.positions, self._preserved
        dst = pos.dst.expand(*stay.shape[:-1], -1)
        if (
            not torch.compiler.is_compiling() and not stay.shape[-1]
        ):  # with tau a graph does not know how many
            return dst
        return torch.cat([dst, pos.src[stay]], -1)

    def _checked(self, t: Tensor, tokens: int, call: str) -> Tensor:
        """`t` as [B, tokens, C]."""
        if t.dim() < 2 or t.shape[:-2] != self._lead or t.shape[-2] != tokens:
            raise ValueError(
                f"{call}: expected a tensor of shape {[*self._lead, tokens, 'C']} as planned, got"
                f" {list(t.shape)}; plan again for another shape"
            )
        return t.reshape(math.prod(self._lead), tokens, t.shape[-1])


class RowPlan(Plan):
    """A plan that knows one group for each token; `weights` are made when somebody looks at them.

    Args:
        rows: [B, special + L], which of the tokens that `merge` gives each one goes to, or is.
        pos, preserved, special, lead: as `Plan`.
        dtype: of the weights and counts.
    """

    def __init__(
        self,
        rows: Tensor,
        pos: Positions,
        preserved: Tensor,
        special: int,
        lead: torch.Size,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(pos, preserved, special, lead)
        self._rows, self._dtype = rows, dtype
        self._groups: means.Groups | None = None  # made where they are needed first, as sizes are
        self._sizes: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        """See `Plan`; 0 and 1."""
        pos = self.positions
        group = self._rows[:, self.special + pos.src_slots] - self.special  # [B, T, n]
        row = group - pos.gather[pos.slots[:, :1]]
        row = row.masked_fill(
            group >= pos.M if pos.src_pad is None else (group >= pos.M) | pos.src_pad, -1
        )
        weights = (row.unsqueeze(-2) == torch.arange(pos.m, device=row.device).unsqueeze(-1)).to(
            self._dtype
        )
        return weights.view(*self._lead, *weights.shape[1:])

    @property
    def rows(self) -> Tensor:
        """See `Plan`."""
        return self._rows

    @property
    def sizes(self) -> Tensor:
        """See `Plan`; [B, L']."""
        sizes = self._sizes
        apart = not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()
        if sizes is None or (
            apart and sizes.is_inference()
        ):  # autograd refuses tensors of inference mode
            sizes = self._sizes = self._sums(torch.ones_like(self._rows, dtype=self._dtype))
        return sizes

    def summed(self, t: Tensor) -> Tensor:
        """See `Plan`."""
        return self._sums(
            self._checked(t.unsqueeze(-1), self.tokens_in, "summed").squeeze(-1)
        ).view(*self._lead, -1)

    @property
    def counts(self) -> Tensor:
        """See `Plan`."""
        return self.sizes[:, self.special : self.special + self.positions.M].view(*self._lead, -1)

    def merge(self, t: Tensor) -> Tensor:
        """See `Plan`."""
        t = self._checked(t, self.tokens_in, "merge")
        with no_autocast(t):
            y = self.means(t)
        return y.reshape(*self._lead, *y.shape[1:])

    def restore(self, y: Tensor, detail: Detail | None = None) -> Tensor:
        """See `Plan`; without a product: each token takes the row of `y` that it went to, or is.

        With detail it varies around it.
        """
        y = self._checked(y, self.tokens_kept, "restore")
        if detail is not None:
            self._check_detail(detail)
        unmerged = (
            not torch.compiler.is_compiling() and self.tokens_kept == self.tokens_in
        )  # a graph may not know it
        if detail is None or unmerged:
            x = rows_of(y, self._rows)
        else:
            with no_autocast(y):
                x = self._detailed(y, detail)
        return x.view(*self._lead, *x.shape[1:])

    def means(self, t: Tensor) -> Tensor:
        """Tokens [B, L, C] merged, as [B, L', C]."""
        found = self.fused_means(t.unsqueeze(1)) if fused.on(t) else None
        if found is not None:
            return found[0].squeeze(1)
        if means.can_group(t):
            if self._groups is None:
                self._groups = means.groups_of(self._rows, self.tokens_kept)
            return means.means(t.flatten(0, 1), self._groups).view(
                t.shape[0], self.tokens_kept, t.shape[2]
            )
        return means.means_with_gradients(t, self._rows, self.sizes)

    def with_sample(self, t: Tensor) -> Tensor:
        """Tokens [B, L, C] merged, and after them the tokens of the partition's sample, as they
        are: [B, L' + samples, C].
        """
        found = self.fused_means(t.unsqueeze(1), sampled=True) if fused.on(t) else None
        if found is not None:
            return found[0].squeeze(1)
        return torch.cat(
            [self.merge(t), t.index_select(1, self.positions.sample + self.special)], 1
        )

    def fused_means(
        self,
        t: Tensor,
        size: tuple[int, ...] = (),
        around: tuple[int, int] | None = None,
        sampled: bool = False,
        weighed: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """See `mame_sd.core.triton_groups.group_means`, of tokens [B, H, .., D]; None where PyTorch
        has to do it.
        """
        pos = self.positions
        if pos.m > fused.LARGEST_TILE:
            return None
        from mame_sd.core.triton_common import table_of
        from mame_sd.core.triton_groups import group_means

        plane = size if len(size) == 3 else (1, 1, pos.L)
        beside = (self.special, 0) if around is None else around
        groups, drawn = self.tokens_kept - self.special, pos.samples if sampled else 0
        found: tuple[Tensor, Tensor, Tensor] | None = fused.launched(
            group_means,
            t,
            self._rows,
            *table_of(pos),
            plane,
            self.special,
            beside,
            groups,
            drawn,
            weighed,
        )
        if found is not None and around is None:
            self._sizes = found[1]
        return found

    def _check_detail(self, detail: Detail) -> None:
        (h, w), shape = detail.plane, detail.feature.shape
        if h * w != self.positions.L or shape[:-1] != (self._rows.shape[0], self.positions.L):
            raise ValueError(
                f"detail: expected the feature [{self._rows.shape[0]}, {self.positions.L}, d] that"
                f" was planned by and its (h, w), got {list(shape)} and {(h, w)}; give"
                " Detail(feature, (h, w)) without special tokens, or no detail"
            )

    def _detailed(self, y: Tensor, detail: Detail) -> Tensor:
        """Merged tokens y [B, L', C] as [B, L, C], varying within their groups.

        Groups keep their means, so that merging again gives `y` up to rounding.
        """
        feature, plane = detail
        count = min(RANK, (self.special + self.positions.M) // GROUPS)
        if count and not self.special and fused.on(y, feature):
            found = self._fused_detailed(y, detail, count)
            if found is not None:
                return found
        x, unexplained = self._by_surroundings(y, plane)
        if not count:
            return x
        feature = (
            feature.float() if feature.dtype == torch.float16 else feature
        )  # whose range a sum may leave
        seen = feature @ constant(directions, feature.shape[2], count, feature.device).to(
            feature.dtype
        )
        seen = F.pad(seen, (0, 0, self.special, 0)) if self.special else seen
        seen = seen.to(torch.promote_types(self._dtype, y.dtype))
        surroundings, between = self._by_surroundings(self.means(seen), plane)
        within = seen - surroundings
        follows = slope(between, unexplained, self.sizes)
        if y.dtype == torch.float16:
            return x + (within @ follows).to(y.dtype)
        added = within.to(y.dtype), follows.to(y.dtype)
        return x.baddbmm_(*added) if all(map(in_place, (x, *added))) else torch.baddbmm(x, *added)

    def _fused_detailed(self, y: Tensor, detail: Detail, count: int) -> Tensor | None:
        """`_detailed` by kernels; None where PyTorch has to do it."""
        if self.positions.m > fused.LARGEST_TILE:
            return None
        from mame_sd.core import triton_detail as kernels
        from mame_sd.core.triton_common import table_of

        feature, plane = detail
        seen = fused.launched(
            kernels.seen, feature, constant(directions, feature.shape[2], count, feature.device)
        )
        merged = None if seen is None else self.fused_means(seen.unsqueeze(1))
        if merged is None:
            return None
        of_inputs, sizes = merged[0].squeeze(1), merged[1]
        found = fused.launched(
            kernels.unexplained,
            y,
            of_inputs,
            self._rows,
            sizes,
            *table_of(self.positions),
            list(plane),
        )
        follow = (
            None
            if found is None
            else fused.launched(kernels.follows, *found, sizes, self.positions.L)
        )
        if found is None or follow is None:
            return None
        x: Tensor | None = fused.launched(
            kernels.restored,
            y,
            found[0],
            of_inputs,
            found[1],
            seen,
            *follow,
            self._rows,
            list(plane),
        )
        return x

    def _by_surroundings(self, y: Tensor, plane: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Merged tokens y [B, L', C] as [B, L, C], varying as the blur of their copies does, and
        what of `y` is not that blur's mean.
        """
        copies = rows_of(y, self._rows)
        blur = blurred(copies[:, self.special :], plane)
        blur = torch.cat([copies[:, : self.special], blur], 1) if self.special else blur
        unexplained = y - self.means(blur)
        if not in_place(y):
            return blur + rows_of(unexplained, self._rows), unexplained
        rows_of(
            unexplained, self._rows, out=copies
        )  # the blur's mean in each group gives way to the group's own
        return blur.add_(copies), unexplained

    def _sums(self, t: Tensor) -> Tensor:
        """`summed` of t [B, L], [B, L']."""
        return t.new_zeros(t.shape[0], self.tokens_kept).scatter_add_(1, self._rows, t)


def row_plan(
    best: Tensor, row: Tensor, pos: Positions, config: MaMeConfig, special: int, lead: torch.Size
) -> RowPlan:
    """The plan of sources whose largest similarity is `best` [B, T, n], that of destination `row`
    [B, T, n] of their tile.
    """
    if config.keep is None:
        assert config.tau is not None
        preserved = preserved_by_tau(~(best > config.tau).all(0), pos)
    else:
        preserved = preserved_by_keep(best, pos, config.keep)
    return RowPlan(_rows(row, pos, preserved, special), pos, preserved, special, lead, best.dtype)


def _rows(row: Tensor, pos: Positions, preserved: Tensor, special: int) -> Tensor:
    """Which of the merged tokens each one goes to, or is, [B, special + L]."""
    b = row.shape[0]
    # Destinations of a tile are neighbours among the groups, so that a source's is so many behind
    # the first.
    src = (row + pos.gather[pos.slots[:, :1]]).flatten(1)
    if (
        torch.compiler.is_compiling() or preserved.shape[-1]
    ):  # with tau a graph does not know how many
        preserved = preserved.expand(b, -1)
        ranks = torch.arange(pos.M, pos.M + preserved.shape[1], device=src.device).expand(b, -1)
        src = src.scatter(1, pos.src_real[preserved], ranks)
    every = torch.cat([constant(counting, pos.M, src.device).expand(b, -1), src], 1)
    body = every.index_select(1, pos.gather)
    if not special:
        return body
    return torch.cat([constant(counting, special, src.device).expand(b, -1), body + special], 1)


def fused_plan(
    x: Tensor,
    pos: Positions,
    config: MaMeConfig,
    special: int,
    lead: torch.Size,
    leader: Tensor | None,
) -> RowPlan | None:
    """The plan of feature x [B, L, d] without special tokens by kernels; None where PyTorch's
    operations have to make it.
    """
    if (
        config.keep is None
        or config.metric != "cosine"
        or pos.m > fused.LARGEST_TILE
        or not fused.on(x)
    ):
        return None
    from mame_sd.core import triton_groups as kernels
    from mame_sd.core.triton_common import table_of

    merged, table = merged_by_keep(pos, config.keep), table_of(pos)
    ranked = merged < pos.N
    if not merged or (ranked and pos.N > kernels.LARGEST_RANKING):
        return None
    found = fused.launched(kernels.nearest, x, *table, leader, special, ranked)
    if found is None:
        return None
    if not ranked:
        preserved = x.new_empty((x.shape[0], 0), dtype=torch.long)
        return RowPlan(found[1], pos, preserved, special, lead, torch.float32)
    merges = fused.launched(kernels.merging, found[0], *table, merged)
    rows = (
        None
        if merges is None
        else fused.launched(kernels.ranked_rows, merges, found[1], *table, special, pos.N - merged)
    )
    return None if rows is None else RowPlan(rows[0], pos, rows[1], special, lead, torch.float32)
