"""Where each token went, for pictures of merging."""

from __future__ import annotations

import torch
from torch import Tensor

from mame_sd.core.pick_plan import PickPlan
from mame_sd.core.plan import Plan


def owners_of(plan: Plan) -> Tensor:
    """LongTensor [*, L]: the position that each token mainly went to, its own where it is kept, -1
    where it is dropped.
    """
    rows = plan.rows
    kept = plan.kept.expand(rows.shape[0], -1)
    owner = kept.gather(1, rows)
    if isinstance(plan, PickPlan):
        owner = torch.full_like(owner, -1).scatter(1, kept, kept)
    return owner.view(*plan.preserved.shape[:-1], plan.tokens_in)
