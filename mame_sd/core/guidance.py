"""Choose the random partition of a step, and let samples that guidance subtracts merge alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mame_sd.core.cells import DRAWS


def partition_index(timestep: Tensor | float) -> Tensor:
    """Return the index of the random partition for a timestep, a LongTensor [1] in [0, DRAWS).

    Of several timesteps the largest counts, because video models give tokens that are already known
    (a first frame) the timestep 0 throughout. The index is a multiplicative hash; the constant was
    picked so that common schedules rarely repeat a partition.
    """
    times = timestep if isinstance(timestep, Tensor) else torch.tensor([timestep])
    thousandths = (times.float().amax().reshape(1) * 1000).long()
    return ((thousandths * 0xAAF4E5A7) & 0xFFFFFFFF) * DRAWS >> 32


def guidance_leaders(inputs: Tensor, unguided: Sequence[bool] = (True, False)) -> Tensor:
    """Return for each sample the index of the sample whose tokens decide for it, LongTensor [B].

    Guidance adds a multiple of the difference between guided and unguided samples, and with it a
    multiple of what merging does to one but not to the other. If both merge the same tokens, most
    of that cancels (docs/experiments.md, "Steps, draws and guidance"). So the first guided chunk
    of the batch leads each unguided chunk whose inputs are equal to its own; all other samples lead
    themselves. The comparison stays on the device: nothing waits for it.

    Args:
        inputs: latents [B, ...], with what pipelines concatenate to them.
        unguided: for each chunk of the batch, True if it is unguided. In nearly all pipelines the
            first of two chunks is, that of the negative prompt.
    """
    index = torch.arange(inputs.shape[0], device=inputs.device)
    if not unguided or all(unguided) or inputs.shape[0] % len(unguided):
        return index
    chunks, numbers = inputs.chunk(len(unguided)), list(index.chunk(len(unguided)))
    guide = unguided.index(False)
    for chunk, follows in enumerate(unguided):
        if follows:
            same = (chunks[chunk] == chunks[guide]).all()
            numbers[chunk] = torch.where(same, numbers[guide], numbers[chunk])
    return torch.cat(numbers)
