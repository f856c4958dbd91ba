"""Scores of keys: the highest ones stay.

Scores of your own need one function:

    class Newest:
        def score(self, view):
            return view.slots.float()            # [B, h, L], one number for each key

    with compress_cache(model, keep=0.5, method=Newest()): ...
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mame_sd.caches.view import CacheView


class Scores(Protocol):
    """Scores keys."""

    def score(self, view: CacheView) -> Tensor:
        """Return a number for each key of one layer, [B, h, L]; the highest stay."""


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
