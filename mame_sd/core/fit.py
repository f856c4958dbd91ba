"""Fit values of merged keys to the exact attention of a few queries.

Means of keys and values answer a query wrongly if its attention distinguishes the members of a
group. So a few queries are answered exactly, over all keys, and the merged values are changed by
what the means lack for these queries. This is kernel ridge regression with the kernel
a(q) . a(q'), where a(q) is a query's row of attention weights. Attention Matching
(arXiv 2602.16284) uses the same idea for caches of language models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mame_sd.compat import private
from mame_sd.core.groups import matmul_fp32

# PyTorch's own function, even if another one was put in its place in torch.nn.functional.
SDPA = private("torch._C:_nn", "scaled_dot_product_attention")
RIDGE = 0.1  # relative to the mean diagonal of A A^T
SIZE_RIDGE = 1e-3  # relative to the mean square of the queries
# Relative rounding error of an attention output, by dtype. If queries attend almost only to the
# text, merged keys have small weights, and what they lack is below this error: dividing it by the
# weights would amplify noise. In fp64 too, a closer fit to these queries would spoil all others.
NOISE = {torch.float64: 3e-6, torch.float32: 3e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
ROOM = 0.25  # share of the values' range by which fitted values may exceed it on either side
HALF_MAX = 65504  # largest fp16 number


def solve_values(
    weights: Tensor, values: Tensor, exact: Tensor, first: int, last: int, ridge: float = RIDGE
) -> Tensor:
    """Solve for values V'' of merged keys that answer a few queries nearly exactly.

    V'' = V' + A^T (A A^T + ridge mean(diag(A A^T)) I)^-1 (O - A V'), where A holds the attention
    weights of the merged keys. At least the square of the rounding error of O, by its dtype, is
    added to the diagonal. The solver uses fp32 (fp64 for fp64) and Cholesky, because LU
    decompositions of this size are wrong on some processors.

    Args:
        weights: attention weights of m queries over the kept keys, [.., m, K].
        values: V' of the kept keys, [.., K, D].
        exact: O, the attention of the same queries over all keys, [.., m, D].
        first: position of the first merged key among the kept keys. Only values of merged keys
            change.
        last: position after the last merged key.
        ridge: the regularisation, above 0.

    Returns:
        V'' [.., K, D] in fp32 (fp64), differentiable in all three tensors.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    shape, alone = values.shape, (first, last) == (0, values.shape[-2])
    weights, values = (t.to(dtype).flatten(0, -3) for t in (weights, values))
    merged = weights[..., first:last]
    lacking = exact.flatten(0, -3) - torch.bmm(weights, values)
    # If all kept keys are merged ones, their weights sum to 1 unless a query sees no key.
    least = 1e-19 if alone else NOISE[exact.dtype] ** 2 / ridge
    fitted = solve_ridge(
        merged, lacking, ridge, merged.shape[1], least, start=values[:, first:last]
    )
    if not alone:
        fitted = torch.cat([values[:, :first], fitted, values[:, last:]], 1)
    return fitted.view(shape)


def solve_ridge(
    a: Tensor,
    b: Tensor,
    ridge: float,
    count: int | Tensor,
    least: float = 1e-19,
    start: Tensor | None = None,
) -> Tensor:
    """Solve ridge regressions: the x that minimises |a x - b|^2 + ridge m |x|^2.

    The smaller of a a^T and a^T a is factored by Cholesky; both give the same x. Errors are not
    checked, because a check would wait for the device.

    Args:
        a: [n, i, K].
        b: [n, i, D].
        ridge: the regularisation, above 0, relative to m = trace(a^T a) / count.
        count: an integer, or a tensor [n].
        least: smallest m.
        start: [n, K, D], added to x.

    Returns:
        x [n, K, D].
    """
    t = a.transpose(1, 2)
    few = a.shape[1] < a.shape[2]
    gram = torch.bmm(a, t) if few else torch.bmm(t, a)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    mean = (diagonal.sum(-1) / count).clamp_min(least).unsqueeze(-1)
    diagonal.add_(mean, alpha=ridge)
    factor = torch.linalg.cholesky_ex(gram)[0]
    half = torch.linalg.solve_triangular(factor, b if few else torch.bmm(t, b), upper=False)
    x = torch.linalg.solve_triangular(factor.transpose(1, 2), half, upper=True)
    if few:
        return torch.bmm(t, x) if start is None else torch.baddbmm(start, t, x)
    return x if start is None else start + x


def within(fitted: Tensor, values: Tensor) -> Tensor:
    """Clamp fitted values to the original values' range, extended by a quarter on either side.

    Attention returns means of values. A few queries may ask for far larger values, which would
    spoil other queries that attend more to the merged keys.

    Args:
        fitted: [.., K, D], in fp32 at least.
        values: [.., N, D]. The range is taken by channel.

    Returns:
        [.., K, D] in the dtype of `fitted`, in its memory if no gradient is needed.
    """
    if values.is_cuda:
        low, high = torch.aminmax(values, dim=-2, keepdim=True)
    else:  # aminmax of a CPU is 20 times as slow along this dimension
        low, high = values.amin(-2, keepdim=True), values.amax(-2, keepdim=True)
    bounds = torch.lerp(low, high, -ROOM), torch.lerp(high, low, -ROOM)
    return fitted.clamp(*bounds) if fitted.requires_grad else fitted.clamp_(*bounds)


def sized_keys(
    key: Tensor, some: Tensor, others: Tensor, log_sizes: Tensor, scale: float
) -> Tensor:
    """Write the sizes of groups into their keys, for kernels that accept no bias of the logits.

    k' = k + log(size) w / scale, where w is the ridge regression of the number 1 on a few queries:
    q . w is about 1, so that the logit of each group is about log(size) above that of its mean.

    Args:
        key: the kept keys [B, H', K, D], H' a divisor of H; changed in place.
        some: queries [B, H, m, D] of the image's tokens.
        others: all other queries [B, H, n, D], such as the text's. Together they weigh as much as
            `some`.
        log_sizes: [B, K], 0 for keys that stand for themselves.
        scale: scale of the logits, not 0.

    Returns:
        `key`.
    """
    dtype = torch.promote_types(some.dtype, torch.float32)
    some, others = (of_kept_heads(t, key.shape[1]).flatten(0, 1) for t in (some, others))
    gram, ones = matmul_fp32(some.transpose(1, 2), some), some.sum(1, dtype=dtype)
    if others.shape[1]:
        weight, others = some.shape[1] / others.shape[1], others.to(dtype)
        gram = torch.baddbmm(gram, others.transpose(1, 2), others, alpha=weight)
        ones = torch.add(ones, others.sum(1), alpha=weight)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal.add_(diagonal.mean(-1, keepdim=True).clamp_min(1e-19), alpha=SIZE_RIDGE)
    factor = torch.linalg.cholesky_ex(gram)[0]
    w = torch.cholesky_solve(ones.unsqueeze(2), factor)  # [B * H, D, 1]
    key.addcmul_(log_sizes[:, None, :, None], w.view(*key.shape[:2], 1, -1), value=1 / scale)
    return key.clamp_(-HALF_MAX, HALF_MAX) if key.dtype == torch.float16 else key


def of_kept_heads(some: Tensor, heads: int) -> Tensor:
    """Group queries [B, H, m, D] by the head of keys they attend to.

    Returns:
        [B, `heads`, H / `heads` * m, D].
    """
    return some.unflatten(1, (heads, -1)).flatten(2, 3)


def fit_values(
    some: Tensor,
    full: tuple[Tensor, Tensor],
    kept: tuple[Tensor, Tensor],
    bias: Tensor | None,
    attn_mask: Tensor | None,
    scale: float | None,
    merged: tuple[int, int],
) -> Tensor:
    """Fit the values of kept keys to the exact attention of a few queries.

    Args:
        some: the queries [B, H, m, D].
        full: all keys [B, H', N, D] and values [B, H', N, D'].
        kept: the kept keys [B, H', K, D] and their values [B, H', K, D'], H' a divisor of H. The
            values may be of a wider dtype.
        bias: added to the logits of the kept keys, broadcast to [B, H, m, K]. If None, nothing is.
        attn_mask: mask of the attention of these queries over all keys, broadcast to [B, H, m, N].
        scale: scale of the logits. If None, 1 / sqrt(D).
        merged: the range (first, last) of the kept keys whose values may change, as in
            `solve_values`.

    Returns:
        [B, H', K, D'] in the dtype of all values.
    """
    heads, dtype = kept[0].shape[1], full[1].dtype
    shared = some.shape[1] // heads
    scale = some.shape[-1] ** -0.5 if scale is None else scale
    more: Any = {"enable_gqa": True} if shared > 1 else {}
    exact = SDPA(some, *full, attn_mask=attn_mask, scale=scale, **more)
    if shared > 1:
        if bias is not None and max(bias.shape[1:3]) > 1:  # one for each head or query
            bias = of_kept_heads(bias.expand(-1, *some.shape[1:3], -1), heads)
        some, exact = (of_kept_heads(t, heads) for t in (some, exact))
    some, key, value, exact = (t.flatten(0, 1) for t in (some, *kept, exact))
    logits = matmul_fp32(some, key.transpose(1, 2)).unflatten(0, kept[0].shape[:2])
    logits = scale * logits if bias is None else torch.add(bias, logits, alpha=scale)
    weights = torch.softmax(logits, -1).flatten(0, 1)
    if attn_mask is not None:  # don't fit to queries that see no key
        sees = logits.amax(-1, keepdim=True).flatten(0, 1) > -torch.inf
        weights, exact = weights.where(sees, 0), exact.where(sees, 0)
    fitted = within(solve_values(weights, value, exact, *merged), full[1].flatten(0, 1))
    if dtype == torch.float16:
        fitted = fitted.clamp(-HALF_MAX, HALF_MAX)
    return fitted.view(kept[1].shape).to(dtype)
