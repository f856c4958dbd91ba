"""A plan of merging: `merge` (MaMe) and `restore` (MaRe) of any tensor, by the fusion weights W^F
that it holds.

NaN and infinity are never hidden: where a token holds one, it comes back (through the products it
may spread to other tokens of the same sample, never to another sample).
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from mame_sd.core.buffers import reuse
from mame_sd.core.constants import constant, counting
from mame_sd.core.detail import Detail
from mame_sd.core.indexing import blocks_of, flat_rows, rows_of
from mame_sd.core.tables import Positions
from mame_sd.core.weights import Fusion


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


class MergePlan(Plan):
    """A plan that merges and restores by two matrix products with W^F.

    Args:
        fusion: W^F [B, T, m, n], all 0 at preserved sources and at padding; the preserved sources.
        pos, special, lead: as `Plan`.
        paper: restore as printed, by y_dst,i / R_i.
    """

    def __init__(
        self, fusion: Fusion, pos: Positions, special: int, lead: torch.Size, paper: bool = False
    ) -> None:
        super().__init__(pos, fusion.preserved, special, lead)
        self._weights = _Casts(fusion.weights.flatten(0, 1))  # [B * T, m, n]
        self._R = 1 + fusion.weights.sum(-1).flatten(0, 1).unsqueeze(-1)  # [B * T, m, 1]
        self._paper = paper

    @property
    def weights(self) -> Tensor:
        """See `Plan`."""
        weights = self._weights.original
        return weights.view(*self._lead, self.positions.blocks, *weights.shape[1:])

    def merge(self, t: Tensor) -> Tensor:
        """See `Plan`."""
        t = self._checked(t, self.tokens_in, "merge")
        body = t[:, self.special :]
        with no_autocast(t):
            parts = [self._aggregated(body)]
            if (
                torch.compiler.is_compiling() or self._preserved.shape[-1]
            ):  # with tau a graph does not know how many
                parts.append(rows_of(body, self.positions.src[self._preserved]))
            if self.special:
                parts.insert(0, t[:, : self.special])
            y = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        return y.reshape(*self._lead, *y.shape[1:])

    def restore(self, y: Tensor, detail: Detail | None = None) -> Tensor:
        """See `Plan`."""
        y = self._checked(y, self.tokens_kept, "restore")
        with no_autocast(y):
            x = self._reconstructed(y[:, self.special :])
            if self.special:
                x = torch.cat([y[:, : self.special], x], 1)
        return x.reshape(*self._lead, *x.shape[1:])

    def _slot_counts(self) -> Tensor:
        return self._R.view(*self._lead, self.positions.blocks * self.positions.m)

    def _aggregated(self, body: Tensor) -> Tensor:
        """x''_dst,i = (x_dst,i + sum_j W^F_ij x_src,j) / R_i (paper, "Token Aggregation and
        Preservation").

        A mean is within the range of its tile's tokens; rounding that takes it out is undone, so
        that constant tiles are unchanged. The gradients are those of the products alone.
        """
        pos = self.positions
        blocks = blocks_of(body, pos.slots)  # [B * T, m + n, C]
        dst, src = blocks[:, : pos.m], blocks[:, pos.m :]
        if (
            body.dtype == torch.float16
        ):  # a sum of many tokens leaves fp16's range, their mean does not
            share = (self._weights.original / self._R).half()
            fused = torch.baddbmm((dst / self._R).half(), share, src)
        else:
            fused = torch.baddbmm(dst, self._weights.to(body.dtype), src)
            fused = torch.div(fused, self._R.to(body.dtype), out=reuse(fused))
        with torch.no_grad():
            fused.clamp_(blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True))
        return self._destinations(fused)

    def _reconstructed(self, body: Tensor) -> Tensor:
        """x_src,j = sum_i W^F_ij y_dst,i and x_dst,i = y_dst,i (paper, "Restoration Process"; there
        y_dst,i / R_i).
        """
        pos, (b, _, c) = self.positions, body.shape
        dst = body[:, : pos.M]
        if self._paper:
            dst = dst / self._destinations(self._R).to(body.dtype)
            body = torch.cat([dst, body[:, pos.M :]], 1)
        src = dst
        if pos.n:
            if pos.dst_real is not None:  # padding: any destination of the tile, its weights are 0
                dst = dst.index_select(1, pos.gather[pos.dst_slots.flatten()])
            blocks = dst.reshape(b * pos.blocks, pos.m, c)
            src = torch.bmm(self._weights.to(body.dtype).transpose(1, 2), blocks).view(
                b, pos.blocks * pos.n, c
            )
        x = rows_of(src, pos.source.expand(b, -1)).view(b * pos.L, c)
        del src
        kept = flat_rows(self._body_kept().expand(b, -1), pos.L)
        return x.index_copy_(0, kept, body.reshape(-1, c)).view(b, pos.L, c)

    def _destinations(self, slots: Tensor) -> Tensor:
        """[B * T, m, ...] to [B, M, ...]: without padding."""
        pos = self.positions
        slots = slots.view(-1, pos.blocks * pos.m, *slots.shape[2:])
        return slots if pos.dst_real is None else slots.index_select(1, pos.dst_real)


class _Casts:
    """A tensor, and its casts to other dtypes, each made once."""

    def __init__(self, original: Tensor) -> None:
        self.original = original
        self._made = {original.dtype: original}

    def to(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._made:
            self._made[dtype] = self.original.to(dtype)
        return self._made[dtype]


def no_autocast(t: Tensor) -> contextlib.AbstractContextManager[None]:
    """Autocast off on the device of `t`, where it is on."""
    kind = t.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()
