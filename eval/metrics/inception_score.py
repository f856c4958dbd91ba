"""Compute the Inception score (Salimans et al., 2016).

It measures how sure a classifier is of each image, and how varied its answers are. Own code,
because torchmetrics' standard deviation over parts is not the published one (it divides by the
number of parts minus one), and because it shuffles with the global random generator.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


@torch.no_grad()
def inception_score(logits: Tensor, splits: int = 10, seed: int | None = 0) -> tuple[float, float]:
    """Compute the mean and standard deviation of the score over parts of the images.

    A part's score is the exp of the mean KL divergence between each image's class probabilities and
    their mean; it can't exceed its number of images.

    Args:
        logits: [N, classes].
        splits: number of parts.
        seed: seed of the order in which images go into parts. If None, they keep their order. The
            global generator isn't used.

    Raises:
        ValueError: there are more parts than images, or NaN.
    """
    if logits.ndim != 2 or not 1 <= splits <= len(logits):
        raise ValueError(
            f"expected logits [images, classes] of at least {splits} images, got"
            f" {list(logits.shape)}"
        )
    if not logits.isfinite().all():
        raise ValueError("expected finite logits, got NaN or infinity")
    n = len(logits)
    rows = logits.detach().double().cpu()
    if seed is not None:
        rows = rows[torch.randperm(n, generator=torch.Generator().manual_seed(seed))]
    log_p = rows.log_softmax(1)
    bounds = [i * n // splits for i in range(splits + 1)]
    scores = torch.stack([_score(log_p[start:stop]) for start, stop in pairwise(bounds)])
    return scores.mean().item(), scores.std(correction=0).item()


def _score(log_p: Tensor) -> Tensor:
    mean = log_p.exp().mean(0)
    # a class of probability 0 adds 0, not 0 * -inf
    return (log_p.exp() * (log_p - mean.log())).nansum(1).mean().exp()
