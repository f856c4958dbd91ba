"""Kernel inception distance (Binkowski et al., 2018): the squared maximum mean discrepancy under
(x.y / D + 1)^3, unbiased.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 2048


@dataclass(frozen=True)
class KidResult:
    """Mean and standard deviation over `subsets` random subsets of `subset_size` images each."""

    mean: float
    std: float
    subset_size: int
    subsets: int


@torch.no_grad()
def kid(
    a: Tensor, b: Tensor, subsets: int = 100, subset_size: int = 1000, seed: int = 0
) -> KidResult:
    """KID as published: the mean over random subsets, drawn without replacement from a generator of
    its own.

    Args:
        a: features [N, D].
        b: features [M, D].
        subsets: how many subsets are drawn.
        subset_size: images in each; lowered to the smaller set's size, which the result then says.
            When both sets are a subset, there is only one to draw.
        seed: of the draws. The global generator is left alone.

    Raises:
        ValueError: fewer than two images, unequal dims, NaN.
    """
    a, b = _check(a, b)
    if subsets < 1 or subset_size < 2:
        raise ValueError(f"expected at least 1 subset of 2 images, got {subsets} of {subset_size}")
    size = min(subset_size, len(a), len(b))
    if size == len(a) == len(b):
        return KidResult(_discrepancy(a, b).item(), 0.0, size, 1)
    generator = torch.Generator().manual_seed(seed)
    values = torch.stack(
        [
            _discrepancy(
                a[torch.randperm(len(a), generator=generator)[:size]],
                b[torch.randperm(len(b), generator=generator)[:size]],
            )
            for _ in range(subsets)
        ]
    )
    return KidResult(values.mean().item(), values.std(correction=0).item(), size, subsets)


@torch.no_grad()
def kid_exact(a: Tensor, b: Tensor, paired: bool = False) -> float:
    """The same discrepancy from every pair of images, no subsets drawn.

    Args:
        a: features [N, D].
        b: features [M, D].
        paired: image i of both sets shares prompt and seed, so the sets are not independent. The
            cross terms i = j, left in, push the estimate below 0. Leaves them out: the U-statistic
            over i != j (Gretton et al., 2012, lemma 6). Needs N = M.

    Raises:
        ValueError: as for `kid`, or `paired` with sets of unequal size.
    """
    a, b = _check(a, b)
    if paired and len(a) != len(b):
        raise ValueError(f"expected pairs, got {len(a)} and {len(b)} images")
    return _discrepancy(a, b, paired).item()


def _check(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both as float64 on the CPU."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < 2:
        raise ValueError(
            f"expected features [images, dims] of at least 2 images each, got {list(a.shape)} and"
            f" {list(b.shape)}"
        )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ValueError("expected finite features, got NaN or infinity")
    return a.detach().double().cpu(), b.detach().double().cpu()


def _discrepancy(a: Tensor, b: Tensor, paired: bool = False) -> Tensor:
    n, m = len(a), len(b)
    within_a = (_kernel_sum(a, a) - _kernel(a, a).sum()) / (n * (n - 1))
    within_b = (_kernel_sum(b, b) - _kernel(b, b).sum()) / (m * (m - 1))
    between = (
        (_kernel_sum(a, b) - _kernel(a, b).sum()) / (n * (n - 1))
        if paired
        else _kernel_sum(a, b) / (n * m)
    )
    return within_a + within_b - 2 * between


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    """The kernel of row i of `a` with row i of `b`, [N]."""
    return ((a * b).sum(1) / a.shape[1] + 1) ** 3


def _kernel_sum(a: Tensor, b: Tensor) -> Tensor:
    """The sum of the kernel over all N x M pairs, without holding them all."""
    return torch.stack(
        [((rows @ b.T / a.shape[1] + 1) ** 3).sum() for rows in a.split(CHUNK)]
    ).sum()
