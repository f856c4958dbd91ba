"""A plan of merging: `merge` (MaMe) and `restore` (MaRe) of any tensor.

Where each source goes whole to its most similar destination (`weights="best"`) a plan knows who
went where, and needs no matrix (`RowPlan`). Merging takes means of groups, restoring takes rows.
What is not finite stays within its group (with detail, its sample).
"""

from __future__ import annotations

import contextlib
import math
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.core import fused
from mame_sd.core.detail import GROUPS, RANK, Detail, blurred, directions, slope
from mame_sd.core.partition import Positions, constant, counting

GROUPING = ("cpu", "cuda", "mps")  # devices that have `group_means`


class Plan:
    """Which tokens merge, with which weights: a value, made by `mame_sd.plan_merge`, that holds no
    tokens.

    Below, `*` are the leading dimensions of the planned tensor. T is the number of tiles (1 without
    tiles). One tile has m destinations and n sources (padded to the largest tile). All tiles
    together have M and N. There are r preserved sources.

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
        uneven: whether some of the tokens that `merge` gives may stand for themselves where others
            stand for groups.
    """

    def __init__(self, pos: Positions, preserved: Tensor, special: int, lead: torch.Size) -> None:
        self.positions = pos
        self.special = special
        self.tokens_in = special + pos.L
        self.tokens_kept = special + pos.M + preserved.shape[-1]
        # Some of the tokens that `merge` gives may stand for themselves where others stand for
        # groups. With tau this is always so: a graph does not know how many are preserved.
        self.uneven = preserved.dim() == 1 or preserved.shape[-1] > 0
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
        order. It is shared out by the weights, summed up.

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

    @cached_property
    def rows(self) -> Tensor:
        """Which of the tokens that `merge` gives each token mainly went to, [B, L]: its index among
        them.
        """
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
                token went to one group whole (weights "best"). Other plans do not read it. None:
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
    """A plan that knows one group for each token; `weights` are made when they are read.

    Args:
        rows: [B, special + L], which of the tokens that `merge` gives each one goes to, or is.
        pos, preserved, special, lead: as `Plan`.
        dtype: of the weights and counts.
    """

    def __init__(
        self,
        rows: Tensor | None,
        pos: Positions,
        preserved: Tensor,
        special: int,
        lead: torch.Size,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(pos, preserved, special, lead)
        self._dtype = dtype
        if rows is not None:
            self.rows = rows
        self._groups: Groups | None = None  # made where they are needed first, as sizes are
        self._sizes: Tensor | None = None
        self.by_kernels = rows is not None and rows.device.type in fused.DEVICES

    @property
    def weights(self) -> Tensor:
        """See `Plan`; 0 and 1."""
        pos = self.positions
        group = self.rows[:, self.special + pos.src_slots] - self.special  # [B, T, n]
        row = group - pos.gather[pos.slots[:, :1]]
        row = row.masked_fill(
            group >= pos.M if pos.src_pad is None else (group >= pos.M) | pos.src_pad, -1
        )
        weights = (row.unsqueeze(-2) == torch.arange(pos.m, device=row.device).unsqueeze(-1)).to(
            self._dtype
        )
        return weights.view(*self._lead, *weights.shape[1:])

    @property
    def sample_rows(self) -> Tensor:
        """`rows` of the partition's sample, [B, samples]."""
        return self.rows.index_select(1, self.positions.sample + self.special)

    @property
    def sizes(self) -> Tensor:
        """See `Plan`; [B, L']."""
        sizes = self._sizes
        apart = not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()
        if sizes is None or (
            apart and sizes.is_inference()
        ):  # autograd refuses tensors of inference mode
            sizes = self._sizes = self._sums(torch.ones_like(self.rows, dtype=self._dtype))
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
        y = self.means(self._checked(t, self.tokens_in, "merge"))
        return y.reshape(*self._lead, *y.shape[1:])

    def restore(self, y: Tensor, detail: Detail | None = None) -> Tensor:
        """See `Plan`; without a product: each token takes the row of `y` that it went to, or is.

        With detail it varies around it.
        """
        y = self._checked(y, self.tokens_kept, "restore")
        pos = self.positions
        if detail is not None and (
            math.prod(detail.plane) != pos.L
            or detail.feature.shape[:-1] != (self.rows.shape[0], pos.L)
            or (detail.means is not None and detail.means.shape[:-1] != y.shape[:-1])
        ):
            raise ValueError(
                f"detail: expected the feature [{self.rows.shape[0]}, {pos.L}, d] that was planned"
                f" by and its (h, w), got {list(detail.feature.shape)} and {detail.plane}; give"
                " Detail(feature, (h, w)) without special tokens, or no detail"
            )
        # A graph may not know whether all tokens are kept.
        merges = torch.compiler.is_compiling() or self.tokens_kept < self.tokens_in
        if detail is None or not merges:
            x = rows_of(y, self.rows)
        else:
            with no_autocast(y):
                x = self._restored_with_detail(y, detail)
        return x.view(*self._lead, *x.shape[1:])

    def means(self, t: Tensor) -> Tensor:
        """Tokens [B, L, C] merged, as [B, L', C]."""
        found = fused.means(self, t.unsqueeze(1)) if self.by_kernels and fused.on(t) else None
        if found is not None:
            return found[0].squeeze(1)
        if (t.requires_grad and torch.is_grad_enabled()) or t.device.type not in GROUPING:
            return group_means_with_gradients(t, self.rows, self.sizes)
        if self._groups is None:
            self._groups = groups_of(self.rows, self.tokens_kept)
        y = group_means(t.flatten(0, 1), self._groups)
        return y.view(t.shape[0], self.tokens_kept, t.shape[2])

    def with_sample(self, t: Tensor) -> Tensor:
        """Tokens [B, L, C] merged, and after them the tokens of the partition's sample, as they
        are: [B, L' + samples, C].
        """
        if self.by_kernels and fused.on(t):
            found = fused.means(self, t.unsqueeze(1), sampled=True)
            if found is not None:
                return found[0].squeeze(1)
        sample = t.index_select(1, self.positions.sample + self.special)
        return torch.cat([self.means(t), sample], 1)

    def _restored_with_detail(self, y: Tensor, detail: Detail) -> Tensor:
        """Merged tokens y [B, L', C] as [B, L, C], varying within their groups.

        Groups keep their means, so that merging again gives `y` up to rounding.
        """
        feature, plane, means = detail
        count = min(RANK, (self.special + self.positions.M) // GROUPS)
        if count and not self.special and self.by_kernels and fused.on(y, feature):
            found = fused.restored_with_detail(self, y, detail, count)
            if found is not None:
                return found
        exact = torch.promote_types(self._dtype, y.dtype)
        parts = [y.to(exact)]
        if count:
            # fp16's range a sum may leave
            feature = feature.float() if feature.dtype == torch.float16 else feature
            cast = constant(directions, feature.shape[2], count, feature.device).to(feature.dtype)
            seen = (feature @ cast).to(exact)
            if self.special:
                seen, means = F.pad(seen, (0, 0, self.special, 0)), None
            parts.append(
                self.means(seen) if means is None else (means.to(cast.dtype) @ cast).to(exact)
            )
        learns = torch.is_grad_enabled() and (y.requires_grad or feature.requires_grad)
        first = torch.arange(len(self.rows), device=y.device).unsqueeze(1) * self.tokens_kept
        rows, unexplained = (self.rows + first).flatten(), []
        copies = [t.flatten(0, 1).index_select(0, rows).view(*self.rows.shape, -1) for t in parts]
        varied = [blurred(t[:, self.special :], plane) for t in copies]
        if self.special:
            several = zip(copies, varied, strict=True)
            varied = [torch.cat([t[:, : self.special], x], 1) for t, x in several]
        for t, x, copy in zip(parts, varied, copies, strict=True):
            # The blur's mean in each group gives way to the group's own.
            unexplained.append(t - self.means(x))
            into = None if learns else copy.flatten(0, 1)
            own = torch.index_select(unexplained[-1].flatten(0, 1), 0, rows, out=into)
            x += own.view(x.shape)
        if not count:
            return varied[0].to(y.dtype)
        follows = slope(unexplained[1], unexplained[0], self.sizes)
        return torch.baddbmm(varied[0], seen - varied[1], follows).to(y.dtype)

    def _sums(self, t: Tensor) -> Tensor:
        """`summed` of t [B, L], [B, L']."""
        return t.new_zeros(t.shape[0], self.tokens_kept).scatter_add_(1, self.rows, t)


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


def groups_of_heads(groups: Groups, samples: int, heads: int) -> Groups:
    """The groups of tokens [B * H * L, D], alike in all heads of a sample, from those of [B * L,
    C].
    """

    length, device = groups.order.shape[0] // samples, groups.order.device
    sample = torch.arange(samples, device=device).view(-1, 1, 1)
    head = torch.arange(heads, device=device).view(1, -1, 1)
    further = (sample * (heads - 1) + head) * length
    return Groups(*((t.view(samples, 1, -1) + further).flatten() for t in groups))


def group_means(t: Tensor, groups: Groups) -> Tensor:
    """The mean of each group of t [n, C], as [groups, C], up to rounding; a group of one as it is.

    Without gradients, on a device of GROUPING.
    """
    wide = (
        t.float() if t.device.type == "cpu" and t.dtype == torch.float16 else t
    )  # there a sum is rounded to its range
    return F.embedding_bag(groups.order, wide, groups.starts, mode="mean").to(t.dtype)


def group_means_with_gradients(t: Tensor, rows: Tensor, sizes: Tensor) -> Tensor:
    """The same of t [B, L, C] as [B, count, C], with gradients and on any device.

    Args:
        rows: the group of each token [B, L], of `count` of each sample.
        sizes: how many tokens each group has [B, count].
    """
    exact = torch.promote_types(t.dtype, torch.float32)
    index = rows.unsqueeze(-1).expand(t.shape)
    sums = t.new_zeros(*sizes.shape, t.shape[2], dtype=exact).scatter_add(1, index, t.to(exact))
    return (sums / sizes.to(exact).unsqueeze(-1)).to(t.dtype)


def rows_of(t: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows of t [B, L, C] at `index`, as [B, k, C], which go into a contiguous `out` where given.

    `index` is [k] for all samples, or [B, k] with other rows for each.
    """
    if index.dim() == 1:
        return torch.index_select(t, 1, index, out=out)
    b, length, c = t.shape
    into = None if out is None else out.view(-1, c)
    first = torch.arange(0, b * length, length, device=index.device).unsqueeze(1)
    rows = torch.index_select(t.reshape(b * length, c), 0, (index + first).flatten(), out=into)
    return rows.view(b, index.shape[1], c)


def no_autocast(t: Tensor) -> contextlib.AbstractContextManager[None]:
    """Autocast off on the device of `t`, where it is on."""
    kind = t.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()
