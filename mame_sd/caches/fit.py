"""Fit values and a bias to the kept keys, so that attention gives what it gave over all keys.

Attention Matching (arXiv 2602.16284): first the mass, then the values, both by least squares over
reference queries. Here the reference queries are the prompt's own, moved to future positions, and
both fits are ridge regressions towards what the keys had.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mame_sd.caches.layer import Kept
from mame_sd.caches.view import CacheView
from mame_sd.core.fit import solve_ridge, within

RIDGE_MASS, RIDGE_VALUES = 0.1, 0.01  # relative to the mean diagonal of the normal equations
LEAST, MOST = 1e-2, 1e2  # limits of the factor on a key's mass


def with_fitted_values(
    view: CacheView, kept: Kept, place: Tensor, queries: Tensor, valid: Tensor
) -> Kept:
    """Return `kept` with fitted values and biases.

    Args:
        view: the layer's whole cache.
        kept: the keys that stay.
        place: LongTensor [B, h, K], the index of each kept key in `view`.
        queries: reference queries, rotated, [B, H, N, D].
        valid: bool [B, N], False for queries at padding.
    """
    g = queries.shape[1] // place.shape[1]  # heads of queries per head of keys
    parts = [
        _fit_head(view.head(i), kept.head(i), place[:, i], queries[:, i * g : (i + 1) * g], valid)
        for i in range(place.shape[1])
    ]
    values = torch.stack([v for v, _ in parts], 1).to(kept.values.dtype)
    bias = torch.stack([b for _, b in parts], 1).to(kept.values.dtype)
    return replace(kept, values=values, bias=bias if kept.bias is None else kept.bias + bias)


def _fit_head(
    view: CacheView, kept: Kept, place: Tensor, queries: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Fit one head of keys; arguments as `with_fitted_values` has them.

    Returns:
        Values [B, K, D], and what is added to the bias [B, K].
    """
    g = queries.shape[1]
    logits = view.logits(queries)[:, 0].flatten(1, 2)  # [B, G N, L]
    weight = valid.repeat(1, g).unsqueeze(-1).to(logits.dtype)
    at = place.unsqueeze(1).expand(-1, logits.shape[1], -1)
    everything = logits.softmax(-1)
    if view.real is not None:
        everything = everything.nan_to_num()
    target = everything @ view.values[:, 0].to(logits.dtype)
    share = everything.gather(2, at) * weight  # each kept key's share of all attention
    count = torch.full((place.shape[0],), place.shape[1], device=place.device)
    if kept.real is not None:
        share = share.masked_fill(~kept.real, 0)
        count = kept.real[:, 0].sum(-1).clamp(min=1)
    mass = weight - share.sum(-1, keepdim=True)
    # Half of the queries are enough.
    a, b = (t.unflatten(1, (g, -1))[:, :, ::2].flatten(1, 2) for t in (share, mass))
    change = solve_ridge(a, b, RIDGE_MASS, count).squeeze(-1)
    bias = (1 + change).clamp(LEAST, MOST).log()
    attention = share * bias.exp().unsqueeze(1)
    attention = attention / attention.sum(-1, keepdim=True).clamp(min=torch.finfo(share.dtype).tiny)
    start = kept.values[:, 0].to(logits.dtype)
    lacking = target * weight - attention @ start
    values = solve_ridge(attention, lacking, RIDGE_VALUES, count, start=start)
    return within(values, view.values[:, 0]), bias
