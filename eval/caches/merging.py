"""Merging as the paper sketches it for caches: destinations at odd positions, sources at even ones,
a triangular mask.

Paper, "Future Work": W^F is multiplied by M, M_ij = 1 where source j is not later than destination
i. To the letter W^F still sums each source's column over *all* destinations, so a later token
changes the weights of an earlier one. `causal="strict"` sums only up to the destination itself, and
changes nothing earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mame_sd.caches import CacheView, Kept
from mame_sd.core.paper import REFINE_FLOOR, fusion_weights, similarity

from .methods import keys_of


@dataclass(frozen=True)
class CausalMaMe:
    """The paper's causal merging of a cache, in rounds that halve it at most, until the share is
    reached.

    Attributes:
        causal: "mask" (the paper's), "strict" or "none".
        tau: one round of this threshold; None: rounds of the most similar until the share is
            reached.
        sinks, recent: first and newest tokens that take no part.
    """

    causal: str = "mask"
    tau: float | None = None
    sinks: int = 4
    recent: int = 32

    def compress_all(self, views: Sequence[CacheView], keep: float) -> list[Kept]:
        """Every layer's merged cache."""
        return [self.compress(view, keep) for view in views]

    def compress(self, view: CacheView, keep: float) -> Kept:
        """The merged cache, at most round(keep * tokens) keys in each head (with `tau`: those that
        it leaves).
        """
        parts = [self._sample(view, b, int(count)) for b, count in enumerate(keys_of(view, keep))]
        most = max(part.keys.shape[2] for part in parts)
        keys, values, slots = (
            _stacked([getattr(p, n) for p in parts], most) for n in ("keys", "values", "slots")
        )
        lengths = torch.tensor([p.keys.shape[2] for p in parts], device=keys.device)
        real = torch.arange(most, device=keys.device) < lengths.unsqueeze(1)
        alike = bool(real.all())
        return Kept(
            keys, values, slots, None, None if alike else real.unsqueeze(1).expand(slots.shape)
        )

    def _sample(self, view: CacheView, b: int, count: int) -> Kept:
        """One sample's cache [1, h, K, D]."""
        real = view.real_keys[b, 0]
        keys, values = view.keys[b][:, real], view.values[b][:, real]
        slots = view.slots[b, 0][real]
        count = min(count, len(slots))
        first, last = min(self.sinks, count // 4), min(self.recent, count // 2)
        end = len(slots) - last
        feature = self._feature(view, b, keys, slots)[first:end]
        wide = torch.promote_types(keys.dtype, torch.float32)
        tokens = torch.cat([keys, values], -1).transpose(0, 1).to(wide)[first:end]  # [n, h, 2 D]
        merged = _Tokens(feature.to(wide), tokens, slots[first:end])
        target = count - first - last
        if self.tau is not None:
            merged = self._round(merged, None)
        else:
            while len(merged.slots) > max(1, target):
                before = len(merged.slots)
                merged = self._round(merged, max(1, target))
                if len(merged.slots) == before:
                    merged = merged.newest(max(1, target))
        d = keys.shape[-1]
        new = merged.tokens.transpose(0, 1).to(keys.dtype)
        n = first + len(merged.slots) + last
        return Kept(
            torch.cat([keys[:, :first], new[..., :d], keys[:, end:]], 1)[None],
            torch.cat([values[:, :first], new[..., d:], values[:, end:]], 1)[None],
            torch.cat([slots[:first], merged.slots, slots[end:]]).expand(1, keys.shape[0], n),
            None,
        )

    def _feature(self, view: CacheView, b: int, keys: Tensor, slots: Tensor) -> Tensor:
        """What is compared [n, C].

        Of tokens that were merged before the layer's input is gone: their keys stand for it.
        """
        if view.hidden_states.shape[1] == view.seen:
            return view.hidden_states[b][slots]
        return keys.transpose(0, 1).flatten(1)

    def _round(self, t: _Tokens, target: int | None) -> _Tokens:
        """Merges once: to `target` tokens where half of them reach it, else to half; None: by
        tau.
        """
        n = (
            len(t.slots) // 2 * 2
        )  # the last of an odd number is a source that no destination follows
        if not n:
            return t
        merges = None if target is None else min(n // 2, len(t.slots) - target)
        fusion, stays = _weights(t.feature[:n], self.tau, self.causal, merges)
        src, dst = (torch.arange(at, n, 2, device=fusion.device) for at in (0, 1))
        divisor = 1 + fusion.sum(1, keepdim=True)

        def mean(x: Tensor) -> Tensor:
            flat = x.flatten(1)
            return ((flat[dst] + fusion @ flat[src]) / divisor).view(-1, *x.shape[1:])

        fused = _Tokens(mean(t.feature), mean(t.tokens), t.slots[dst])
        kept = torch.cat([src[stays], torch.arange(n, len(t.slots), device=src.device)])
        return fused.joined(t.at(kept))


@dataclass(frozen=True)
class _Tokens:
    feature: Tensor  # [n, C]
    tokens: Tensor  # [n, h, 2 D]: keys and values
    slots: Tensor  # [n], ascending

    def at(self, index: Tensor) -> _Tokens:
        return _Tokens(self.feature[index], self.tokens[index], self.slots[index])

    def newest(self, count: int) -> _Tokens:
        return self.at(torch.arange(len(self.slots) - count, len(self.slots)))

    def joined(self, other: _Tokens) -> _Tokens:
        """Both, in the order of the sequence."""
        both = _Tokens(*(torch.cat([getattr(self, n), getattr(other, n)]) for n in vars(self)))
        return both.at(both.slots.argsort())


def _weights(
    x: Tensor, tau: float | None, causal: str, merges: int | None
) -> tuple[Tensor, Tensor]:
    """W^F [n / 2, n / 2] of tokens x [n, C], destinations at odd positions; and which sources stay,
    bool [n / 2].

    Args:
        merges: how many sources merge at most, the most similar ones; None: those above tau.
    """
    m = x.shape[0] // 2
    turned = similarity(x[1::2].unsqueeze(0), x[::2].unsqueeze(0), "cosine")[0]
    allowed = torch.ones(m, m, dtype=torch.bool, device=x.device)
    if causal != "none":
        allowed = allowed.tril()
    best = turned.masked_fill(~allowed, -torch.inf).max(0).values
    chosen = torch.ones(m, dtype=torch.bool, device=x.device)
    if merges is not None:
        chosen = torch.zeros_like(chosen).index_fill(
            0, best.argsort(descending=True, stable=True)[:merges], True
        )
        tau = float(best[chosen].min()) if merges else 1.0
    assert tau is not None
    if causal == "strict":
        weights = strict_weights(turned, tau)
    else:
        found, _ = fusion_weights(turned.unsqueeze(0), max(-1.0, tau - 1e-6), True)
        weights = found[0] * allowed
    weights = weights * chosen
    return weights, weights.sum(0) == 0


def strict_weights(s: Tensor, tau: float) -> Tensor:
    """W^F [M, N] of which row i follows from tokens up to destination i alone.

    The sums of a source's column, and the mean that refines it, run from the source to the
    destination itself.

    Args:
        s: S [M, N], destination i at position 2 i + 1, source j at 2 j.
    """
    above = torch.relu(s - tau).tril()
    total = above.cumsum(0)
    mean = total / (above > 0).to(above.dtype).cumsum(0).clamp(min=1)
    refined = torch.relu(above - mean)
    # a tie, as at the first destination, which is its own mean
    above = torch.where(refined.cumsum(0) <= REFINE_FLOOR * total, above, refined)
    total = above.cumsum(0)
    return above / torch.where(total == 0, 1.0, total)


def _stacked(parts: list[Tensor], most: int) -> Tensor:
    """Samples of unequal length, padded at the end."""
    padded = [
        torch.cat([p, p[:, :, :1].expand(-1, -1, most - p.shape[2], *p.shape[3:])], 2)
        for p in parts
    ]
    return torch.cat(padded)
