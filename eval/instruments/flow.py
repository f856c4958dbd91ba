"""Sample a rectified flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mame_sd.eval.instruments.models import Instrument


def times(steps: int, shift: float = 1.0) -> list[float]:
    """Return the `steps` + 1 times from 1 (noise) to 0 (clean).

    Args:
        steps: evaluations of the model.
        shift: 1 spaces the times evenly; more spends more of them on high noise, as SD3 does.
    """
    even = [1 - step / steps for step in range(steps + 1)]
    return [shift * t / (1 + (shift - 1) * t) for t in even]


def noise_of(shape: Sequence[int], count: int, seed: int) -> Tensor:
    """Return the noise of `count` samples [count, *shape].

    Args:
        shape: the shape of a sample.
        count: number of samples.
        seed: the noise of sample i depends on `seed` + i alone.
    """
    seeds = (torch.Generator().manual_seed(seed + i) for i in range(count))
    return torch.stack([torch.randn(shape, generator=g) for g in seeds])


def euler(
    velocity: Callable[[Tensor, float], Tensor], state: Tensor, times: Sequence[float]
) -> Tensor:
    """Follow a velocity from the first to the last of `times` by Euler's method.

    Args:
        velocity: a function of state and time.
        state: the state at `times[0]`.
        times: the times in the order of the steps, ascending or descending.

    Returns:
        The state at `times[-1]`.
    """
    for time, following in pairwise(times):
        state = state + (following - time) * velocity(state, time)
    return state


def guided_velocity(
    instrument: Instrument, noisy: Tensor, time: float, thumbnails: Tensor, guidance: float = 1.0
) -> Tensor:
    """Return the velocity with classifier-free guidance (arXiv 2207.12598).

    Args:
        instrument: the model.
        noisy: [B, *kind.shape].
        time: share of the noise, 0 to 1.
        thumbnails: the condition [B, kind.thumbnails, 3, 8, 8].
        guidance: 1 calls the model once per sample; other values call it without the condition too.
    """
    count = len(noisy)
    if guidance == 1.0:
        ones = noisy.new_ones(count)
        return instrument(noisy, time * ones, thumbnails, ones)
    known = torch.cat([noisy.new_zeros(count), noisy.new_ones(count)])
    both = noisy.repeat(2, *[1] * (noisy.ndim - 1))
    thumbnails = thumbnails.repeat(2, 1, 1, 1, 1)
    without, given = instrument(both, torch.full_like(known, time), thumbnails, known).chunk(2)
    return without + guidance * (given - without)


@torch.no_grad()
def sample(
    instrument: Instrument,
    thumbnails: Tensor,
    steps: int,
    guidance: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """Return samples in -1..1 by Euler's method: [B, *kind.shape].

    Args:
        instrument: the model.
        thumbnails: the condition [B, kind.thumbnails, 3, 8, 8], in -1..1.
        steps: evaluations of the model.
        guidance: see `guided_velocity`.
        seed: seed of the first sample's noise; each next sample's is one more.
    """
    device = next(instrument.parameters()).device
    given = thumbnails.to(device)
    state = noise_of(instrument.kind.shape, len(given), seed).to(device)

    def velocity(state: Tensor, time: float) -> Tensor:
        return guided_velocity(instrument, state, time, given, guidance)

    return euler(velocity, state, times(steps)).clamp(-1, 1)
