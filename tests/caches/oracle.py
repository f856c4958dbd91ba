"""Float64 loops that the fast paths of caches are compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attended(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None = None
) -> Tensor:
    """softmax(q k + bias) v of queries [N, D] over keys and values [K, D], a query and a key at a
    time.
    """
    out = []
    for q in queries.double():
        weights = [
            math.exp(float(q @ k) * scale + (0 if bias is None else float(bias[i])))
            for i, k in enumerate(keys.double())
        ]
        out.append(sum(w * v for w, v in zip(weights, values.double(), strict=True)) / sum(weights))
    return torch.stack(out)


def causal_weights(x: Tensor, tau: float) -> Tensor:
    """W^F by the paper's equations, masked: x [n, C], destinations at 1, 3, ..., sources at 0, 2,
    ...; [n / 2, n / 2].
    """
    m = len(x) // 2
    x = x.double()
    found = torch.zeros(m, m, dtype=torch.float64)
    for j in range(m):
        above = []
        for i in range(m):
            d, s = x[2 * i + 1], x[2 * j]
            above.append(max(0.0, float(d @ s / (d.norm() * s.norm())) - tau))
        if sum(above) == 0:
            continue
        share = [a / sum(above) for a in above]
        positive = [w for w in share if w > 0]
        mean = sum(positive) / len(positive)
        refined = [max(0.0, w - mean) for w in share]
        if sum(refined) <= 1e-5:
            refined = share
        for i in range(j, m):  # M_ij: source j at 2 j is not later than destination i at 2 i + 1
            found[i, j] = refined[i] / sum(refined)
    return found


def merged(x: Tensor, weights: Tensor) -> list[Tensor]:
    """x''_dst of tokens x [n, ...] by W^F [n / 2, n / 2], (x_i + sum_j W_ij x_j) / (1 + sum_j
    W_ij).
    """
    out = []
    for i in range(len(weights)):
        total, value = 1.0, x[2 * i + 1].double()
        for j in range(weights.shape[1]):
            total += float(weights[i, j])
            value = value + weights[i, j] * x[2 * j].double()
        out.append(value / total)
    return out
