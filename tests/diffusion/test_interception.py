"""Masks of calls whose keys merge, in front of kernels that take them as they came."""

from __future__ import annotations

import torch

from mame_sd import apply_mame
from mame_sd.core.attention import Grid, KeyMerging
from mame_sd.diffusion.interception import MergeJob
from tests.matrix.backends import stand_ins
from tests.matrix.models.watch import check_by_loop, merging
from tests.matrix.transformers import ROWS


def test_a_backend_is_given_the_mask_of_the_keys_that_are_left() -> None:
    """diffusers' dispatcher has it as [B, N]."""
    row = next(row for row in ROWS if row.name == "Qwen-Image")
    model = row.build()
    with stand_ins() as called, merging() as calls:
        model.set_attention_backend("xformers")
        apply_mame(model, keep=0.5, min_tokens=60)
        row.run(model)
    assert "xformers" in called
    assert len(calls) == 2
    for call in calls:
        check_by_loop(call)
        assert (call.changed["attn_mask"][1] == -torch.inf).sum() == 2  # a shorter prompt


def test_a_kernel_that_takes_no_numbers_is_given_a_boolean_mask() -> None:
    job = MergeJob((Grid(3, (4, 6), 0.5),), 27, 3, 24, KeyMerging())
    q, k, v = torch.randn(3, 2, 2, 27, 8, generator=torch.Generator().manual_seed(0))
    seen = torch.ones(2, 1, 1, 27, dtype=torch.bool)
    seen[1, ..., :2] = False
    changed = job.merge({"query": q, "key": k, "value": v, "attn_mask": seen}, bias=False)
    assert changed is not None
    assert torch.equal(changed["attn_mask"], seen[..., : 3 + 12])
