"""Scores of keys: the highest ones stay.

Scores of your own need one function:

    class Newest:
        def score(self, view):
            return view.slots.float()            # [B, h, L], one number for each key

    with compress_cache(model, keep=0.5, method=Newest()): ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mame_sd.caches.view import CacheView


class Scores(Protocol):
    """Scores keys."""

    def score(self, view: CacheView) -> Tensor:
        """Return a number for each key of one layer, [B, h, L]; the highest stay."""


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

    def __post_init__(self) -> None:
        for name in ("count", "ahead"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise ValueError(f"{name}: expected a number from 1 to 2^31 - 1, got {value!r}")

    def score(self, view: CacheView) -> Tensor:
        """Return sqrt(mean of attention squared over queries and grouped heads) |v|, [B, h, L]."""
        return self.of(view, *view.to_come(self.count, self.ahead))

    def of(self, view: CacheView, moved: Tensor, counted: Tensor) -> Tensor:
        """Score keys by moved queries [B, H, N, D], of which those count that bool [B, N] says."""
        power = torch.zeros(view.slots.shape, device=moved.device)
        weigh = not bool(counted.all())
        for at in view.blocks(moved):
            found = view.attention(moved[:, :, at]).square_()
            if weigh:
                found = found * counted[:, None, None, at, None]
            power += found.sum((2, 3))
        return power.sqrt_() * view.values.to(power.dtype).norm(dim=-1)
