"""Choose the keys that stay: their scores, the length of each layer, and fitted values.

Values and a bias are fitted so that attention gives what it gave over all keys. As in Attention
Matching (arXiv 2602.16284), first the mass, then the values are fitted by least squares over
reference queries. Here these are the prompt's own queries, moved to future positions, and both fits
are ridge regressions towards what the keys had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mame_sd.caches.layer import Kept
from mame_sd.caches.view import CacheView
from mame_sd.core.fit import solve_ridge, within

SINKS, RECENT = 4, 32  # first and newest tokens that stay in every head
FLOOR = 0.2  # smallest length of a layer, relative to an equal share
SCORING = 1024  # largest number of the prompt's queries that score keys
COUNT, AHEAD = 192, 128  # queries that values are fitted to; positions that they are spread over
SLOT = 4  # bytes of a kept key's slot
# Ridges relative to the mean diagonal of the normal equations.
RIDGE_MASS = 0.1
RIDGE_VALUES = 0.01
LEAST, MOST_MASS = 1e-2, 1e2  # limits of the factor on a key's mass
MOST = 1e30  # scores are clamped to it, so that sums over heads are finite


class ScoredLayer(NamedTuple):
    """What is kept of a layer's forward until all layers have run."""

    scores: Tensor  # [B, h, L]; inf if the key stays in any case, -inf at padding
    queries: Tensor  # [B, H, N, D], rotated to future positions
    valid: Tensor  # bool [B, N]: False at padding


@dataclass(frozen=True)
class Selection:
    """Keep the keys with the highest scores, and fit their values.

    All layers share a budget of bytes. The heads of a layer keep equally many keys, so that nothing
    is padded. A layer's length follows from its heads' scores, and no layer keeps less than `FLOOR`
    of an equal share. A subclass may shorten caches by its own steps.

    Attributes:
        score: returns a number for each key of a layer, [B, h, L]; the highest ones stay. If None,
            the attention of the prompt's own queries, moved to future positions.
    """

    score: Callable[[CacheView], Tensor] | None = None

    def score_layer(self, view: CacheView, keep: float) -> ScoredLayer:
        """Score the keys of a layer, and choose the queries that its values will be fitted to."""
        moved, valid = view.future_queries(SCORING if self.score is None else COUNT, AHEAD)
        scores = future_attention(view, moved, valid) if self.score is None else self.score(view)
        real = isinstance(scores, Tensor) and not scores.is_complex()
        if not real or scores.shape != view.slots.shape:
            got = list(scores.shape) if real else type(scores).__name__
            raise ValueError(
                f"method: expected a number for each key, {list(view.slots.shape)}, got {got}"
            )
        return ScoredLayer(with_fixed_keys(scores, view, keep), *_fewer(moved, valid))

    def lengths(
        self, views: Sequence[CacheView], scored: Sequence[ScoredLayer], keep: float
    ) -> Tensor:
        """Share the budget among layers, the largest gain of scores per byte first.

        Args:
            views: the layers.
            scored: what `score_layer` returned for them.
            keep: share of the bytes that stays.

        Returns:
            The number of keys in each head, at least 1, LongTensor [layers, B].
        """
        ranked = [layer.scores.sort(-1, descending=True).values.cpu() for layer in scored]
        low = min(float(each.masked_fill(each == -torch.inf, torch.inf).min()) for each in ranked)
        low = 0.0 if low == torch.inf else low  # inf: every key stays
        curves, prices = [], []
        for view, each in zip(views, ranked, strict=True):
            gain = (each - low).masked_fill(each.isinf(), 0).sum(1)  # [B, L]
            floor = (budget(view, keep).cpu() * FLOOR).long().clamp(min=1)
            least = torch.maximum((each == torch.inf).sum(-1).amax(1), floor)
            place = torch.arange(gain.shape[1], device=gain.device)
            gain = gain.masked_fill(place < least.unsqueeze(1), torch.inf)
            gain = gain.masked_fill(place >= (each > -torch.inf).sum(-1).amax(1, keepdim=True), -1)
            curves.append(gain / key_bytes(view))
            prices.append(gain.new_full((gain.shape[1],), key_bytes(view)))
        gains, order = torch.cat(curves, 1).sort(dim=1, descending=True, stable=True)
        spent = torch.cat(prices).double()[order].cumsum(1)
        total = keep * torch.stack([v.counts().cpu() * token_bytes(v) for v in views]).sum(0)
        stays = ((spent <= total.unsqueeze(1)) | (gains == torch.inf)) & (gains >= 0)
        picked = torch.zeros_like(stays).scatter(1, order, stays)
        return torch.stack([p.sum(1) for p in picked.split([c.shape[1] for c in curves], 1)])

    def shorten(self, view: CacheView, layer: ScoredLayer, length: Tensor) -> Kept:
        """Keep the keys with the highest scores, with fitted values.

        Args:
            view: the layer.
            layer: what `score_layer` returned for it.
            length: number of keys in each head, LongTensor [B].
        """
        kept, place = gather_keys(view, layer.scores, length)
        return with_fitted_values(view, kept, place, layer.queries, layer.valid)


def future_attention(view: CacheView, moved: Tensor, valid: Tensor) -> Tensor:
    """Score keys by the attention of queries at future positions, times the norm of the value.

    A score is sqrt(mean of squared attention over queries and grouped heads) |v|.

    Args:
        view: the layer.
        moved: the prompt's own queries, rotated to future positions, [B, H, N, D].
        valid: bool [B, N], False for queries at padding.

    Returns:
        Scores [B, h, L].
    """
    power = torch.zeros(view.slots.shape, device=moved.device)
    weigh = not bool(valid.all())
    for at in view.blocks(moved):
        squared = view.attention(moved[:, :, at]).square_()
        if weigh:
            squared = squared * valid[:, None, None, at, None]
        power += squared.sum((2, 3))
    return power.sqrt_() * view.values.to(power.dtype).norm(dim=-1)


def _fewer(queries: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Select at most `COUNT` of the queries [B, H, N, D], evenly spaced over the valid ones.

    `valid` is bool [B, N], with the valid ones first. A sample gets the same queries in any batch.
    """
    n = valid.sum(1, keepdim=True)
    most = n.clamp(min=1, max=COUNT)
    each = torch.arange(min(COUNT, queries.shape[2]), device=n.device)
    index = ((each + 1) * n // most - 1).clamp(min=0, max=queries.shape[2] - 1)
    wide = index[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])
    return queries.gather(2, wide), each < n


def token_bytes(view: CacheView) -> int:
    """Return the bytes of one token's keys and values in a layer."""
    width = view.keys.shape[-1] + view.values.shape[-1]
    return view.keys.shape[1] * view.keys.element_size() * width


def key_bytes(view: CacheView) -> int:
    """Return the bytes of one kept key in every head of a layer, with its bias and slot."""
    return token_bytes(view) + view.keys.shape[1] * (view.keys.element_size() + SLOT)


def budget(view: CacheView, keep: float) -> Tensor:
    """Return the number of keys that a head keeps on average, at least 1, LongTensor [B]."""
    share = keep * token_bytes(view) / key_bytes(view)
    return (view.counts() * share).long().clamp(min=1)


def with_fixed_keys(scores: Tensor, view: CacheView, keep: float) -> Tensor:
    """Set scores to inf at the first and the newest tokens, and to -inf where there is no key.

    If the budget is small, the first tokens take at most a quarter of it and the newest ones a
    half. NaN ranks last.

    Args:
        scores: [B, h, L].
        view: the layer.
        keep: share of the bytes that stays.
    """
    scores = scores.float().clamp(-MOST, MOST)
    low = scores.nan_to_num(nan=MOST).amin()
    scores = torch.where(scores.isnan(), low, scores)
    count = budget(view, keep).view(-1, 1, 1)
    ranks = view.ranks()
    first = ranks < (count // 4).clamp(max=SINKS)
    last = ranks >= view.counts().view(-1, 1, 1) - (count // 2).clamp(max=RECENT)
    return scores.masked_fill(first | last, torch.inf).masked_fill(~view.real_keys(), -torch.inf)


def gather_keys(view: CacheView, scores: Tensor, length: Tensor) -> tuple[Kept, Tensor]:
    """Gather the keys with the highest scores in each head, padded to the longest sample.

    Args:
        view: the layer.
        scores: [B, h, L].
        length: number of keys to gather, LongTensor [B].

    Returns:
        The keys, and the index of each in `view`, [B, h, K].
    """
    most = int(length.max())
    place = scores.topk(most, -1).indices
    real = torch.arange(most, device=place.device) < length.to(place.device).view(-1, 1, 1)
    # In the order of the sequence, with padding at the end.
    place = place.masked_fill(~real, scores.shape[-1]).sort(-1).values
    place = place.clamp(max=scores.shape[-1] - 1)
    index = place.unsqueeze(-1)
    kept = Kept(
        view.keys.gather(2, index.expand(-1, -1, -1, view.keys.shape[-1])),
        view.values.gather(2, index.expand(-1, -1, -1, view.values.shape[-1])),
        view.slots.gather(2, place),
        None if view.bias is None else view.bias.gather(2, place),
        None if bool(real.all()) else real.expand(place.shape),
    )
    return kept, place


def with_fitted_values(
    view: CacheView, kept: Kept, place: Tensor, queries: Tensor, valid: Tensor
) -> Kept:
    """Return `kept` with fitted values and biases.

    Args:
        view: the layer's whole cache.
        kept: the keys that stay.
        place: LongTensor [B, h, K], the index of each kept key in `view`.
        queries: reference queries, rotated, [B, H, N, D].
        valid: bool [B, N], False for queries at padding.
    """
    g = queries.shape[1] // place.shape[1]  # heads of queries per head of keys
    parts = [
        _fit_head(view.head(i), kept.head(i), place[:, i], queries[:, i * g : (i + 1) * g], valid)
        for i in range(place.shape[1])
    ]
    values = torch.stack([v for v, _ in parts], 1).to(kept.values.dtype)
    bias = torch.stack([b for _, b in parts], 1).to(kept.values.dtype)
    return replace(kept, values=values, bias=bias if kept.bias is None else kept.bias + bias)


def _fit_head(
    view: CacheView, kept: Kept, place: Tensor, queries: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Fit one head of keys; arguments as `with_fitted_values` has them.

    Returns:
        Values [B, K, D], and what is added to the bias [B, K].
    """
    g = queries.shape[1]
    logits = view.logits(queries)[:, 0].flatten(1, 2)  # [B, G N, L]
    weight = valid.repeat(1, g).unsqueeze(-1).to(logits.dtype)
    at = place.unsqueeze(1).expand(-1, logits.shape[1], -1)
    everything = logits.softmax(-1)
    if view.real is not None:
        everything = everything.nan_to_num()
    target = everything @ view.values[:, 0].to(logits.dtype)
    share = everything.gather(2, at) * weight  # each kept key's share of all attention
    count = torch.full((place.shape[0],), place.shape[1], device=place.device)
    if kept.real is not None:
        share = share.masked_fill(~kept.real, 0)
        count = kept.real[:, 0].sum(-1).clamp(min=1)
    mass = weight - share.sum(-1, keepdim=True)
    # Half of the queries are enough.
    a, b = (t.unflatten(1, (g, -1))[:, :, ::2].flatten(1, 2) for t in (share, mass))
    change = solve_ridge(a, b, RIDGE_MASS, count).squeeze(-1)
    bias = (1 + change).clamp(LEAST, MOST_MASS).log()
    attention = share * bias.exp().unsqueeze(1)
    attention = attention / attention.sum(-1, keepdim=True).clamp(min=torch.finfo(share.dtype).tiny)
    start = kept.values[:, 0].to(logits.dtype)
    lacking = target * weight - attention @ start
    values = solve_ridge(attention, lacking, RIDGE_VALUES, count, start=start)
    seen = view.values[:, 0]
    if view.real is not None:  # padding doesn't widen the range
        seen = seen.where(view.real[:, 0, :, None], kept.values[:, 0, :1])
    return within(values, seen), bias
