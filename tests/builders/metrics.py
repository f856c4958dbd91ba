"""Images, features and recorded figures that tests of metrics share."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ORACLES = Path(__file__).parents[1] / "oracles" / "eval.json"


@cache
def oracle(part: str) -> Any:
    """Return what other people's code said (tests/record_oracles.py of commit 350f706)."""
    return json.loads(ORACLES.read_text())[part]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(n: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Smooth noise in [0, 1], [n, 3, height, width]: more like pictures than white noise is."""
    coarse = torch.rand(n, 3, max(2, height // 8), max(2, width // 8), generator=generator(seed))
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)


def features(n: int, dims: int, seed: int, shift: float = 0.0) -> Tensor:
    mixing = torch.randn(dims, dims, generator=generator(7)) / dims**0.5
    return torch.randn(n, dims, generator=generator(seed)) @ mixing + shift


def noise(seed: int, size: tuple[int, int] = (24, 32)) -> np.ndarray:
    """Bytes [*size, 3] of white noise."""
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
