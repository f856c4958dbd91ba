"""Plan rivals that ignore the tokens: keys at fixed or random places, mean attention.

Each function takes tokens x [B, L, C], their `size` (h, w) and a function `draw` of random numbers
(no index, as in `mame_sd.core`). It returns a plan, whose `merge` turns [B, L, C] into [B, L', C].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Size = tuple[int, int]
Draw = Callable[[int, torch.device], Tensor]  # so many uniform numbers of [0, 1) on a device


class RivalPlan:
    """Keep only the tokens of x [B, L, C] at the places `kept` [L']."""

    def __init__(self, x: Tensor, kept: Tensor) -> None:
        self.tokens_in, self.tokens_kept, self.kept = x.shape[1], len(kept), kept

    def merge(self, t: Tensor) -> Tensor:
        """Merge tokens [B, L, C] to [B, L', C]."""
        return t.index_select(1, self.kept)


class MeanAttention(RivalPlan):
    """Keep all tokens, and give each of them the mean of their outputs."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x, torch.arange(x.shape[1], device=x.device))

    def restore(self, y: Tensor) -> Tensor:
        """Replace all outputs [B, L, C] by their mean."""
        return y.mean(1, keepdim=True).expand_as(y)


def todo(x: Tensor, size: Size, draw: Draw, factor: int) -> RivalPlan:
    """Downsample keys and values by nearest neighbours, as ToDo (arXiv 2402.13573).

    It equals torch.nn.functional.interpolate to h // factor x w // factor with mode "nearest".
    """
    rows, columns = (
        torch.arange(max(n // factor, 1), device=x.device) * n // max(n // factor, 1) for n in size
    )
    return RivalPlan(x, (rows.unsqueeze(1) * size[1] + columns).flatten())


def second_frames(x: Tensor, size: tuple[int, int, int], draw: Draw) -> RivalPlan:
    """Keep the tokens of the first, third, fifth frame and so on; `size` is that of a video."""
    places = torch.arange(x.shape[1], device=x.device).view(size)
    return RivalPlan(x, places[::2].flatten())


def random_keys(x: Tensor, size: Size, draw: Draw, share: float) -> RivalPlan:
    """Keep a random `share` of all tokens, drawn anew at each call."""
    scores = draw(x.shape[1], x.device)
    return RivalPlan(x, scores.topk(max(1, round(share * x.shape[1]))).indices)


def mean_attention(x: Tensor, size: Size, draw: Draw) -> RivalPlan:
    """Give every token the mean output, a change that a useful benchmark must detect."""
    return MeanAttention(x)
