"""A plan that holds the fusion weights W^F: merging and restoring are two products with them.

NaN and infinity are never hidden: where a token holds one, it comes back. Through the products it
may spread to other tokens of the same sample, never to another sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mame_sd.core.buffers import reuse
from mame_sd.core.detail import Detail
from mame_sd.core.partition import Positions
from mame_sd.core.plan import Plan, no_autocast, rows_of
from mame_sd.core.similarity import blocks_of
from mame_sd.core.weights import Fusion


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
        first = torch.arange(0, b * pos.L, pos.L, device=x.device).unsqueeze(1)
        kept = (self._body_kept() + first).flatten()
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
