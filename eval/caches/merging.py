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

from .methods import RECENT, SINKS, keys_of


@dataclass(frozen=True)
class CausalMaMe:
    """The paper's causal merging of a cache, in rounds that halve it at most, until the share is
    reached; of one sample without padding.

    Attributes:
        causal: "mask" (the paper's), "strict" or "none".
        tau: one round of this threshold; None: rounds of the most similar until the share is
            reached.
        sinks, recent: first and newest tokens that take no part.
    """

    causal: str = "mask"
    tau: float | None = None
    sinks: int = SINKS
    recent: int = RECENT

    def compress_all(self, views: Sequence[CacheView], keep: float) -> list[Kept]:
        """Every layer's merged cache."""
        return [self.compress(view, keep) for view in views]

    def compress(self, view: CacheView, keep: float) -> Kept:
        """The merged cache, at most round(keep * tokens) keys in each head (with `tau`: those that
        it leaves).
        """
        keys, values, slots = view.keys[0], view.values[0], view.slots[0, 0]
        count = min(keys_of(view, keep), len(slots))
        first, end = min(self.sinks, count // 4), len(slots) - min(self.recent, count // 2)
        target = max(1, count - first - len(slots) + end)
        dtype, d = torch.promote_types(keys.dtype, torch.float32), keys.shape[-1]
        if view.hidden_states.shape[1] == view.seen:
            feature = view.hidden_states[0][slots]
        else:  # the layer's input of earlier tokens is gone: their keys stand for it
            feature = keys.transpose(0, 1).flatten(1)
        tokens = torch.cat([keys, values], -1).transpose(0, 1).to(dtype)
        merged = Tokens(feature.to(dtype), tokens, slots).at(torch.arange(first, end))
        if self.tau is not None:
            merged = self._round(merged, None)
        else:
            while (before := len(merged.slots)) > target:
                merged = self._round(merged, target)
                if len(merged.slots) == before:  # nothing merges: the newest stay
                    merged = merged.at(torch.arange(before - target, before))
        new = merged.tokens.transpose(0, 1).to(keys.dtype)
        stays = torch.cat([slots[:first], merged.slots, slots[end:]])
        return Kept(
            torch.cat([keys[:, :first], new[..., :d], keys[:, end:]], 1)[None],
            torch.cat([values[:, :first], new[..., d:], values[:, end:]], 1)[None],
            stays.expand(1, keys.shape[0], -1),
            None,
        )

    def _round(self, t: Tokens, target: int | None) -> Tokens:
        """Merges once: to `target` tokens where half of them reach it, else to half; None: by
        tau.
        """
        n = len(t.slots) // 2 * 2  # the last of an odd number has no destination after it
        if not n:
            return t
        merges = None if target is None else min(n // 2, len(t.slots) - target)
        fusion, stays = weights(t.feature[:n], self.tau, self.causal, merges)
        divisor = 1 + fusion.sum(1, keepdim=True)

        def mean(x: Tensor) -> Tensor:
            flat = x[:n].flatten(1)
            return ((flat[1::2] + fusion @ flat[::2]) / divisor).view(-1, *x.shape[1:])

        fused = Tokens(mean(t.feature), mean(t.tokens), t.slots[1:n:2])
        kept = torch.cat([torch.arange(0, n, 2)[stays.cpu()], torch.arange(n, len(t.slots))])
        return fused.joined(t.at(kept))


@dataclass(frozen=True)
class Tokens:
    """Tokens in the order of the sequence.

    Attributes:
        feature: what is compared [n, C].
        tokens: keys and values [n, h, 2 D].
        slots: [n].
    """

    feature: Tensor
    tokens: Tensor
    slots: Tensor

    def at(self, index: Tensor) -> Tokens:
        """Those at `index`."""
        index = index.to(self.slots.device)
        return Tokens(self.feature[index], self.tokens[index], self.slots[index])

    def joined(self, other: Tokens) -> Tokens:
        """Both."""
        both = Tokens(*(torch.cat([getattr(self, n), getattr(other, n)]) for n in vars(self)))
        return both.at(both.slots.argsort())


def weights(x: Tensor, tau: float | None, causal: str, merges: int | None) -> tuple[Tensor, Tensor]:
    """W^F [n / 2, n / 2] of tokens x [n, C], destinations at odd positions; and which sources stay,
    bool [n / 2].

    Args:
        merges: how many sources merge at most, the most similar ones; None: those above tau.
    """
    turned = similarity(x[1::2].unsqueeze(0), x[::2].unsqueeze(0), "cosine")[0]
    allowed = torch.ones_like(turned, dtype=torch.bool)
    if causal != "none":
        allowed = allowed.tril()
    chosen = torch.ones_like(allowed[0])
    if merges is not None:
        best = turned.masked_fill(~allowed, -torch.inf).amax(0)
        order = best.argsort(descending=True, stable=True)[:merges]
        chosen = torch.zeros_like(chosen).index_fill(0, order, True)
        tau = float(best[chosen].min()) if merges else 1.0
    assert tau is not None
    if causal == "strict":
        found = strict_weights(turned, tau)
    else:
        found = fusion_weights(turned.unsqueeze(0), max(-1.0, tau - 1e-6), True)[0][0] * allowed
    found = found * chosen
    return found, found.sum(0) == 0


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
