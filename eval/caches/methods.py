"""List the measured methods: published ones that drop keys, and our own.

Each published one is a function that scores keys. They take one sample without padding, as the
command measures them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.caches import CacheView, Kept, Selection
from mame_sd.caches import selection as ours
from mame_sd.caches.view import wide

SINKS, RECENT, FLOOR = 4, 32, 0.2
WINDOW, KERNEL = 64, 5  # of SnapKV: queries that are read, and tokens that the smoothing spans
AHEAD = 512  # of expected attention: positions to come over which the rotation is averaged


@dataclass
class Published:
    """Keep the first, the newest and the highest-scoring keys, equally many in each head.

    Attributes:
        score: returns a number for each key of a layer, [1, h, L]; the highest ones stay.
    """

    score: Callable[[CacheView], Tensor]
    _views: Sequence[CacheView] = ()
    _scores: Sequence[Tensor] = ()

    def compress_all(self, views: Sequence[CacheView], keep: float) -> list[Kept]:
        """Return every layer's shorter cache. A prompt is scored once for all shares."""
        if views is not self._views:
            self._views, self._scores = views, [score.float() for score in self.scores(views)]
        count = keys_of(views[0], keep)
        pairs = zip(views, self._scores, strict=True)
        stays = self.stays(
            torch.cat([_marked(view, scores, count) for view, scores in pairs], 1), count
        )
        parts = stays.split([view.keys.shape[1] for view in views], 1)
        return [gathered(view, part) for view, part in zip(views, parts, strict=True)]

    def scores(self, views: Sequence[CacheView]) -> list[Tensor]:
        """Return the scores of every layer."""
        return [self.score(view) for view in views]

    def stays(self, scores: Tensor, count: int) -> Tensor:
        """Return the keys that stay, bool, by scores [1, heads of all layers, L]."""
        return _ranks(scores) < count


class KVzip(Published):
    """KVzip (arXiv 2505.23416): the largest attention to a key while the prompt is repeated.

    All heads of all layers share a budget of keys. Each keeps at least `FLOOR` of its part, and the
    heads of a layer are padded to its largest.

    Attributes:
        repeated: returns the scores of every layer from a second forward; `measure` sets it.
    """

    repeated: Callable[[Sequence[CacheView]], list[Tensor]]

    def __init__(self) -> None:
        super().__init__(lambda view: view.slots)

    def scores(self, views: Sequence[CacheView]) -> list[Tensor]:
        """Return the scores of every layer."""
        return self.repeated(views)

    def stays(self, scores: Tensor, count: int) -> Tensor:
        """Return the keys that stay, bool, by scores [1, heads of all layers, L]."""
        always = scores.isposinf().sum(-1, keepdim=True).clamp(min=int(count * FLOOR))
        scores = scores.masked_fill(_ranks(scores) < always, torch.inf)
        return _ranks(scores.flatten(1)).view_as(scores) < count * scores.shape[1]


@dataclass(frozen=True)
class Ours:
    """Compress all layers as `compress_cache` does; without `fit`, dropped keys are lost."""

    fit: bool = True

    def compress_all(self, views: Sequence[CacheView], keep: float) -> list[Kept]:
        """Return every layer's shorter cache."""
        selection = Selection()
        scored = [selection.score_layer(view, keep) for view in views]
        parts = zip(views, scored, selection.lengths(views, scored, keep), strict=True)
        if self.fit:
            return [selection.shorten(*part) for part in parts]
        return [ours.gather_keys(view, layer.scores, length)[0] for view, layer, length in parts]


def keys_of(view: CacheView, keep: float) -> int:
    """Return the number of keys that a head keeps on average, at least 1."""
    return max(1, round(view.seen * keep))


def _marked(view: CacheView, scores: Tensor, count: int) -> Tensor:
    """Set the scores [1, h, L] of the first `SINKS` and newest `RECENT` tokens to infinity.

    If the budget is small, they take at most a quarter and a half of it.
    """
    scores = torch.nan_to_num(scores, nan=torch.finfo(torch.float32).min)
    first, last = min(SINKS, count // 4), min(RECENT, count // 2)
    always = (view.slots < first) | (view.slots >= view.seen - last)
    return scores.masked_fill(always, torch.inf)


def _ranks(scores: Tensor) -> Tensor:
    """Rank the last dimension: 0 for the highest score, ties in order."""
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)


def gathered(view: CacheView, stays: Tensor) -> Kept:
    """Gather the keys that stay, bool [1, h, L], padded to the head that keeps most."""
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
    """Sum the attention that each key received from the newest `count` queries.

    If `count` is None, from all queries. Returns [1, h, G, L].
    """
    queries, slots = view.newest_queries(count)
    parts = [
        view.attention(queries[:, :, at], slots[at]).sum(3, dtype=wide(view.keys))
        for at in view.blocks(queries)
    ]
    return torch.stack(parts).sum(0)


def at_random(view: CacheView) -> Tensor:
    """Return uniform random scores, different in each layer."""
    generator = torch.Generator().manual_seed(view.layer)
    return torch.rand(view.slots.shape, generator=generator).to(view.keys.device)


def snapkv(view: CacheView) -> Tensor:
    """Score keys by the mean attention of the newest queries, smoothed over neighbours.

    SnapKV (arXiv 2404.14469), the mean over grouped heads. The keys of these queries themselves
    score above all others.
    """
    n = min(WINDOW, view.hidden_states.shape[1], max(1, view.keys.shape[2] - 1))
    weights = (received(view, n) / n)[..., :-n]
    smooth = F.avg_pool1d(weights.flatten(0, 2)[None], KERNEL, 1, KERNEL // 2)
    scores = smooth[0, :, : weights.shape[-1]].view_as(weights).mean(2)
    return F.pad(scores, (0, n), value=float(scores.max()) + 1)


def h2o(view: CacheView) -> Tensor:
    """Score keys by all attention that they received, summed over grouped heads.

    H2O (arXiv 2306.14048).
    """
    return received(view).sum(2)


def expected_attention(view: CacheView) -> Tensor:
    """Score keys by the attention that future queries are expected to pay.

    Expected attention (arXiv 2510.00636), from the mean and covariance of the prompt's queries:
    softmax(k . mean + k cov k / 2), averaged over grouped heads, times the norm of the value. The
    first `SINKS` tokens are excluded from the statistics and stay.
    """
    dtype = wide(view.keys)
    plain = view.project(view.hidden_states).to(dtype)  # [1, H, N, D]
    plain = plain[:, :, max(0, SINKS - (view.seen - plain.shape[2])) :]
    mean = plain.mean(2, keepdim=True)
    centred = plain - mean
    covariance = centred.transpose(-1, -2) @ centred / plain.shape[2]
    k = view.keys.to(dtype).unsqueeze(2)
    b, h, _, _, d = k.shape
    # the mean [1, 1, D, D] of the rotations to the next positions, of row vectors
    positions = view.next.unsqueeze(1) + torch.arange(AHEAD, device=k.device)
    units = torch.eye(d, dtype=dtype, device=k.device)
    turned = [view.rotate(unit.expand(1, 1, AHEAD, d), positions).mean(2) for unit in units]
    rotation = torch.stack(turned, 2).to(dtype)
    mean, covariance = mean @ rotation, rotation.transpose(-1, -2) @ covariance @ rotation
    logits = (k @ mean.view(b, h, -1, d, 1)).squeeze(-1) * view.scale
    spread = ((k @ covariance.view(b, h, -1, d, d)) * k).sum(-1)
    sink = view.slots < SINKS
    logits = (logits + spread * view.scale**2 / 2).masked_fill(sink.unsqueeze(2), -torch.inf)
    scores = logits.softmax(-1).nan_to_num().mean(2) * view.values.to(dtype).norm(dim=-1)
    return scores.masked_fill(sink, float(scores.max()) + 1)
