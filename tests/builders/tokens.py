"""Tokens to merge."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.detail import Detail


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Correlated tokens: a few directions and noise, so that some pairs are similar and some are
    not.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, shape[-1], generator=generator)
    pick = torch.randint(0, 4, shape[:-1], generator=generator)
    return (centres[pick] + 0.7 * torch.randn(*shape, generator=generator)).to(dtype)


def detail_of(
    x: Tensor, config: MaMeConfig, size: tuple[int, int] | None = None, special: int = 0
) -> Detail | None:
    """What a layer that planned by tokens x [B, L, d] restores with; None where the settings
    restore copies.
    """
    if not config.detail:
        return None
    side = math.isqrt(x.shape[1] - special)
    return Detail(x[:, special:], size or (side, side))
