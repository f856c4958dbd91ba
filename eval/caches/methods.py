"""Published methods that drop keys: a class each that scores them, and which keys stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.caches import CacheView, Kept
from mame_sd.caches.scores import Scores
from mame_sd.caches.view import wide

SINKS, RECENT, FLOOR = 4, 32, 0.2


@dataclass
class Published:
    """Keeps the keys of the highest scores.

    Attributes:
        method: scores the keys.
        together: all heads of all layers share a budget of keys by their scores (KVzip, arXiv
            2505.23416), and heads of a layer are padded to its largest; else each keeps as many.
    """

    method: Scores
    together: bool = False
    _views: Sequence[CacheView] = ()
    _scores: Sequence[Tensor] = ()

    def compress_all(self, views: Sequence[CacheView], keep: float) -> list[Kept]:
        """Every layer's shorter cache. A prompt is scored once for all shares."""
        if views is not self._views:
            self._views, self._scores = views, [self.method.score(v).float() for v in views]
        pairs = zip(views, self._scores, strict=True)
        scores = [self._marked(view, found, keep) for view, found in pairs]
        if not self.together:
            counts = [keys_of(view, keep).view(-1, 1, 1) for view in views]
            stays = [_ranks(s) < count for s, count in zip(scores, counts, strict=True)]
        else:
            stays = _stay_together(views, scores, keep)
        kept = zip(views, stays, strict=True)
        return [gathered(view, stay & view.real_keys)[0] for view, stay in kept]

    def _marked(self, view: CacheView, scores: Tensor, keep: float) -> Tensor:
        """Scores [B, h, L] with infinity for the first `SINKS` and newest `RECENT` tokens, which
        always stay (of a small budget at most a quarter and a half), and minus infinity for
        padding.
        """
        count, ranks = keys_of(view, keep).view(-1, 1, 1), view.ranks()
        scores = torch.nan_to_num(scores, nan=torch.finfo(torch.float32).min)
        first = ranks < (count // 4).clamp(max=SINKS)
        last = ranks >= view.counts().view(-1, 1, 1) - (count // 2).clamp(max=RECENT)
        scores = scores.masked_fill(first | last, torch.inf)
        return scores.masked_fill(~view.real_keys, -torch.inf)


def _stay_together(
    views: Sequence[CacheView], scores: Sequence[Tensor], keep: float
) -> list[Tensor]:
    """Which keys of each layer stay, bool [B, h, L], where all heads of all layers share a budget;
    each keeps at least `FLOOR` of its part.
    """
    count = keys_of(views[0], keep).view(-1, 1, 1)
    most = max(s.shape[2] for s in scores)
    every = torch.cat([F.pad(s, (0, most - s.shape[2]), value=-torch.inf) for s in scores], 1)
    always = every.isposinf().sum(-1, keepdim=True)
    least = torch.maximum((count * FLOOR).long(), always)
    every = every.masked_fill((_ranks(every) < least) & ~every.isneginf(), torch.inf)
    b, h, n = every.shape
    stays = _ranks(every.flatten(1)).view(b, h, n) < count * h
    parts = stays.split([s.shape[1] for s in scores], 1)
    return [part[..., : s.shape[2]] for part, s in zip(parts, scores, strict=True)]


def keys_of(view: CacheView, keep: float) -> Tensor:
    """LongTensor [B]: keys that a head keeps on average, at least 1."""
    return (view.counts() * keep).round().long().clamp(min=1)


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
        None,
        None if bool(real.all()) else real,
    )
    return kept, place


def received(view: CacheView, count: int | None = None) -> Tensor:
    """Attention that each key received from the newest `count` queries (None: all), summed: [B, h,
    G, L].
    """
    queries, slots = view.newest(count)
    groups = queries.shape[1] // view.keys.shape[1]
    total = view.keys.new_zeros(
        *view.keys.shape[:2], groups, view.keys.shape[2], dtype=wide(view.keys)
    )
    for at in view.blocks(queries):
        total += view.attention(queries[:, :, at], slots[at]).sum(3)
    return total


@dataclass(frozen=True)
class Random:
    """Keys at random."""

    seed: int = 0

    def score(self, view: CacheView) -> Tensor:
        """Uniform numbers, other ones in each layer."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + view.layer)
        return torch.rand(view.slots.shape, generator=generator).to(view.keys.device)


@dataclass(frozen=True)
class SnapKV:
    """Attention of the newest queries, smoothed over neighbours (arXiv 2404.14469).

    Attributes:
        window: queries that are read; their own keys stay.
        kernel: tokens that the smoothing spans.
    """

    window: int = 64
    kernel: int = 5

    def score(self, view: CacheView) -> Tensor:
        """Mean attention over queries and grouped heads; the window's own keys score above all
        others.
        """
        n = min(self.window, view.hidden_states.shape[1], max(1, view.keys.shape[2] - 1))
        found = (received(view, n) / n)[..., :-n]
        b, h, g, left = found.shape
        smooth = F.avg_pool1d(found.reshape(b, h * g, left), self.kernel, 1, self.kernel // 2)
        scores = smooth[..., :left].view(b, h, g, left).mean(2)
        return F.pad(scores, (0, n), value=float(scores.max()) + 1)


@dataclass(frozen=True)
class H2O:
    """All attention that a key has received since it came (arXiv 2306.14048)."""

    def score(self, view: CacheView) -> Tensor:
        """The sum over all queries at hand and grouped heads."""
        return received(view).sum(2)


@dataclass(frozen=True)
class ExpectedAttention:
    """Attention that queries to come are expected to pay, from the mean and covariance of the
    prompt's (arXiv 2510.00636).

    Attributes:
        ahead: positions to come over which the rotation is averaged.
        sinks: first tokens, which are left out of the statistics and stay.
    """

    ahead: int = 512
    sinks: int = 4

    def score(self, view: CacheView) -> Tensor:
        """softmax(k . mean + k cov k / 2), averaged over grouped heads, times the norm of the
        value.
        """
        dtype = wide(view.keys)
        plain = view.project(view.hidden_states).to(dtype)
        tokens = view.real_tokens
        counted = (tokens & (tokens.long().cumsum(1) > self.sinks))[:, -plain.shape[2] :]
        real = counted.to(dtype)[:, None, :, None]
        count = real.sum(2, keepdim=True).clamp(min=1)
        mean = (plain * real).sum(2, keepdim=True) / count
        centred = (plain - mean) * real
        covariance = centred.transpose(-1, -2) @ centred / count
        rotation = self._rotation(view, plain)  # [B, D, D], of row vectors
        mean, covariance = mean @ rotation, rotation.transpose(-1, -2) @ covariance @ rotation
        k = view.keys.to(dtype).unsqueeze(2)
        b, h, _, _, d = k.shape
        logits = (k @ mean.view(b, h, -1, d, 1)).squeeze(-1) * view.scale
        spread = ((k @ covariance.view(b, h, -1, d, d)) * k).sum(-1)
        logits = logits + spread * view.scale**2 / 2
        sink = view.ranks() < self.sinks
        skip = (sink | ~view.real_keys).unsqueeze(2)
        scores = logits.masked_fill(skip, -torch.inf).softmax(-1).nan_to_num().mean(2)
        scores = scores * view.values.to(dtype).norm(dim=-1)
        return scores.masked_fill(sink, float(scores.max()) + 1)

    def _rotation(self, view: CacheView, like: Tensor) -> Tensor:
        """The mean [B, 1, D, D] of the rotations to the next positions."""
        d, b = like.shape[-1], like.shape[0]
        positions = view.next.unsqueeze(1) + torch.arange(self.ahead, device=like.device)
        unit = torch.eye(d, dtype=like.dtype, device=like.device)
        rows = [
            view.rotate(unit[i].expand(b, 1, self.ahead, d), positions).mean(2, keepdim=True)
            for i in range(d)
        ]
        return torch.cat(rows, 2).to(like.dtype)
