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
    least = torch.finfo(dtype).tiny ** 0.5
    gram = gram + torch.diag_embed(
        (ridge * diagonal.mean(-1, keepdim=True) + least).expand(diagonal.shape)
    )
    factor, _ = torch.linalg.cholesky_ex(gram)  # checks nothing: that would wait for the device
    half = torch.linalg.solve_triangular(factor, lacking, upper=False)
    solved = torch.linalg.solve_triangular(factor.transpose(1, 2), half, upper=True)
    fitted = torch.baddbmm(values[:, first:last], merged.transpose(1, 2), solved)
    if (first, last) != (0, values.shape[1]):
        fitted = torch.cat([values[:, :first], fitted, values[:, last:]], 1)
    return fitted.view(shape)
