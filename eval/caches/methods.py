"""Published methods that drop keys: a class each that scores them, and how many each head keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.caches import CacheView, Kept
from mame_sd.caches.scores import Scores
from mame_sd.caches.view import wide

from . import values

BUDGETS = ("head", "layer", "model")
EVICTED = ("drop", "d2o", "cam")
SINKS, RECENT, FLOOR = 4, 32, 0.2
OBSERVED = 256  # newest queries whose attention weighs keys of CaM


@dataclass(frozen=True)
class Published:
    """Keeps the keys of the highest scores.

    Attributes:
        method: scores the keys.
        budget: what has a budget of keys, which its heads share by their scores. "head": each head
            keeps as many. "layer": heads of a layer share (AdaKV, arXiv 2407.11550). "model": all
            heads of all layers share (KVzip, arXiv 2505.23416). Heads of a layer are padded to its
            largest.
        evicted: what becomes of the other keys. "drop": nothing. "d2o": their values join the most
            similar key that stays (kvpress' MergingPress, D2O, arXiv 2406.13035). "cam": values are
            dealt to the next tokens that stay (CaM, ICML 2024).
    """

    method: Scores
    budget: str = "head"
    evicted: str = "drop"

    def __post_init__(self) -> None:
        for name, known in (("evicted", EVICTED), ("budget", BUDGETS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}"
                )

    def compress_all(self, views: Sequence[CacheView], keep: float) -> list[Kept]:
        """Every layer's shorter cache."""
        scores = [self.method.score(view).float() for view in views]
        if self.budget != "model":
            pairs = zip(views, scores, strict=True)
            return [self._finish(v, chosen(s, cut_of(v), keep, self.budget)) for v, s in pairs]
        lengths = [s.shape[2] for s in scores]
        padded = torch.cat([F.pad(s, (0, max(lengths) - s.shape[2])) for s in scores], 1)
        stays = chosen(padded, _joined(views), keep, self.budget)
        parts = stays.split([s.shape[1] for s in scores], 1)
        return [self._finish(v, s[..., :n]) for v, s, n in zip(views, parts, lengths, strict=True)]

    def _finish(self, view: CacheView, stays: Tensor) -> Kept:
        kept, place = gathered(view, stays)
        if self.evicted == "d2o":
            return values.by_similarity(view, kept, place, stays)
        if self.evicted == "cam":
            mass = received(view, OBSERVED).sum(2)
            return values.to_neighbours(view, kept, place, stays, mass)
        return kept


class Cut(NamedTuple):
    """What `chosen` reads of a view."""

    ranks: Tensor  # [B, h, L]
    real: Tensor  # bool [B, h, L]
    counts: Tensor  # [B]


def cut_of(view: CacheView) -> Cut:
    """One layer."""
    return Cut(view.ranks(), view.real_keys, view.counts())


def _joined(views: Sequence[CacheView]) -> Cut:
    """The heads of all layers side by side; shorter ones are filled with keys that aren't real."""
    most = max(v.slots.shape[2] for v in views)

    def filled(t: Tensor) -> Tensor:
        return F.pad(t, (0, most - t.shape[2]))

    cuts = [cut_of(v) for v in views]
    ranks = torch.cat([filled(cut.ranks) for cut in cuts], 1)
    return Cut(ranks, torch.cat([filled(cut.real) for cut in cuts], 1), cuts[0].counts)


def keys_of(view: CacheView | Cut, keep: float) -> Tensor:
    """LongTensor [B]: keys that a head keeps on average, at least 1."""
    counts = view.counts if isinstance(view, Cut) else view.counts()
    return (counts * keep).round().long().clamp(min=1)


def chosen(scores: Tensor, cut: Cut, keep: float, budget: str) -> Tensor:
    """Which keys stay, bool [B, h, L]. The first `SINKS` and newest `RECENT` tokens always do, of a
    small budget at most a quarter and a half.
    """
    count = keys_of(cut, keep).view(-1, 1, 1)
    scores = torch.nan_to_num(scores, nan=torch.finfo(torch.float32).min)
    first = cut.ranks < (count // 4).clamp(max=SINKS)
    last = cut.ranks >= cut.counts.view(-1, 1, 1) - (count // 2).clamp(max=RECENT)
    scores = scores.masked_fill(first | last, torch.inf).masked_fill(~cut.real, -torch.inf)
    rank = _ranks(scores)
    if budget == "head":
        return (rank < count) & cut.real
    always = ((first | last) & cut.real).sum(-1, keepdim=True)
    least = torch.maximum((count * FLOOR).long(), always)
    scores = scores.masked_fill((rank < least) & cut.real, torch.inf)
    b, h, n = scores.shape
    return (_ranks(scores.flatten(1)).view(b, h, n) < count * h) & cut.real


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
class EveryKth:
    """Keys at even distances: what a method must beat that looks at nothing."""

    def score(self, view: CacheView) -> Tensor:
        """The token's number with its bits reversed, so that the highest n of them lie evenly."""
        slots, bits = view.slots, max(1, view.seen).bit_length()
        flipped = torch.zeros_like(slots)
        for bit in range(bits):
            flipped |= ((slots >> bit) & 1) << (bits - 1 - bit)
        return -flipped.float()


@dataclass(frozen=True)
class StreamingLLM:
    """The newest keys; the first ones stay as sinks (arXiv 2309.17453)."""

    def score(self, view: CacheView) -> Tensor:
        """The token's number."""
        return view.slots.float()


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


@dataclass(frozen=True)
class KeyDiff:
    """Keys least like the mean key (arXiv 2504.15364)."""

    def score(self, view: CacheView) -> Tensor:
        """Minus the cosine of each key and the mean of the normalised keys."""
        keys = view.keys.to(wide(view.keys))
        real = view.real_keys.unsqueeze(-1).to(keys.dtype)
        anchor = (F.normalize(keys, dim=-1) * real).sum(2, keepdim=True)
        anchor = anchor / real.sum(2, keepdim=True).clamp(min=1)
        return -F.cosine_similarity(keys, anchor, dim=-1)


@dataclass(frozen=True)
class ChunkKV:
    """Whole chunks of neighbouring tokens, by the sum of another method's scores (arXiv
    2502.00299).

    Attributes:
        of: the method that scores tokens.
        length: tokens of a chunk.
    """

    of: Scores = SnapKV()
    length: int = 20

    def score(self, view: CacheView) -> Tensor:
        """Each token has its chunk's mean over tokens and heads; earlier tokens first within a
        chunk.
        """
        scores = self.of.score(view).mean(1, keepdim=True)
        length = scores.shape[-1]
        chunk = torch.arange(length, device=scores.device) // self.length
        sums = scores.new_zeros(*scores.shape[:2], int(chunk[-1]) + 1).index_add_(2, chunk, scores)
        mean = (sums / chunk.bincount()).index_select(2, chunk)
        within = torch.arange(length, device=scores.device) % self.length
        tiny = 1e-6 * mean.abs().amax(-1, keepdim=True) / self.length
        return (mean - within * tiny).expand(view.slots.shape)
