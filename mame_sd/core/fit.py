"""Values of merged keys, fitted to the exact attention of a few queries.

Means of keys and values answer a query wrongly where attention tells the members of a group apart.
A few queries are answered exactly, over all keys, and the merged values take on what the merged
keys lack for them: kernel ridge regression with the kernel a(q) . a(q') of attention's rows. The
same idea serves language models' caches in Attention Matching (arXiv 2602.16284).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.core.groups import product

RIDGE = 0.1  # of the mean diagonal of A A^T


def fitted_values(
    weights: Tensor, values: Tensor, exact: Tensor, first: int, last: int, ridge: float = RIDGE
) -> Tensor:
    """Values V'' of merged keys, with which attention answers a few queries nearly exactly.

    V'' = V' + A^T (A A^T + ridge mean(diag(A A^T)) I)^-1 (O - A V'), where A is the part of the
    attention weights that lies on the merged keys. Computed in fp32 (fp64 for fp64), by Cholesky:
    LU decompositions of this size are wrong on some processors.

    Args:
        weights: attention of m queries over the kept keys, [.., m, K].
        values: V' of the kept keys, [.., K, D].
        exact: O, the attention of the same queries over all keys, [.., m, D].
        first, last: which of the kept keys are merged ones, whose values may change.
        ridge: the regularisation, above 0.

    Returns:
        V'' [.., K, D] in fp32 (fp64), differentiable in all three tensors.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    shape = values.shape
    weights, values, exact = (t.to(dtype).flatten(0, -3) for t in (weights, values, exact))
    merged = weights[..., first:last]
    lacking = torch.baddbmm(exact, weights, values, alpha=-1)
    gram = torch.bmm(merged, merged.transpose(1, 2))
    diagonal = gram.diagonal(dim1=1, dim2=2)
    # The least number keeps a head that sees none of the merged keys away from 0 / 0.
    mean = diagonal.mean(-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny ** 0.5)
    diagonal.add_(mean, alpha=ridge)
    factor, _ = torch.linalg.cholesky_ex(gram)  # checks nothing: that would wait for the device
    half = torch.linalg.solve_triangular(factor, lacking, upper=False)
    solved = torch.linalg.solve_triangular(factor.transpose(1, 2), half, upper=True)
    fitted = torch.baddbmm(values[:, first:last], merged.transpose(1, 2), solved)
    if (first, last) != (0, values.shape[1]):
        fitted = torch.cat([values[:, :first], fitted, values[:, last:]], 1)
    return fitted.view(shape)


def fitted_to(
    q: Tensor,
    at: Tensor,
    full: tuple[Tensor, Tensor],
    kept: tuple[Tensor, Tensor],
    bias: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    merged: tuple[int, int],
) -> Tensor:
    """The values of kept keys, fitted to the exact attention of the queries at these places of q.

    Args:
        q: queries [B, H, Q, D].
        at: LongTensor [m], which of them.
        full: all keys and values.
        kept: the kept keys [B, H, K, D] and their values [B, H, K, D'].
        bias: what is added to the logits of the kept keys, broadcast to [B, H, Q, K].
        attn_mask: of the attention over all keys.
        scale: of the logits; None: 1 / sqrt(D).
        merged: the first and last of the kept keys whose values may change, as in `fitted_values`.

    Returns:
        [B, H, K, D'] in the dtype of the kept values.
    """
    shared = q.shape[1] // kept[0].shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    some = q.index_select(2, at)
    rows = attn_mask
    if rows is not None and rows.dim() > 1 and rows.shape[-2] > 1:
        rows = rows.index_select(-2, at)
        bias = bias.index_select(-2, at)
    more: Any = {"enable_gqa": True} if shared > 1 else {}
    exact = F.scaled_dot_product_attention(some, *full, attn_mask=rows, scale=scale, **more)
    if shared > 1:
        some, exact = (
            t.unflatten(1, (-1, shared)).flatten(2, 3) for t in (some, exact)
        )  # [B, H', shared * m, D]
        bias = bias if bias.shape[-2] == 1 else bias.repeat(1, 1, shared, 1)
    some, key, value, exact = (t.flatten(0, 1) for t in (some, *kept, exact))
    logits = product(some, key.transpose(1, 2)).unflatten(0, kept[0].shape[:2])
    weights = torch.softmax(torch.add(bias, logits, alpha=scale), -1).flatten(0, 1)
    fitted = fitted_values(weights, value, exact, *merged)
    if kept[1].dtype == torch.float16:  # which ends at 65,504, where values may lie beyond
        fitted = fitted.clamp(-65504, 65504)
    return fitted.view(kept[1].shape).to(kept[1].dtype)
