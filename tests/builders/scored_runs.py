"""Runs of given pixels, to be scored."""

from __future__ import annotations

import numpy as np


def noise(seed: int, size: tuple[int, int] = (24, 32)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
