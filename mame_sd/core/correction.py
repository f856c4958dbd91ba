"""What attention loses with fewer keys, given back to first order in the logits.

Expanded around equal weights, attention over N keys is o(q) = mean(v) + scale * Cov(v, k) q + ..., mean and covariance taken over
the keys. Fewer keys have another mean and covariance: means of groups lack what varies within the groups, picked ones are off by
chance. Both are linear in q, and the difference costs two products of [D, N] by [N, D], as little as D more keys would: a control
variate (linear attention of what is missing), exact to first order whatever stands for the dropped keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def first_order(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept_key: Tensor,
    kept_value: Tensor,
    sizes: Tensor | None,
    scale: float,
) -> Tensor:
    """What to add to attention over the kept keys, [..., Q, D] in the query's dtype.

    Args:
        query: [..., Q, D].
        key, value: all N of them, [..., N, D].
        kept_key, kept_value: those that stand for them, [..., N', D].
        sizes: how many each stands for, [..., N'] (broadcast), N in all, where their logits have log(sizes) added; None: all
            weigh alike.
        scale: of the logits.
    """
    count = key.shape[-2]
    exact = torch.promote_types(query.dtype, torch.float32)
    share: Tensor | float = 1 / kept_key.shape[-2]
    if sizes is not None:
        share = (sizes.to(exact) / count).unsqueeze(-1).to(value.dtype)
    middle_key, middle_value = key.mean(-2, keepdim=True), value.mean(-2, keepdim=True)
    k, v = key - middle_key, value - middle_value  # centred: nothing large cancels
    kept_k, kept_v = kept_key - middle_key, kept_value - middle_value
    weighted = kept_v * share
    shift_key, shift = (kept_k * share).sum(-2, keepdim=True), weighted.sum(-2, keepdim=True)
    lacking = (v.transpose(-1, -2) @ k).to(exact) / count - (weighted.transpose(-1, -2) @ kept_k).to(exact)
    lacking = lacking + shift.transpose(-1, -2).to(exact) @ shift_key.to(exact)
    return query @ (scale * lacking).to(query.dtype).transpose(-1, -2) - shift
