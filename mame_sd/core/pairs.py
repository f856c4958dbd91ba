"""Samples that merge alike: of a prompt the guided and the unguided one.

Guidance adds a multiple of their difference, and with it a multiple of what merging does to one and
not to the other. Where both merge the same tokens most of that cancels (docs/experiments.md, "The
two halves of guidance").
"""

from __future__ import annotations

import torch
from torch import Tensor


def leaders(inputs: Tensor, prompt_first: bool = False) -> Tensor:
    """Of each sample of a model's input [B, ...] the one whose tokens decide what merges,
    LongTensor [B].

    Where both halves of the batch are equal, as pipelines repeat latents for guidance, the half
    with the prompt leads; else each sample its own. What is found stays on the device: nothing
    waits for it.

    Args:
        inputs: latents, with what pipelines put beside them.
        prompt_first: the prompt's half is the first; the second, after that of the negative prompt,
            in nearly all pipelines.
    """
    batch = inputs.shape[0]
    own = torch.arange(batch, device=inputs.device)
    half = batch // 2
    if batch % 2:
        return own
    alike = (inputs[:half] == inputs[half:]).all()
    return torch.where(alike, own % half + (0 if prompt_first else half), own)


def leaders_of_chunks(inputs: Tensor, unguided: list[bool]) -> Tensor:
    """The same where it is known which samples are unguided: those of the chunks [B / n, ...] of
    the batch that `unguided` [n] names.

    An unguided chunk is led by the first guided one, where their inputs are equal.
    """
    own = torch.arange(inputs.shape[0], device=inputs.device)
    if not unguided or all(unguided) or inputs.shape[0] % len(unguided):
        return own
    chunks, numbers = inputs.chunk(len(unguided)), own.chunk(len(unguided))
    guide = unguided.index(False)
    led = [
        torch.where((x == chunks[guide]).all(), numbers[guide], number) if follows else number
        for x, number, follows in zip(chunks, numbers, unguided, strict=True)
    ]
    return torch.cat(led)
