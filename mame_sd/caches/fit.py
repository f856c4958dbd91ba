"""Values and a bias for each key that stays, fitted so that attention gives what it gave over all
keys.

Attention Matching (arXiv 2602.16284): first the mass, then the values, both by least squares over
reference queries. Ours are the prompt's own, moved to positions to come; both fits are ridges
towards what the keys had.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mame_sd.caches.layer import Kept
from mame_sd.caches.view import CacheView
from mame_sd.core.fit import within

RIDGE_MASS, RIDGE_VALUES = 0.1, 0.01  # in units of the mean diagonal of the normal equations
LEAST, MOST = 1e-2, 1e2  # of what a key may count for


def with_fitted_values(
    view: CacheView, kept: Kept, place: Tensor, queries: Tensor, counted: Tensor
) -> Kept:
    """Return `kept` with the values and biases that fit.

    Args:
        place: LongTensor [B, h, K], where each kept key lies in `view`.
        queries: reference queries [B, H, N, D], rotated.
        counted: which of them count, bool [B, N].
    """
    g = queries.shape[1] // place.shape[1]  # heads of queries that share one of keys
    parts = [
        _one(view.head(i), kept.head(i), place[:, i], queries[:, i * g : (i + 1) * g], counted)
        for i in range(place.shape[1])
    ]
    values = torch.stack([v for v, _ in parts], 1).to(kept.values.dtype)
    bias = torch.stack([b for _, b in parts], 1).to(kept.values.dtype)
    return replace(kept, values=values, bias=bias if kept.bias is None else kept.bias + bias)


def _one(
    view: CacheView, kept: Kept, place: Tensor, queries: Tensor, counted: Tensor
) -> tuple[Tensor, Tensor]:
    """Return values [B, K, D] and what is added to the bias [B, K] of one head of keys."""
    g = queries.shape[1]
    logits = view.logits(queries)[:, 0].flatten(1, 2)  # [B, G N, L]
    weight = counted.repeat(1, g).unsqueeze(-1).to(logits.dtype)
    at = place.unsqueeze(1).expand(-1, logits.shape[1], -1)
    everything = logits.softmax(-1)
    if view.real is not None:
        everything = everything.nan_to_num()
    target = everything @ view.values[:, 0].to(logits.dtype)
    share = everything.gather(2, at) * weight  # of all attention, by key
    count = torch.full((place.shape[0],), place.shape[1], device=place.device)
    if kept.real is not None:
        share = share.masked_fill(~kept.real, 0)
        count = kept.real[:, 0].sum(-1).clamp(min=1)
    mass = weight - share.sum(-1, keepdim=True)
    a, b = (t.unflatten(1, (g, -1))[:, :, ::2].flatten(1, 2) for t in (share, mass))  # half will do
    change = _ridge(a, b, RIDGE_MASS, count).squeeze(-1)
    bias = (1 + change).clamp(LEAST, MOST).log()
    attention = share * bias.exp().unsqueeze(1)
    attention = attention / attention.sum(-1, keepdim=True).clamp(min=torch.finfo(share.dtype).tiny)
    start = kept.values[:, 0].to(logits.dtype)
    change = _ridge(attention, target * weight - attention @ start, RIDGE_VALUES, count)
    return within(start + change, view.values[:, 0]), bias


def _ridge(a: Tensor, b: Tensor, strength: float, count: Tensor) -> Tensor:
    """Return x [B, K, D] that minimises |a x - b|^2 + strength * mean diagonal * |x|^2, of a
    [B, N, K] and b [B, N, D].

    The mean is that of the `count` [B] keys that aren't padding, whose columns are 0. The smaller
    of a a^T and a^T a is factored, by Cholesky: both give the same x.
    """
    t = a.transpose(-1, -2)
    few = a.shape[1] < a.shape[2]
    gram = a @ t if few else t @ a
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    lift = strength * trace / count + torch.finfo(a.dtype).tiny ** 0.5
    gram.diagonal(dim1=-2, dim2=-1).add_(lift.unsqueeze(-1))
    factor = torch.linalg.cholesky(gram)
    return t @ torch.cholesky_solve(b, factor) if few else torch.cholesky_solve(t @ b, factor)
