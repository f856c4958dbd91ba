"""Methods that score keys, one class each: the highest scores stay.

A method of your own needs `score` alone.

    class Newest:
        def score(self, keys, values, queries, view):
            return view.slots.float()            # [B, h, L], one number for each key

    with merge_cache(model, keep=0.5, method=Newest()): ...

`window`, where a class has it, is how many of the newest queries it reads; without it, it gets all
of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.caches.view import CacheView


class Scores(Protocol):
    """A number for each key."""

    def score(self, keys: Tensor, values: Tensor, queries: Tensor, view: CacheView) -> Tensor:
        """[B, h, L] of keys and values [B, h, L, D] and the newest queries [B, H, Q, D]; `view`
        holds the rest.
        """


@dataclass(frozen=True)
class Random:
    """Keys at random."""

    seed: int = 0
    window = 1

    def score(self, keys: Tensor, values: Tensor, queries: Tensor, view: CacheView) -> Tensor:
        """Uniform numbers, other ones in each layer."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + view.layer)
        return torch.rand(keys.shape[:3], generator=generator).to(keys.device)


@dataclass(frozen=True)
class EveryKth:
    """Keys at even distances: what a method must beat that looks at nothing."""

    window = 1

    def score(self, keys: Tensor, values: Tensor, queries: Tensor, view: CacheView) -> Tensor:
        """The token's number with its bits reversed, so that the highest n of them lie evenly."""
        slots, bits = view.slots, max(1, view.seen).bit_length()
        flipped = torch.zeros_like(slots)
        for bit in range(bits):
            flipped |= ((slots >> bit) & 1) << (bits - 1 - bit)
        return -flipped.float()


@dataclass(frozen=True)
class StreamingLLM:
    """The newest keys; the first ones stay as sinks (arXiv 2309.17453)."""

    window = 1

    def score(self, keys: Tensor, values: Tensor, queries: Tensor, view: CacheView) -> Tensor:
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

    def score(self, keys: Tensor, values: Tensor, queries: Tensor, view: CacheView) -> Tensor:
        """Mean attention over queries and grouped heads; the window's own keys score above all
        others.
        """
        n = min(self.window, queries.shape[2], max(1, keys.shape[2] - 1))
        received = (view.received(n) / n)[..., :-n]
        b, h, g, left = received.shape
        smooth = F.avg_pool1d(received.reshape(b, h * g, left), self.kernel, 1, self.kernel // 2)[
            ..., :left
        ]
        scores = smooth.view(b, h, g, left).mean(2)
        return F.pad(scores, (0, n), value=float(scores.max()) + 1)


@dataclass(frozen=True)
class H2O:
    """All attention that a key has received since it came (arXiv 2306.14048)."""

    def score(self, keys: Tensor, values: Tensor, queries: Tensor, view: CacheView) -> Tensor:
        """The sum over all queries at hand and grouped heads."""
        return view.received().sum(2)


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

    def score(self, keys: Tensor, values: Tensor, queries: Tensor, view: CacheView) -> Tensor:
        """softmax(k . mean + k cov k / 2), averaged over grouped heads, times the norm of the
        value.
        """
        wide = torch.promote_types(keys.dtype, torch.float32)
        plain = view.plain_queries.to(wide)
        real = (view.query_slots >= view.pads.unsqueeze(1) + self.sinks).to(wide)[:, None, :, None]
        count = real.sum(2, keepdim=True).clamp(min=1)
        mean = (plain * real).sum(2, keepdim=True) / count
        centred = (plain - mean) * real
        covariance = centred.transpose(-1, -2) @ centred / count
        rotation = self._rotation(view, plain)  # [B, D, D], of row vectors
        mean, covariance = mean @ rotation, rotation.transpose(-1, -2) @ covariance @ rotation
        k = keys.to(wide).unsqueeze(2)
        b, h, _, _, d = k.shape
        scale = view.scale
        logits = (k @ mean.view(b, h, -1, d, 1)).squeeze(-1) * scale
        logits = logits + ((k @ covariance.view(b, h, -1, d, d)) * k).sum(-1) * scale**2 / 2
        sink = view.slots < (view.pads + self.sinks).view(-1, 1, 1)
        skip = sink | ~view.real_keys
        scores = logits.masked_fill(skip.unsqueeze(2), -torch.inf).softmax(-1).nan_to_num().mean(2)
        scores = scores * values.to(wide).norm(dim=-1)
        return scores.masked_fill(sink, float(scores.max()) + 1)

    def _rotation(self, view: CacheView, like: Tensor) -> Tensor:
        """The mean [B, 1, D, D] of the rotations to the next positions."""
        d, b = like.shape[-1], like.shape[0]
        positions = view.counts().unsqueeze(1) + torch.arange(self.ahead, device=like.device)
        unit = torch.eye(d, dtype=like.dtype, device=like.device)
        rows = [
            view.rotate(unit[i].expand(b, 1, self.ahead, d), positions).mean(2, keepdim=True)
            for i in range(d)
        ]
        return torch.cat(rows, 2).to(like.dtype)


@dataclass(frozen=True)
class KeyDiff:
    """Keys least like the mean key (arXiv 2504.15364)."""

    window = 1

    def score(self, keys: Tensor, values: Tensor, queries: Tensor, view: CacheView) -> Tensor:
        """Minus the cosine of each key and the mean of the normalised keys."""
        wide = torch.promote_types(keys.dtype, torch.float32)
        unit = F.normalize(keys.to(wide), dim=-1)
        real = view.real_keys.unsqueeze(-1).to(wide)
        anchor = (unit * real).sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp(min=1)
        return -F.cosine_similarity(keys.to(wide), anchor, dim=-1)


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

    @property
    def window(self) -> int | None:
        """Newest queries that are read."""
        return getattr(self.of, "window", None)

    def score(self, keys: Tensor, values: Tensor, queries: Tensor, view: CacheView) -> Tensor:
        """Each token has its chunk's mean over tokens and heads; earlier tokens first within a
        chunk.
        """
        scores = self.of.score(keys, values, queries, view).mean(1, keepdim=True)
        length = scores.shape[-1]
        chunk = torch.arange(length, device=scores.device) // self.length
        sums = scores.new_zeros(*scores.shape[:2], int(chunk[-1]) + 1).index_add_(2, chunk, scores)
        mean = (sums / chunk.bincount()).index_select(2, chunk)
        within = torch.arange(length, device=scores.device) % self.length
        tiny = 1e-6 * mean.abs().amax(-1, keepdim=True) / self.length
        return (mean - within * tiny).expand(keys.shape[:3])


@dataclass(frozen=True)
class FutureAttention:
    """Attention of the prompt's own queries, moved to positions to come, as a root mean square,
    times the value's norm.

    Attributes:
        count: how many of the queries at hand are moved, evenly spaced.
        ahead: positions to come over which they are spread.
    """

    count: int = 1024
    ahead: int = 128

    def score(self, keys: Tensor, values: Tensor, queries: Tensor, view: CacheView) -> Tensor:
        """sqrt(mean of attention squared over queries and grouped heads) |v|."""
        moved, real = view.to_come(self.count, self.ahead)
        all_real = bool(real.all())
        power = torch.zeros(keys.shape[:3], device=keys.device)
        for i in range(0, moved.shape[2], view.block):
            at = slice(i, i + view.block)
            block = view.attention(moved[:, :, at]).square_()
            if not all_real:
                block = block * real[:, None, None, at, None]
            power = power + block.sum((2, 3))
        count = real.sum(1).view(-1, 1, 1).clamp(min=1) * view.groups
        return (power / count).sqrt() * values.to(power.dtype).norm(dim=-1)
