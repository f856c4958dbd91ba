"""Published methods that drop keys: a class each that scores them, and which keys stay.

They take one sample without padding, as the command measures them.
"""

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
    """Keeps the keys of the highest scores, and the first and newest ones.

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
        count = keys_of(views[0], keep)
        pairs = zip(views, self._scores, strict=True)
        scores = torch.cat([_marked(view, found, count) for view, found in pairs], 1)
        stays = _ranks(scores) < count
        if self.together:  # each keeps at least `FLOOR` of its part
            always = scores.isposinf().sum(-1, keepdim=True).clamp(min=int(count * FLOOR))
            scores = scores.masked_fill(_ranks(scores) < always, torch.inf)
            stays = _ranks(scores.flatten(1)).view_as(scores) < count * scores.shape[1]
        parts = stays.split([view.keys.shape[1] for view in views], 1)
        return [gathered(view, part) for view, part in zip(views, parts, strict=True)]


def keys_of(view: CacheView, keep: float) -> int:
    """Keys that a head keeps on average, at least 1."""
    return max(1, round(view.seen * keep))


def _marked(view: CacheView, scores: Tensor, count: int) -> Tensor:
    """Scores [1, h, L] with infinity for the first `SINKS` and newest `RECENT` tokens, which always
    stay (of a small budget at most a quarter and a half).
    """
    scores = torch.nan_to_num(scores, nan=torch.finfo(torch.float32).min)
    first, last = min(SINKS, count // 4), min(RECENT, count // 2)
    always = (view.slots < first) | (view.slots >= view.seen - last)
    return scores.masked_fill(always, torch.inf)


def _ranks(scores: Tensor) -> Tensor:
    """0 for the highest of the last dimension, 1 for the next; the first where they are equal."""
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)


def gathered(view: CacheView, stays: Tensor) -> Kept:
    """The keys that stay, bool [1, h, L], padded to the head that keeps most."""
    count = stays.sum(-1, keepdim=True)
    most = int(count.max())
    place = (~stays).to(torch.uint8).argsort(dim=-1, stable=True)[..., :most]
    real = torch.arange(most, device=place.device) < count
    index = place.unsqueeze(-1)
    return Kept(
        view.keys.gather(2, index.expand(-1, -1, -1, view.keys.shape[-1])),
        view.values.gather(2, index.expand(-1, -1, -1, view.values.shape[-1])),
        view.slots.gather(2, place),
        None,
        None if bool(real.all()) else real,
    )


def received(view: CacheView, count: int | None = None) -> Tensor:
    """Attention that each key received from the newest `count` queries (None: all), summed: [1, h,
    G, L].
    """
    queries, slots = view.newest(count)
    parts = [
        view.attention(queries[:, :, at], slots[at]).sum(3, dtype=wide(view.keys))
        for at in view.blocks(queries)
    ]
    return torch.stack(parts).sum(0)


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
        smooth = F.avg_pool1d(found.flatten(0, 2)[None], self.kernel, 1, self.kernel // 2)
        scores = smooth[0, :, : found.shape[-1]].view_as(found).mean(2)
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
        plain = view.project(view.hidden_states).to(dtype)  # [1, H, N, D]
        plain = plain[:, :, max(0, self.sinks - (view.seen - plain.shape[2])) :]
        mean = plain.mean(2, keepdim=True)
        centred = plain - mean
        covariance = centred.transpose(-1, -2) @ centred / plain.shape[2]
        rotation = self._rotation(view, plain)  # [1, 1, D, D], of row vectors
        mean, covariance = mean @ rotation, rotation.transpose(-1, -2) @ covariance @ rotation
        k = view.keys.to(dtype).unsqueeze(2)
        b, h, _, _, d = k.shape
        logits = (k @ mean.view(b, h, -1, d, 1)).squeeze(-1) * view.scale
        spread = ((k @ covariance.view(b, h, -1, d, d)) * k).sum(-1)
        sink = view.slots < self.sinks
        logits = (logits + spread * view.scale**2 / 2).masked_fill(sink.unsqueeze(2), -torch.inf)
        scores = logits.softmax(-1).nan_to_num().mean(2) * view.values.to(dtype).norm(dim=-1)
        return scores.masked_fill(sink, float(scores.max()) + 1)

    def _rotation(self, view: CacheView, like: Tensor) -> Tensor:
        """The mean [1, 1, D, D] of the rotations to the next positions."""
        d = like.shape[-1]
        positions = view.next.unsqueeze(1) + torch.arange(self.ahead, device=like.device)
        unit = torch.eye(d, dtype=like.dtype, device=like.device)
        rows = [
            view.rotate(one.expand(1, 1, self.ahead, d), positions).mean(2, keepdim=True)
            for one in unit
        ]
        return torch.cat(rows, 2).to(like.dtype)
