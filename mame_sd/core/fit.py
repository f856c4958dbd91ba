"""Values of merged keys, fitted to the exact attention of a few queries.

Means of keys and values answer a query wrongly where attention tells the members of a group apart.
A few queries are answered exactly, over all keys, and the merged values take on what the merged
keys lack for them: kernel ridge regression with the kernel a(q) . a(q') of attention's rows. The
same idea serves language models' caches in Attention Matching (arXiv 2602.16284).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mame_sd.core.merge import product

# PyTorch's own, whatever somebody put in its place under torch.nn.functional.
SDPA = torch._C._nn.scaled_dot_product_attention
RIDGE = 0.1  # of the mean diagonal of A A^T
SIZE_RIDGE = 1e-3  # of the mean square of the queries
HALF_MAX = 65504  # where fp16 ends


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
    factor = _ridged_cholesky(gram, ridge)
    half = torch.linalg.solve_triangular(factor, lacking, upper=False)
    solved = torch.linalg.solve_triangular(factor.transpose(1, 2), half, upper=True)
    fitted = torch.baddbmm(values[:, first:last], merged.transpose(1, 2), solved)
    if (first, last) != (0, values.shape[1]):
        fitted = torch.cat([values[:, :first], fitted, values[:, last:]], 1)
    return fitted.view(shape)


def sized_keys(
    key: Tensor, some: Tensor, beside: Tensor, log_sizes: Tensor, scale: float
) -> Tensor:
    """Write the sizes of groups into their keys, for kernels that add no bias to the logits.

    k' = k + log(size) w / scale, where w is the ridge regression of the number 1 on a few queries:
    q . w is about 1, so that the logit of each group is about log(size) above that of its mean.

    Args:
        key: the kept keys [B, H', K, D], H' a divisor of H.
        some: queries [B, H, m, D] of the image's tokens.
        beside: all other queries [B, H, n, D], such as the text's, which together weigh as much.
        log_sizes: [B, K], 0 for keys that stand for themselves.
        scale: of the logits, not 0.

    Returns:
        [B, H', K, D] in the dtype of the keys.
    """
    dtype = torch.promote_types(some.dtype, torch.float32)
    if some.shape[1] > key.shape[1]:
        some, beside = (of_kept_heads(t, key.shape[1]) for t in (some, beside))
    some, beside = (t.to(dtype).flatten(0, 1) for t in (some, beside))
    gram, ones = torch.bmm(some.transpose(1, 2), some), some.sum(1)
    if beside.shape[1]:
        weight = some.shape[1] / beside.shape[1]
        gram = torch.baddbmm(gram, beside.transpose(1, 2), beside, alpha=weight)
        ones = torch.add(ones, beside.sum(1), alpha=weight)
    factor = _ridged_cholesky(gram, SIZE_RIDGE)
    w = torch.cholesky_solve(ones.unsqueeze(2), factor)  # [B * H, D, 1]
    w = w.view(*key.shape[:2], 1, -1) / scale
    sized = torch.addcmul(key, log_sizes[:, None, :, None], w)
    if key.dtype == torch.float16:
        sized = sized.clamp(-HALF_MAX, HALF_MAX)
    return sized.to(key.dtype)


def _ridged_cholesky(gram: Tensor, ridge: float) -> Tensor:
    """The Cholesky factor of products [n, m, m] with `ridge` of their mean diagonal added, in
    place. Nothing is checked: that would wait for the device.
    """
    diagonal = gram.diagonal(dim1=1, dim2=2)
    # The least number keeps what is all zeros away from 0 / 0.
    mean = diagonal.mean(-1, keepdim=True).clamp_min(torch.finfo(gram.dtype).tiny ** 0.5)
    diagonal.add_(mean, alpha=ridge)
    return torch.linalg.cholesky_ex(gram)[0]


def of_kept_heads(some: Tensor, heads: int) -> Tensor:
    """Queries [B, H, m, D] as [B, heads, H / heads * m, D]: by the head of keys they attend to."""
    return some.unflatten(1, (heads, -1)).flatten(2, 3)


def fitted_to(
    q: Tensor,
    at: Tensor,
    full: tuple[Tensor, Tensor],
    kept: tuple[Tensor, Tensor],
    bias: Tensor | None,
    attn_mask: Tensor | None,
    scale: float | None,
    merged: tuple[int, int],
) -> Tensor:
    """Fit the values of kept keys to the exact attention of the queries at these places of q.

    Args:
        q: queries [B, H, Q, D].
        at: LongTensor [m], which of them.
        full: all keys and values.
        kept: the kept keys [B, H', K, D] and their values [B, H', K, D'], H' a divisor of H.
        bias: what is added to the logits of the kept keys, broadcast to [B, H, Q, K].
        attn_mask: of the attention over all keys.
        scale: of the logits; None: 1 / sqrt(D).
        merged: the first and last of the kept keys whose values may change, as in `fitted_values`.

    Returns:
        [B, H', K, D'] in the dtype of the kept values.
    """
    heads = kept[0].shape[1]
    shared = q.shape[1] // heads
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    some, rows = q.index_select(2, at), attn_mask
    if rows is not None and rows.dim() > 1 and rows.shape[-2] > 1:
        rows = rows.index_select(-2, at)
    more: Any = {"enable_gqa": True} if shared > 1 else {}
    exact = SDPA(some, *full, attn_mask=rows, scale=scale, **more)
    if bias is not None and bias.shape[-2] > 1:
        bias = bias.index_select(-2, at)
    if shared > 1:
        if bias is not None and max(bias.shape[1:3]) > 1:  # of each head or query its own
            bias = of_kept_heads(bias.expand(-1, q.shape[1], len(at), -1), heads)
        some, exact = (of_kept_heads(t, heads) for t in (some, exact))
    some, key, value, exact = (t.flatten(0, 1) for t in (some, *kept, exact))
    logits = product(some, key.transpose(1, 2)).unflatten(0, kept[0].shape[:2])
    logits = scale * logits if bias is None else torch.add(bias, logits, alpha=scale)
    weights = torch.softmax(logits, -1).flatten(0, 1)
    fitted = fitted_values(weights, value, exact, *merged)
    if kept[1].dtype == torch.float16:
        fitted = fitted.clamp(-HALF_MAX, HALF_MAX)
    return fitted.view(kept[1].shape).to(kept[1].dtype)
