"""What averaging does with the keys that don't stay: their values join those of keys that do.

Each of these loses to dropping them in docs/kv-cache.md; they are here to be compared with.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.caches import CacheView, Kept

WINDOW = 32  # tokens that stay among which CaM deals out a value


def by_similarity(view: CacheView, kept: Kept, place: Tensor, stays: Tensor) -> Kept:
    """Each dropped key joins the most similar one that stays, weighed by similarity and
    |v| / (|v| + |v of the target|), as kvpress' MergingPress does.
    """
    target, similarity = _targets(view, kept, place)
    wide = view.values.float()
    norm = wide.norm(dim=-1)
    start = wide.gather(2, _wide(place, wide))
    gone = (~stays & view.real_keys).float()
    weight = similarity.clamp(min=0) * gone
    weight = weight * norm / (norm + norm.gather(2, place).gather(2, target) + 1e-6)
    total = torch.ones_like(start[..., 0]).scatter_add(2, target, weight)
    sums = start.scatter_add(2, _wide(target, wide), wide * weight.unsqueeze(-1))
    return replace(kept, values=(sums / total.unsqueeze(-1)).to(kept.values.dtype))


def to_neighbours(view: CacheView, kept: Kept, place: Tensor, stays: Tensor, mass: Tensor) -> Kept:
    """CaM's rule: a dropped value is dealt evenly to the next `WINDOW` keys that stay, or not, by a
    draw.

    The chance is the attention that it received (`mass`, [B, h, L]) over the mean of those that it
    is dealt to, 1 at most.
    """
    most = place.shape[2]
    count = stays.sum(-1, keepdim=True)
    start = torch.minimum(
        stays.long().cumsum(-1), count
    )  # of each key, the first kept one after it
    end = torch.minimum(start + WINDOW, count)
    size = (end - start).clamp(min=1)
    real = torch.arange(most, device=place.device) < count
    running = F.pad((mass.gather(2, place) * real).cumsum(-1), (1, 0))
    mean = (running.gather(2, end) - running.gather(2, start)) / size
    chance = (mass / mean.clamp(min=1e-12)).clamp(0, 1)
    generator = torch.Generator().manual_seed(view.layer)
    drawn = torch.rand(chance.shape, generator=generator).to(chance.device) < chance
    deals = (drawn & ~stays & view.real_keys & (end > start)).to(mass.dtype)
    part = view.values.to(mass.dtype) * (deals / size).unsqueeze(-1)
    steps = part.new_zeros(*part.shape[:2], most + 1, part.shape[3])
    steps = steps.scatter_add(2, _wide(start, part), part).scatter_add(2, _wide(end, part), -part)
    return replace(kept, values=kept.values + steps.cumsum(2)[:, :, :most].to(kept.values.dtype))


def _targets(view: CacheView, kept: Kept, place: Tensor) -> tuple[Tensor, Tensor]:
    """Of each key [B, h, L] the kept one of the largest cosine, and that cosine."""
    keys = F.normalize(view.keys.float(), dim=-1)
    similarity = keys @ keys.gather(2, _wide(place, keys)).transpose(-1, -2)
    if kept.real is not None:
        similarity = similarity.masked_fill(~kept.real.unsqueeze(2), -2)
    best, target = similarity.max(-1)
    return target, best


def _wide(index: Tensor, like: Tensor) -> Tensor:
    return index.unsqueeze(-1).expand(*index.shape, like.shape[-1])
