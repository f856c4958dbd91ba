"""Values of merged keys, fitted to the exact attention of a few queries.

Means of keys and values answer a query wrongly where attention tells the members of a group apart.
A few queries are answered exactly, over all keys, and the merged values take on what the merged
keys lack for them: kernel ridge regression with the kernel a(q) . a(q') of attention's rows. The
same idea serves language models' caches in Attention Matching (arXiv 2602.16284).
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 0.1  # of the mean diagonal of A A^T


def fitted_values(
    weights: Tensor, values: Tensor, exact: Tensor, first: int, last: int, ridge: float = RIDGE
) -> Tensor:
    """Values V'' of merged keys, with which attention answers a few queries nearly exactly.

    V'' = V' + A^T (A A^T + ridge mean(diag(A A^T)) I)^-1 (O - A V'), where A is the part of the
    attention weights that lies on the merged keys. Computed in fp32 (fp64 for fp64), by Cholesky:
    LU decompositions of this size are wrong on some processors.

    Args:
        weights: attention of m queries over the kept keys, [B, H, m, K].
        values: V' of the kept keys, [B, H, K, D].
        exact: O, the attention of the same queries over all keys, [B, H, m, D].
        first, last: which of the kept keys are merged ones, whose values may change.
        ridge: the regularisation, above 0.

    Returns:
        V'' [B, H, K, D], differentiable in all three tensors.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    shape = values.shape
    weights, values, exact = (t.to(dtype).flatten(0, 1) for t in (weights, values, exact))
    merged = weights[..., first:last]
    lacking = torch.baddbmm(exact, weights, values, alpha=-1)
    gram = torch.bmm(merged, merged.transpose(1, 2))
    diagonal = gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    # The least number keeps a head that sees none of the merged keys away from 0 / 0.
    gram.diagonal(dim1=-2, dim2=-1).add_(ridge * diagonal + torch.finfo(dtype).tiny ** 0.5)
    factor, _ = torch.linalg.cholesky_ex(gram)  # checks nothing: that would wait for the device
    half = torch.linalg.solve_triangular(factor, lacking, upper=False)
    solved = torch.linalg.solve_triangular(factor.transpose(1, 2), half, upper=True)
    fitted = torch.baddbmm(values[:, first:last], merged.transpose(1, 2), solved)
    if (first, last) != (0, shape[-2]):
        fitted = torch.cat([values[:, :first], fitted, values[:, last:]], 1)
    return fitted.view(shape)
