"""Where each token went, for pictures of merging."""

from __future__ import annotations

import torch
from torch import Tensor

from mame_sd.core.plan import Plan


def owners_of(plan: Plan) -> Tensor:
    """LongTensor [*, L]: the position that each token mainly went to, its own where it is kept, -1 where it is dropped."""
    pos, preserved = plan.positions, plan.preserved
    device, lead = preserved.device, preserved.shape[:-1]
    owner = torch.arange(pos.L, device=device).repeat(*lead, 1)
    if pos.N:
        weight, heaviest = plan.weights.max(-2)  # [*, T, n]
        first = torch.arange(pos.blocks, device=device).unsqueeze(-1) * pos.m
        target = pos.dst_slots.flatten()[(heaviest + first).flatten(-2)][..., pos.src_real]  # [*, N]
        dropped = weight.flatten(-2)[..., pos.src_real] == 0
        owner[..., pos.src] = torch.where(preserved, pos.src, target.masked_fill(dropped, -1 - plan.special))
    return torch.cat([torch.arange(plan.special, device=device).expand(*lead, -1), owner + plan.special], -1)
