"""Which keys stay: their scores, how long each layer stays, and what becomes of the rest.

Scores of your own need one function:

    class Newest:
        def score(self, view):
            return view.slots.float()            # [B, h, L], one number for each key

    with compress_cache(model, keep=0.5, method=Newest()): ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mame_sd.caches.fit import with_fitted_values
from mame_sd.caches.layer import Kept
from mame_sd.caches.view import CacheView

SINKS, RECENT = 4, 32  # first and newest tokens that stay in every head
FLOOR = 0.2  # of an equal share, which every layer keeps
SCORING = 1024  # queries of the prompt that score keys, at most
COUNT, AHEAD = 192, 128  # queries that values are fitted to; positions that queries are spread over
# Bytes that a kept key takes beside its key and value: the token at which it stands.
SLOT = 4
MOST = 1e30  # a score beyond it counts as it, so that sums over heads are finite


class Scores(Protocol):
    """Scores keys."""

    def score(self, view: CacheView) -> Tensor:
        """Return a number for each key of one layer, [B, h, L]; the highest stay."""


class Look(NamedTuple):
    """What stays of a layer's forward until all layers have run."""

    scores: Tensor  # [B, h, L]; inf: stays, -inf: no key
    queries: Tensor  # [B, H, N, D], moved to positions to come
    counted: Tensor  # bool [B, N]: which of them count


@dataclass(frozen=True)
class Selection:
    """Keeps the keys of the highest scores, with fitted values.

    All layers share a budget of bytes. A layer's heads keep equally many keys, so that nothing is
    padded; its length is how far its heads' scores reach. None keeps less than `FLOOR` of an equal
    share. A subclass may shorten caches by steps of its own.

    Attributes:
        method: scores the keys; None: attention of the prompt's own queries, moved to positions to
            come.
    """

    method: Scores | None = None

    def __post_init__(self) -> None:
        own = self.method
        if isinstance(own, type):
            raise TypeError(
                f"method: expected an object, got the class {own.__name__}; write {own.__name__}()"
            )
        if own is not None and not callable(getattr(own, "score", None)):
            raise TypeError(
                f"method: expected an object with score(view), got {type(own).__name__}"
            )

    def look(self, view: CacheView, keep: float) -> Look:
        """Score the keys, and choose the queries that values will be fitted to."""
        own = self.method
        moved, counted = view.to_come(SCORING if own is None else COUNT, AHEAD)
        if own is None:
            scores = future_attention(view, moved, counted)
            moved, counted = _fewer(moved, counted)
        else:
            scores = own.score(view)
        real = isinstance(scores, Tensor) and not scores.is_complex()
        if not real or scores.shape != view.slots.shape:
            got = list(scores.shape) if real else type(scores).__name__
            raise ValueError(
                f"{type(own).__name__}.score: expected a number for each key,"
                f" {list(view.slots.shape)}, got {got}"
            )
        return Look(marked(scores, view, keep), moved, counted)

    def lengths(self, views: Sequence[CacheView], looks: Sequence[Look], keep: float) -> Tensor:
        """Share the budget out, the largest gain of scores for each byte first, at least one key a
        layer: LongTensor [layers, B].
        """
        ranked = [look.scores.sort(-1, descending=True).values.cpu() for look in looks]
        low = min(float(each.masked_fill(each == -torch.inf, torch.inf).min()) for each in ranked)
        low = 0.0 if low == torch.inf else low  # every key stays
        curves, prices = [], []
        for view, each in zip(views, ranked, strict=True):
            gain = (each - low).masked_fill(each.isinf(), 0).sum(1)  # [B, L]
            floor = (budget(view, keep).cpu() * FLOOR).long().clamp(min=1)
            least = torch.maximum((each == torch.inf).sum(-1).amax(1), floor)
            place = torch.arange(gain.shape[1], device=gain.device)
            gain = gain.masked_fill(place < least.unsqueeze(1), torch.inf)
            gain = gain.masked_fill(place >= (each > -torch.inf).sum(-1).amax(1, keepdim=True), -1)
            curves.append(gain / price_of(view))
            prices.append(gain.new_full((gain.shape[1],), price_of(view)))
        gains, order = torch.cat(curves, 1).sort(dim=1, descending=True, stable=True)
        spent = torch.cat(prices).double()[order].cumsum(1)
        total = keep * torch.stack([v.counts().cpu() * full_price_of(v) for v in views]).sum(0)
        stays = ((spent <= total.unsqueeze(1)) | (gains == torch.inf)) & (gains >= 0)
        picked = torch.zeros_like(stays).scatter(1, order, stays)
        return torch.stack([p.sum(1) for p in picked.split([c.shape[1] for c in curves], 1)])

    def shorten(self, view: CacheView, look: Look, length: Tensor) -> Kept:
        """Keep the keys of the highest scores, with fitted values."""
        kept, place = gathered(view, look.scores, length)
        return with_fitted_values(view, kept, place, look.queries, look.counted)


def future_attention(view: CacheView, moved: Tensor, counted: Tensor) -> Tensor:
    """Score keys by the attention of queries at positions to come: sqrt(mean of attention squared
    over queries and grouped heads) |v|, [B, h, L].

    Args:
        view: of the layer.
        moved: the prompt's own queries [B, H, N, D], moved there.
        counted: bool [B, N], which of them count.
    """
    power = torch.zeros(view.slots.shape, device=moved.device)
    weigh = not bool(counted.all())
    for at in view.blocks(moved):
        found = view.attention(moved[:, :, at]).square_()
        if weigh:
            found = found * counted[:, None, None, at, None]
        power += found.sum((2, 3))
    return power.sqrt_() * view.values.to(power.dtype).norm(dim=-1)


def _fewer(queries: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Take at most `COUNT` of the queries [B, H, N, D], evenly spaced over those that count, bool
    [B, N], which come first: a sample has the same ones whatever stands beside it.
    """
    n = counted.sum(1, keepdim=True)
    most = n.clamp(min=1, max=COUNT)
    each = torch.arange(min(COUNT, queries.shape[2]), device=n.device)
    index = ((each + 1) * n // most - 1).clamp(min=0, max=queries.shape[2] - 1)
    wide = index[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])
    return queries.gather(2, wide), each < n


def full_price_of(view: CacheView) -> int:
    """Count the bytes of one token's keys and values."""
    width = view.keys.shape[-1] + view.values.shape[-1]
    return view.keys.shape[1] * view.keys.element_size() * width


def price_of(view: CacheView) -> int:
    """Count the bytes of one kept key in every head of a layer, its bias and slot too."""
    return full_price_of(view) + view.keys.shape[1] * (view.keys.element_size() + SLOT)


def budget(view: CacheView, keep: float) -> Tensor:
    """Return how many keys a head keeps on average, at least 1, LongTensor [B]."""
    share = keep * full_price_of(view) / price_of(view)
    return (view.counts() * share).long().clamp(min=1)


def marked(scores: Tensor, view: CacheView, keep: float) -> Tensor:
    """Set scores [B, h, L] to inf at the first and newest tokens, and -inf where no key is.

    Where the budget is small, first tokens take at most a quarter of it and newest ones a half.
    NaN ranks last.
    """
    scores = scores.float().clamp(-MOST, MOST)
    low = scores.nan_to_num(nan=MOST).amin()
    scores = torch.where(scores.isnan(), low, scores)
    count = budget(view, keep).view(-1, 1, 1)
    ranks = view.ranks()
    first = ranks < (count // 4).clamp(max=SINKS)
    last = ranks >= view.counts().view(-1, 1, 1) - (count // 2).clamp(max=RECENT)
    return scores.masked_fill(first | last, torch.inf).masked_fill(~view.real_keys(), -torch.inf)


def gathered(view: CacheView, scores: Tensor, length: Tensor) -> tuple[Kept, Tensor]:
    """Take the `length` [B] keys of the highest scores [B, h, L] in each head, padded to the
    longest sample, and say where each lies in `view`, [B, h, K].
    """
    most = int(length.max())
    place = scores.topk(most, -1).indices
    real = torch.arange(most, device=place.device) < length.to(place.device).view(-1, 1, 1)
    # In the order of the sequence, what is too much at the end.
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
