"""From scores to a shorter cache: which keys stay in which head, and what becomes of those that
don't.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.caches import values
from mame_sd.caches.fit import with_fitted_values
from mame_sd.caches.kept import Kept
from mame_sd.caches.scores import Scores
from mame_sd.caches.view import CacheView

SHARES = ("none", "heads", "layers", "all")
DROPPED = ("drop", "fit", "nearest", "d2o", "cam")
# Newest queries that each of them reads; None: all.
NEEDED = {"drop": 1, "fit": None, "nearest": values.OBSERVED, "d2o": 1, "cam": values.OBSERVED}


@dataclass(frozen=True)
class Selection:
    """Keeps the keys of the highest scores.

    Attributes:
        method: scores the keys.
        share: what shares a budget by its scores. "none": each head keeps as many. "heads": those
            of a layer share (AdaKV, arXiv 2407.11550). "layers": the layers share, and the heads of
            one keep equally many. "all": all heads of all layers share. Heads of a layer that keep
            different numbers are padded to its largest. None keeps less than `floor` of an equal
            share.
        dropped: what becomes of the other keys. "drop": nothing. "fit": values of those that stay,
            and a bias for each, by least squares, so that attention gives what it gave (Attention
            Matching, arXiv 2602.16284). "nearest": each joins the most similar one that stays,
            weighed by the attention it received. "d2o": the same, weighed by similarity and norm
            (kvpress' MergingPress, D2O, arXiv 2406.13035). "cam": values are dealt to the next
            tokens that stay (CaM, ICML 2024).
        sinks: first tokens that stay in every head.
        recent: newest tokens that stay in every head.
        floor: see `share`.
    """

    method: Scores
    share: str = "none"
    dropped: str = "drop"
    sinks: int = 4
    recent: int = 32
    floor: float = 0.2

    def __post_init__(self) -> None:
        if not callable(getattr(self.method, "score", None)):
            raise TypeError(
                "method: expected an object with score(keys, values, queries, view), got"
                f" {type(self.method).__name__}"
            )
        for name, known in (("dropped", DROPPED), ("share", SHARES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}"
                )

    @property
    def window(self) -> int | None:
        """Newest queries that are needed; None: all."""
        own, needed = getattr(self.method, "window", None), NEEDED[self.dropped]
        return None if own is None or needed is None else max(own, needed)

    @property
    def all_layers(self) -> bool:
        """Whether all layers are looked at before any is compressed."""
        return self.share in ("layers", "all")

    def compress(self, view: CacheView, keep: float) -> Kept:
        """The cache that is left of `view` at a share `keep` of the tokens seen."""
        return self.compress_all([view], keep)[0]

    def compress_all(self, views: Sequence[CacheView], keep: float) -> list[Kept]:
        """The same of all layers, which share a budget."""
        scores = [self._scores(view) for view in views]
        lengths = [s.shape[2] for s in scores]
        if not self.all_layers:
            return [
                self.finish(v, chosen(s, v, keep, self)) for v, s in zip(views, scores, strict=True)
            ]
        padded = torch.cat([F.pad(s.float(), (0, max(lengths) - s.shape[2])) for s in scores], 1)
        stays = chosen(padded, joined(views), keep, self).split([s.shape[1] for s in scores], 1)
        if self.share == "layers":
            counts = [s.sum((1, 2)) // s.shape[1] for s in stays]
            return [
                self.finish(v, chosen(s, v, keep, replace(self, share="none"), c))
                for v, s, c in zip(views, scores, counts, strict=True)
            ]
        return [self.finish(v, s[..., :n]) for v, s, n in zip(views, stays, lengths, strict=True)]

    def _scores(self, view: CacheView) -> Tensor:
        scores = self.method.score(view.keys, view.values, view.queries, view)
        if scores.shape != view.slots.shape:
            raise ValueError(
                f"{type(self.method).__name__}.score: expected a number for each key,"
                f" {list(view.slots.shape)}, got {list(scores.shape)}"
            )
        return scores

    def finish(self, view: CacheView, stays: Tensor) -> Kept:
        """The cache of the keys that stay, bool [B, h, L]."""
        kept, place = gathered(view, stays)
        if self.dropped == "fit":
            return with_fitted_values(view, kept, place)
        if self.dropped == "nearest":
            return values.nearest(view, kept, place, stays)
        if self.dropped == "d2o":
            return values.by_similarity(view, kept, place, stays)
        if self.dropped == "cam":
            return values.to_neighbours(view, kept, place, stays)
        return kept


class Cut(NamedTuple):
    """What `chosen` reads of a view."""

    slots: Tensor
    real_keys: Tensor
    pads: Tensor
    seen: int

    def counts(self) -> Tensor:
        """LongTensor [B]: tokens seen without padding."""
        return self.seen - self.pads


def joined(views: Sequence[CacheView]) -> Cut:
    """The heads of all layers side by side; shorter ones are filled with keys that aren't real."""
    most = max(v.slots.shape[2] for v in views)

    def filled(t: Tensor, value: int) -> Tensor:
        return F.pad(t, (0, most - t.shape[2]), value=value)

    slots = torch.cat([filled(v.slots, 0) for v in views], 1)
    return Cut(
        slots, torch.cat([filled(v.real_keys, 0) for v in views], 1), views[0].pads, views[0].seen
    )


def budget(view: CacheView | Cut, keep: float) -> Tensor:
    """LongTensor [B]: keys that a head keeps on average, at least 1."""
    return (view.counts() * keep).round().long().clamp(min=1)


def chosen(
    scores: Tensor, view: CacheView | Cut, keep: float, how: Selection, counts: Tensor | None = None
) -> Tensor:
    """Which keys stay, bool [B, h, L].

    Where the budget is small, sinks take at most a quarter of it and recent tokens a half.

    Args:
        scores: [B, h, L]; NaN ranks last.
        counts: LongTensor [B], keys that a head keeps on average; None: by `keep`.
    """
    real, count = view.real_keys, (budget(view, keep) if counts is None else counts).view(-1, 1, 1)
    scores = torch.nan_to_num(scores.float(), nan=torch.finfo(torch.float32).min)
    first = view.slots < view.pads.view(-1, 1, 1) + (count // 4).clamp(max=how.sinks)
    last = view.slots >= view.seen - (count // 2).clamp(max=how.recent)
    scores = scores.masked_fill(first | last, torch.inf).masked_fill(~real, -torch.inf)
    rank = _ranks(scores)
    if how.share == "none":
        return (rank < count) & real
    least = torch.maximum((count * how.floor).long(), ((first | last) & real).sum(-1, keepdim=True))
    scores = scores.masked_fill((rank < least) & real, torch.inf)
    b, h, n = scores.shape
    return (_ranks(scores.flatten(1)).view(b, h, n) < count * h) & real


def _ranks(scores: Tensor) -> Tensor:
    """0 for the highest of the last dimension, 1 for the next; the first where they are equal."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )


def gathered(view: CacheView, stays: Tensor) -> tuple[Kept, Tensor]:
    """The keys that stay, padded to the head that keeps most, and where each lies in `view` [B, h,
    K].
    """
    count = stays.sum(-1, keepdim=True)
    most = int(count.max())
    place = (~stays).to(torch.uint8).argsort(dim=-1, stable=True)[..., :most]
    real = torch.arange(most, device=place.device) < count
    index = place.unsqueeze(-1)
    kept = Kept(
        view.keys.gather(2, index.expand(-1, -1, -1, view.keys.shape[-1])),
        view.values.gather(2, index.expand(-1, -1, -1, view.values.shape[-1])),
        view.slots.gather(2, place),
        None if view.bias is None else view.bias.gather(2, place),
        None if bool(real.all()) else real,
    )
    return kept, place
