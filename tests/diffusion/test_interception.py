"""Masks of calls whose keys merge, in front of kernels that take them as they came."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from torch import Tensor

from mame_sd import apply_mame
from mame_sd.core.keys import Grid, KeyMerging, MergeJob, SDPAInterceptor
from tests.builders.layers import attention
from tests.matrix.backends import stand_ins
from tests.matrix.models.watch import check_by_loop, merging


def masked_call() -> tuple[MergeJob, tuple[Tensor, ...], Tensor]:
    """A job for 4 x 6 tokens behind 3 of text, q, k, v [2, 2, 27, 8], and what each sample sees."""
    job = MergeJob((Grid(3, (4, 6), 0.5),), 27, 3, 24, KeyMerging())
    seen = torch.ones(2, 1, 1, 27, dtype=torch.bool)
    seen[1, ..., :2] = False
    qkv = torch.randn(3, 2, 2, 27, 8, generator=torch.Generator().manual_seed(0)).unbind()
    return job, qkv, seen


def test_a_backend_may_be_given_a_mask_for_all_heads_and_queries() -> None:
    """As [B, N], which diffusers' dispatcher takes."""
    job, qkv, seen = masked_call()
    with stand_ins() as called, merging() as calls:
        apply_mame(attention(), min_tokens=1)  # from now on backends are watched
        with SDPAInterceptor(job):
            dispatch_attention_fn(
                *(t.transpose(1, 2) for t in qkv),
                attn_mask=seen[:, 0, 0],
                backend=AttentionBackendName("xformers"),
            )
    assert called == ["xformers"]
    (call,) = calls
    check_by_loop(call)
    assert torch.equal(call.changed["attn_mask"] == -torch.inf, ~seen[..., : 3 + 12])


def test_a_kernel_that_takes_no_numbers_is_given_a_boolean_mask() -> None:
    job, (q, k, v), seen = masked_call()
    changed = job.merge({"query": q, "key": k, "value": v, "attn_mask": seen}, bias=False)
    assert changed is not None
    assert torch.equal(changed["attn_mask"], seen[..., : 3 + 12])


def test_one_head_without_a_dimension_of_its_own_keeps_the_masks_of_its_samples() -> None:
    job, qkv, seen = masked_call()
    q, k, v = (t[:, 0] for t in qkv)
    mask = seen[:, 0].expand(2, 27, 27)
    with SDPAInterceptor(job):
        alone = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        four = (t.unsqueeze(1) for t in (q, k, v))
        want = F.scaled_dot_product_attention(*four, attn_mask=mask.unsqueeze(1))
    assert job.merged is not None
    torch.testing.assert_close(alone, want.squeeze(1))


def test_a_backend_may_be_registered_by_a_plain_name(monkeypatch: pytest.MonkeyPatch) -> None:
    apply_mame(attention(), min_tokens=1)
    monkeypatch.setitem(Registry._backends, "mine", lambda query, key, value: value)
    q = torch.zeros(1, 4, 2, 8)
    assert Registry._backends["mine"](query=q, key=q, value=q) is q
