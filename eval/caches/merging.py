"""Merge by the paper's sketch of causal merging for caches.

Destinations are at odd positions, sources at even ones. Paper, "Future Work": W^F is multiplied by
M, with M_ij = 1 if source j isn't later than destination i. Taken literally, W^F still normalises
each source's column over *all* destinations, so that a later token changes the weights of an
earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mame_sd.caches import CacheView, Kept
from mame_sd.caches.view import wide
from mame_sd.core.paper import fusion_weights, similarity

from .methods import RECENT, SINKS, keys_of


@dataclass(frozen=True)
class CausalMaMe:
    """The paper's causal merging of a cache, for one sample without padding.

    It merges the most similar tokens in rounds, each of which at most halves the cache, until the
    share is reached.

    Attributes:
        sinks: number of first tokens that don't merge.
        recent: number of newest tokens that don't merge.
    """

    sinks: int = SINKS
    recent: int = RECENT

    def compress_all(self, views: Sequence[CacheView], keep: float) -> list[Kept]:
        """Return every layer's merged cache."""
        return [self.compress(view, keep) for view in views]

    def compress(self, view: CacheView, keep: float) -> Kept:
        """Return a merged cache of at most round(keep * tokens) keys in each head."""
        keys, values, slots = view.keys[0], view.values[0], view.slots[0, 0]
        count = min(keys_of(view, keep), len(slots))
        first, end = min(self.sinks, count // 4), len(slots) - min(self.recent, count // 2)
        target = max(1, count - first - len(slots) + end)
        flat = [t.transpose(0, 1).flatten(1).to(wide(keys)) for t in (keys, values)]
        compared = flat[0]  # if the layer's input of earlier tokens is gone
        if view.hidden_states.shape[1] == view.seen:
            compared = view.hidden_states[0][slots].to(wide(keys))
        x, stays = torch.cat([compared, *flat], 1)[first:end], slots[first:end]
        while (before := len(stays)) > target:
            x, stays = merged(x, stays, compared.shape[1], target)
            if len(stays) == before:  # nothing merges: the newest stay
                x, stays = x[-target:], stays[-target:]
        _, *new = x.split([compared.shape[1], *(t.shape[1] for t in flat)], 1)

        def joined(old: Tensor, middle: Tensor) -> Tensor:
            """Join the ends of `old` [h, L, D] with the merged `middle` [K', h D]: [1, h, K, D]."""
            split = middle.unflatten(1, (len(old), -1)).transpose(0, 1).to(old.dtype)
            return torch.cat([old[:, :first], split, old[:, end:]], 1)[None]

        places = torch.cat([slots[:first], stays, slots[end:]]).expand(1, len(keys), -1)
        return Kept(joined(keys, new[0]), joined(values, new[1]), places)


def merged(x: Tensor, slots: Tensor, width: int, target: int) -> tuple[Tensor, Tensor]:
    """Merge tokens once: to `target` tokens, or to half of them if half is more.

    Args:
        x: tokens [n, C].
        slots: their slots [n], the places at which the model read them.
        width: number of leading features by which they are compared.
        target: number of tokens to reach.

    Returns:
        The tokens [n', C] that remain and their slots [n'], both in the order of the slots.
    """
    n = len(slots) // 2 * 2  # the last of an odd number has no destination after it
    if not n:
        return x, slots
    fusion, stays = causal_weights(x[:n, :width], min(n // 2, len(slots) - target))
    fused = (x[1:n:2] + fusion @ x[:n:2]) / (1 + fusion.sum(1, keepdim=True))
    x = torch.cat([fused, x[:n:2][stays], x[n:]])
    slots = torch.cat([slots[1:n:2], slots[:n:2][stays], slots[n:]])
    order = slots.argsort()
    return x[order], slots[order]


def causal_weights(x: Tensor, merges: int) -> tuple[Tensor, Tensor]:
    """Return the weights of causal merging, destinations at odd positions.

    Args:
        x: tokens [n, C].
        merges: number of sources that merge, the most similar ones.

    Returns:
        W^F [n / 2, n / 2], and the sources that stay, bool [n / 2].
    """
    similarities = similarity(x[1::2].unsqueeze(0), x[::2].unsqueeze(0), "cosine")[0]
    allowed = torch.ones_like(similarities, dtype=torch.bool).tril()
    best = similarities.masked_fill(~allowed, -torch.inf).amax(0)
    order = best.argsort(descending=True, stable=True)[:merges]
    chosen = torch.zeros_like(allowed[0]).index_fill(0, order, True)
    tau = max(-1.0, float(best[chosen].min()) - 1e-6)
    weights = fusion_weights(similarities.unsqueeze(0), tau, True)[0][0] * allowed * chosen
    return weights, weights.sum(0) == 0
