"""What varies within groups of merged tokens, given back when they are restored.

Every token of a group would get the same copy. Two things say how outputs vary within groups, and
neither needs training. One is the copies of the groups around a token (their blur). The other is
the inputs, which are known of every token. How outputs follow inputs is read off the merged tokens
themselves. It is a ridge regression of RANK directions on what the blur leaves unexplained. It is
given as far as it is right on the merged tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.core.partition import constant
from mame_sd.core.similarity import product

RANK = 32  # directions of the input that outputs are regressed on
GROUPS = 4  # destinations for each direction, at least
RIDGE = 0.03  # added to the directions' covariance, of its mean diagonal


class Detail(NamedTuple):
    """By what restored tokens of one group differ.

    Attributes:
        feature: the inputs [B, L, d] of all tokens but the special ones, in floating point; outputs
            vary as they do.
        plane: (h, w) of these tokens, h * w = L.
        means: the feature merged by the plan, [B, L', d], where it is known; None: it is merged
            again.
    """

    feature: Tensor
    plane: tuple[int, int]
    means: Tensor | None = None


def blurred(x: Tensor, plane: tuple[int, int]) -> Tensor:
    """Tokens x [B, h * w, C] blurred by [1, 2, 1] / 4 in their plane (h, w).

    The blur runs along rows and columns. The border of the plane is repeated.

    Twice the means of 2 x 2, where they reach over the border of what lies within. It is the same
    kernel, without a copy of the tokens.
    """
    image = x.unflatten(1, plane).permute(0, 3, 1, 2)
    corners = F.avg_pool2d(image, 2, stride=1, padding=1, count_include_pad=False)
    return F.avg_pool2d(corners, 2, stride=1).permute(0, 2, 3, 1).flatten(1, 2)


def directions(channels: int, count: int, device: torch.device) -> Tensor:
    """Directions [channels, count] in which tokens are looked at, fp32: cosines of as many
    frequencies, alike on every device.
    """
    phases = torch.arange(channels, device=device).unsqueeze(1) * torch.arange(
        1, count + 1, device=device
    )
    return (phases * 40503 % 65536 * (2 * math.pi / 65536)).float().cos()


def _least(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The least normal number, [1, 1, 1]: for sums by which something is divided."""
    return torch.full((1, 1, 1), torch.finfo(dtype).tiny, dtype=dtype, device=device)


def scaled_directions(
    channels: int, count: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """`directions`, so small that no sum leaves the range of halves."""
    return (directions(channels, count, device) / channels).to(dtype)


def slope_of_halves(unexplained: Tensor, channels: int, sizes: Tensor) -> Tensor:
    """`slope` in few operations, without gradients. `unexplained` [B, N, C + r] holds what is
    wanted and what is given side by side. Its dtype is any, and that of the result [B, r, C].
    """
    wanted, given = unexplained[..., :channels], unexplained[..., channels:]
    counts = sizes.unsqueeze(-1)
    weighted = torch.mul(given, counts, out=torch.empty_like(given)).transpose(1, 2)
    products = product(weighted, unexplained)
    follows, covariance = products[..., :channels], products[..., channels:]
    diagonal = covariance.diagonal(dim1=1, dim2=2)
    ridge = diagonal.mean(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny ** 0.5)
    diagonal.add_(ridge, alpha=RIDGE)
    found = torch.linalg.solve_ex(covariance, follows).result
    norms = torch.linalg.vector_norm(wanted, dim=2, keepdim=True, dtype=torch.float32)
    power = torch.baddbmm(
        constant(_least, norms.dtype, norms.device), (norms * counts).transpose(1, 2), norms
    )
    # Never above 1 but for rounding: the ridge explains less than the least squares.
    explained = (found * follows).sum((1, 2), keepdim=True) / power
    share = explained.square_()
    return torch.mul(found, share, out=torch.empty_like(found, dtype=unexplained.dtype))


def slope(given: Tensor, wanted: Tensor, sizes: Tensor) -> Tensor:
    """The ridge regression [B, r, C] of `wanted` [B, N, C] on `given` [B, N, r] (fp32 or fp64).
    Groups are of `sizes` [B, N] tokens.

    Times the square of the share of `wanted` that it explains. Where outputs follow inputs that is
    nearly all, and elsewhere little that holds within groups.
    """
    share = (sizes / sizes.sum(1, keepdim=True)).unsqueeze(-1)
    weighted = (share * given).transpose(1, 2)
    wanted = (
        wanted.float() if wanted.dtype == torch.float16 else wanted
    )  # whose range a sum may leave
    covariance, follows = weighted @ given, (weighted.to(wanted.dtype) @ wanted).to(given.dtype)
    ridge = (
        RIDGE * covariance.diagonal(dim1=1, dim2=2).mean(-1)
        + torch.finfo(covariance.dtype).tiny ** 0.5
    )
    lower, _ = torch.linalg.cholesky_ex(
        covariance + torch.diag_embed(ridge.unsqueeze(-1).expand(given.shape[::2]))
    )
    half = torch.linalg.solve_triangular(lower, follows, upper=False)
    found = torch.linalg.solve_triangular(lower.transpose(1, 2), half, upper=True)
    power = torch.linalg.vector_norm(wanted, dim=2, keepdim=True, dtype=given.dtype).square()
    explained = (found * follows).sum((1, 2)) / (share * power).sum((1, 2)).clamp(
        min=torch.finfo(power.dtype).tiny
    )
    return found * explained.clamp(0, 1).square().view(-1, 1, 1)
