"""Compute the Frechet distance between two sets of features as Gaussians (Heusel et al., 2017).

Own code, because torchmetrics takes 3.9 CPU seconds instead of .02 for 200 images with 2,048
features.

The distance is |mean gap|^2 + tr A + tr B - 2 tr (A B)^(1/2). With A = F^T F and B = G^T G the last
trace is the sum of the singular values of F G^T, which is exact for singular covariances too.
"""

from __future__ import annotations

import torch
from torch import Tensor


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Compute the squared distance of two sets, at least 0.

    Args:
        a: features [N, D].
        b: features [M, D].

    Raises:
        ValueError: there are fewer than two images or NaN, or the dimensions differ.
    """
    (mean, factor), (other_mean, other_factor) = _moments(a), _moments(b)
    if mean.shape != other_mean.shape:
        raise ValueError(f"expected equal feature dims, got {len(mean)} and {len(other_mean)}")
    gap = (mean - other_mean).square().sum()
    traces = factor.square().sum() + other_factor.square().sum()
    cross = torch.linalg.svdvals(factor @ other_factor.T).sum()
    return max(0.0, (gap + traces - 2 * cross).item())  # rounding alone can take it below 0


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean [D], and F [r, D] with F^T F = covariance (divided by n - 1), float64."""
    if features.ndim != 2 or features.shape[0] < 2:
        raise ValueError(
            f"expected features [images, dims] of at least 2 images, got {list(features.shape)}"
        )
    if not features.isfinite().all():
        raise ValueError("expected finite features, got NaN or infinity")
    rows = features.detach().double().cpu()
    mean = rows.mean(0)
    factor = (rows - mean) / (len(rows) - 1) ** 0.5
    if factor.shape[0] > factor.shape[1]:
        factor = torch.linalg.qr(factor, mode="r").R
    return mean, factor
