"""MaMe and MaRe as two matrix products: a plan is computed once from a feature, then merges and restores any tensor.

>>> import torch
>>> from mame_sd import MaMeConfig, plan_merge
>>> x = torch.ones(2, 64, 8)                                    # [B, L, d], a constant 8 x 8 image
>>> plan = plan_merge(x, MaMeConfig(keep=0.5, merge="qkv"), size=(8, 8))
>>> plan.tokens_in, plan.tokens_kept
(64, 32)
>>> y = plan.merge(x)                                           # [B, L', d]
>>> y.shape
torch.Size([2, 32, 8])
>>> torch.equal(plan.restore(y), x)                             # every token at its own position again
True

NaN and infinity are never hidden: where a token holds one, it comes back (through the products it may spread to other
tokens of the same sample, never to another sample). With tau a source that has a NaN similarity is above no threshold and
stays; with keep it is the last to be chosen.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.indexing import blocks_of, flat_rows, in_place, rows_of
from mame_sd.core.partition import Positions, positions
from mame_sd.core.similarity import similarity_of
from mame_sd.core.weights import weights_by_keep, weights_by_tau


class MergePlan:
    """Which tokens merge, with which weights. Made by `plan_merge`; holds no copy of the tokens.

    Below, `*` are the leading dimensions of the planned tensor, T is the number of tiles (1 without tiles), m and n
    destinations and sources of one tile (padded to the largest tile), M and N those of all tiles.

    Attributes:
        positions: where destinations and sources are (`mame_sd.core.partition.Positions`).
        special: leading tokens that take no part.
        weights: W_F [*, T, m, n] fp32 (fp64 when planned from fp64). A column sums to 1 where its source merges, else it is all 0.
        counts: R_i = 1 + sum_j W_F_ij [*, M] fp32, in the order of `positions.dst`.
        preserved: bool [*, N], True where a source stays as it is, in the order of `positions.src`.
        tokens_in: L, special tokens included.
        tokens_kept: L', special tokens included.
        note: why the kernel that the settings name did not run; "" where it did, or none is named.
    """

    def __init__(
        self,
        weights: Tensor,
        stay: Tensor,
        kept_rows: Tensor,
        pos: Positions,
        special: int,
        lead: torch.Size,
        paper: bool,
    ) -> None:
        # weights [B, T, m, n], stay bool [B, N] by position, kept_rows [r] or [B, r]: indices into `pos.src`.
        self._weights = weights
        self._R = 1 + weights.sum(-1)  # [B, T, m]
        self._place(stay, kept_rows, pos, special, lead, paper)

    def _place(
        self, stay: Tensor, kept_rows: Tensor, pos: Positions, special: int, lead: torch.Size, paper: bool = False
    ) -> None:
        self._stay = stay
        self._kept = kept_rows
        self._lead = lead
        self._paper = paper
        self._cast: dict[torch.dtype, Tensor] = {}
        self.note = ""
        self.positions = pos
        self.special = special
        self.tokens_in = special + pos.L
        self.tokens_kept = special + pos.M + kept_rows.shape[-1]

    @property
    def weights(self) -> Tensor:
        return self._weights.reshape(*self._lead, *self._weights.shape[1:])

    @property
    def counts(self) -> Tensor:
        return self._real_dst(self._R.flatten(1)).reshape(*self._lead, self.positions.M)

    @property
    def preserved(self) -> Tensor:
        return self._stay.reshape(*self._lead, self.positions.N)

    @property
    def kept(self) -> Tensor:
        """Positions of the tokens that `merge` gives, in its order: [L'], or [B, L'] where samples keep their own."""
        first = torch.arange(self.special, device=self.positions.dst.device)
        parts = first, self.positions.dst + self.special
        kept = self._kept_positions() + self.special
        return torch.cat([*(part.expand(*kept.shape[:-1], -1) for part in parts), kept], -1)

    def merge(self, t: Tensor) -> Tensor:
        """Special tokens, fused destinations and preserved sources of t [*, L, C] as [*, L', C] (Algorithm 1).

        x''_dst,i = (x_dst,i + sum_j W_F_ij x_src,j) / R_i, in the dtype of `t`.

        Raises ValueError when `t` has not the leading dimensions and tokens that were planned for.
        """
        t = self._checked(t, self.tokens_in, "merge")
        pos = self.positions
        with _no_autocast(t):
            body = t[:, self.special :]
            blocks = blocks_of(body, pos.slots)
            fused = self._fuse(blocks).reshape(t.shape[0], pos.blocks * pos.m, t.shape[2])
            del blocks
            parts = [self._real_dst(fused), rows_of(body, self._kept_positions())]
            if self.special:
                parts.insert(0, t[:, : self.special])
            y = torch.cat(parts, 1)
        return y.reshape(*self._lead, *y.shape[1:])

    def restore(self, y: Tensor) -> Tensor:
        """All tokens from y [*, L', C], at their original positions, as [*, L, C] (Algorithm 2).

        x_src,j = sum_i W_F_ij y_dst,i and x_dst,i = y_dst,i; with variant "paper" y_dst,i / R_i in place of y_dst,i.

        Raises ValueError when `y` has not the leading dimensions and tokens that `merge` gives.
        """
        y = self._checked(y, self.tokens_kept, "restore")
        pos, (b, _, c) = self.positions, y.shape
        with _no_autocast(y):
            body = y[:, self.special :]
            dst = body[:, : pos.M]
            if self._paper:
                dst = dst / self._real_dst(self._R.flatten(1)).unsqueeze(-1).to(y.dtype)
                body = torch.cat([dst, body[:, pos.M :]], 1)
            blocks = self._padded_dst(dst).reshape(b * pos.blocks, pos.m, c)
            weights = self._weights_as(y.dtype).flatten(0, 1)
            src = torch.bmm(weights.transpose(1, 2), blocks).reshape(b, pos.blocks * pos.n, c) if pos.n else dst
            rest = rows_of(src, pos.source.expand(b, -1)).view(b * pos.L, c)
            del src
            rest = rest.index_copy_(0, self._kept_rows(), body.reshape(-1, c)).view(b, pos.L, c)
            x = torch.cat([y[:, : self.special], rest], 1) if self.special else rest
        return x.reshape(*self._lead, *x.shape[1:])

    def owners(self) -> Tensor:
        """LongTensor [*, L]: the position each token mainly went to, itself where it is kept."""
        pos = self.positions
        b, device = self._weights.shape[0], self._weights.device
        owner = torch.arange(pos.L, device=device).repeat(b, 1)
        if pos.N:
            best = self._weights.argmax(-2)  # [B, T, n] row of the heaviest destination
            first = torch.arange(pos.blocks, device=device).unsqueeze(-1) * pos.m
            target = pos.dst_slots.flatten()[(best + first).flatten(1)][:, pos.src_real]  # [B, N]
            owner[:, pos.src] = torch.where(self._stay, pos.src, target)
        owner = torch.cat([torch.arange(self.special, device=device).repeat(b, 1), owner + self.special], 1)
        return owner.reshape(*self._lead, self.tokens_in)

    def _fuse(self, blocks: Tensor) -> Tensor:
        """x'' [B * T, m, C] of blocks [B * T, m + n, C], destinations first.

        A mean lies between what it is a mean of, and rounding may not take it out: so constant blocks stay as they are.
        The bounds take no part in gradients, which are those of the products whatever the rounding.
        """
        dst, src = blocks[:, : self.positions.m], blocks[:, self.positions.m :]
        count = self._R.flatten(0, 1).unsqueeze(-1)  # [B * T, m, 1]
        if dst.dtype == torch.float16:  # a sum of many tokens leaves fp16's range, their mean does not
            share = (self._weights.flatten(0, 1) / count).to(dst.dtype)
            fused = torch.baddbmm((dst / count).to(dst.dtype), share, src)
        else:
            fused = torch.baddbmm(dst, self._weights_as(dst.dtype).flatten(0, 1), src)
            fused = fused.div_(count.to(dst.dtype)) if in_place(fused) else fused / count.to(dst.dtype)
        with torch.no_grad():
            fused.clamp_(blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True))
        return fused

    def _weights_as(self, dtype: torch.dtype) -> Tensor:
        if dtype == self._weights.dtype:
            return self._weights
        if dtype not in self._cast:
            self._cast[dtype] = self._weights.to(dtype)
        return self._cast[dtype]

    def _kept_positions(self) -> Tensor:
        return self.positions.src[self._kept]

    def _kept_rows(self) -> Tensor:
        """[B * (M + r)]: row of every kept token, destinations first, in a [B * L, C] tensor."""
        pos, b = self.positions, self._stay.shape[0]
        kept = self._kept_positions().expand(b, -1)
        return flat_rows(torch.cat([pos.dst.expand(b, -1), kept], 1), pos.L)

    def _real_dst(self, slots: Tensor) -> Tensor:
        """[B, T * m, ...] to [B, M, ...]"""
        real = self.positions.dst_real
        return slots if real is None else slots.index_select(1, real)

    def _padded_dst(self, dst: Tensor) -> Tensor:
        """[B, M, C] to [B, T * m, C]; padding holds a destination of its tile, whose weights are 0."""
        pos = self.positions
        return dst if pos.dst_real is None else dst.index_select(1, pos.gather[pos.dst_slots.flatten()])

    def _checked(self, t: Tensor, tokens: int, call: str) -> Tensor:
        if t.dim() < 2 or t.shape[:-2] != self._lead or t.shape[-2] != tokens:
            raise ValueError(
                f"{call}: expected a tensor of shape {[*self._lead, tokens, 'C']} as planned, got {list(t.shape)}; "
                "plan again for another shape"
            )
        return t.reshape(math.prod(self._lead), tokens, t.shape[-1])


def plan_merge(
    x: Tensor,
    config: MaMeConfig,
    size: tuple[int, int] | None = None,
    special: int = 0,
    draw: Tensor | None = None,
) -> MergePlan:
    """Decides what merges, from the similarity of the tokens of x.

    Args:
        x: the feature that is compared [*, L, d], any leading dimensions, floating point; it need not be the tensor
            that is merged. Similarity and weights are fp32 whatever its dtype, under autocast too.
        config: the settings; `merge`, `min_tokens` and `size` are for callers and not read here.
        size: (h, w) of the tokens without the special ones, needed by tiles and by the grid partition (a square is
            assumed where it fits).
        special: leading tokens that take no part, such as a class token.
        draw: with `redraw`, which of the drawn partitions, a LongTensor [1] (`mame_sd.core.partition.draw_at`); None: the first.

    Raises:
        ValueError: a shape, dtype or size that can't be.
    """
    if x.dim() < 2 or not x.is_floating_point():
        raise ValueError(f"x: expected floating point tokens of shape [..., L, d], got {x.dtype} {list(x.shape)}")
    if not 0 <= special < x.shape[-2]:
        raise ValueError(f"special: expected fewer than the {x.shape[-2]} tokens of x, got {special}")
    lead = x.shape[:-2]
    feature = x.reshape(math.prod(lead), *x.shape[-2:])[:, special:]
    pos = positions(feature.shape[1], config, size, x.device, draw)
    note = ""
    if config.kernel is not None:
        from mame_sd.core.triton_plan import TORCH_INSTEAD, row_plan

        with _no_autocast(x):
            plan = row_plan(feature, pos, config, special, lead)
        if plan is not None:
            return plan
        note = TORCH_INSTEAD
    with _no_autocast(x):
        similarity = similarity_of(feature, pos, config.metric)  # [B, T, m, n]
        if config.keep is None:
            weights, stay, kept = weights_by_tau(similarity, pos, config)
        else:
            weights, stay, kept = weights_by_keep(similarity, pos, config)
        del similarity
        made = MergePlan(weights, stay, kept, pos, special, lead, config.variant == "paper")
        made.note = note
        return made


def _no_autocast(t: Tensor) -> contextlib.AbstractContextManager[None]:
    kind = t.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()
