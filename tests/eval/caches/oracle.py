"""Float64 loops that the paper's causal merging of caches is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.oracle import TokenPlan, settled_column, similarity


def causal_weights(x: Tensor, tau: float) -> Tensor:
    """Compute W^F [n / 2, n / 2] of x [n, C] as the paper does, by loops.

    Destinations are at 1, 3, ..., sources at 0, 2, ...; a source reaches no earlier destination.
    """
    odd, even = list(range(1, len(x), 2)), list(range(0, len(x), 2))
    columns = similarity(x.double(), odd, even, "cosine").T
    return torch.stack([settled_column((c - tau).relu(), True) for c in columns], 1).tril()


def merged(x: Tensor, weights: Tensor) -> Tensor:
    """Destinations [n / 2, C] that tokens x [n, C] merge to by W^F [n / 2, n / 2]."""
    odd, even = list(range(1, len(x), 2)), list(range(0, len(x), 2))
    return TokenPlan(weights[None], [], odd, even, 0).merge(x[None])[0]
