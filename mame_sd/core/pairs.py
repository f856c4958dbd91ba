"""Samples that merge alike: of a prompt the guided and the unguided one.

Guidance adds a multiple of their difference, and with it a multiple of what merging does to one and not to the other. Where both merge
the same tokens most of that cancels (docs/experiments.md, "The two halves of guidance"), and one plan is enough.
"""

from __future__ import annotations

import torch
from torch import Tensor


def leaders(latents: Tensor) -> Tensor | None:
    """Of each sample of a model's input [B, ...] the one whose tokens decide what merges, LongTensor [B]; None: each its own.

    Where both halves of the batch are equal, as pipelines repeat latents for guidance, the second half leads: it has the prompt,
    the first the negative one. What is found stays on the device: nothing waits for it.
    """
    batch = latents.shape[0]
    if batch % 2:
        return None
    half = batch // 2
    alike = (latents[:half] == latents[half:]).all()
    own = torch.arange(batch, device=latents.device)
    return torch.where(alike, own % half + half, own)


def leaders_in(leader: Tensor | None, feature: Tensor) -> Tensor | None:
    """`leaders` for tokens [B', L, d] of a layer in the model: in a video each sample's frames lead frame by frame.

    None where B' is no multiple of B.
    """
    if leader is None or feature.shape[0] % leader.shape[0]:
        return None
    leader, frames = leader.to(feature.device), feature.shape[0] // leader.shape[0]
    if frames == 1:
        return leader
    return (leader.unsqueeze(1) * frames + torch.arange(frames, device=feature.device)).flatten()
