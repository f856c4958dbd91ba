"""Compute the kernel distance between two sets of features (KID, arXiv 1801.01401).

It is the squared maximum mean discrepancy by a cubic polynomial kernel, unbiased for any number of
images. Own code, because torchmetrics can't compare sets of different sizes: it draws subsets of
one size from both, with the global random generator. For two whole sets of one size the results are
equal.
"""

from __future__ import annotations

from torch import Tensor


def kernel_distance(a: Tensor, b: Tensor) -> float:
    """Return the unbiased estimate of the squared distance; it can be below 0 for similar sets.

    Args:
        a: features [N, D], N at least 2.
        b: features [M, D], M at least 2.

    Raises:
        ValueError: there are fewer than two images or NaN, or the dimensions differ.
    """
    for rows in (a, b):
        if rows.ndim != 2 or len(rows) < 2 or rows.shape[1] != a.shape[1]:
            raise ValueError(
                f"expected features [images, {a.shape[-1]}] of at least 2 images, got"
                f" {list(rows.shape)}"
            )
        if not rows.isfinite().all():
            raise ValueError("expected finite features, got NaN or infinity")
    a, b = a.double(), b.double()
    return (_within(a) + _within(b) - 2 * _kernel(a, b).mean()).item()


def _within(rows: Tensor) -> Tensor:
    """Return the mean of the kernel over pairs of different rows."""
    values, n = _kernel(rows, rows), len(rows)
    return (values.sum() - values.diagonal().sum()) / (n * (n - 1))


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b.T / a.shape[1] + 1) ** 3
