"""Single attention modules, their tokens, and settings for tests of hooks and of the processor."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_processor import Attention

from tests.builders.tiny import seeded

CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "keep": {"keep": 0.4},
    "means": {"keep": 0.25, "fit_queries": 0},
    "one tile": {"keep": 0.5, "tile_size": 0},
    "tau": {"tau": 0.3},
}


def attention(**kwargs: Any) -> Attention:
    return seeded(Attention, 0, query_dim=16, heads=2, dim_head=8, **kwargs)


def tokens(batch: int = 2, length: int = 64, dim: int = 16) -> torch.Tensor:
    return torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(1))
