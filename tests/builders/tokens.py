"""Tokens to merge."""

from __future__ import annotations

import torch
from torch import Tensor


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Correlated tokens: a few directions and noise, so that some pairs are similar and some are
    not.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, shape[-1], generator=generator)
    pick = torch.randint(0, 4, shape[:-1], generator=generator)
    return (centres[pick] + 0.7 * torch.randn(*shape, generator=generator)).to(dtype)
