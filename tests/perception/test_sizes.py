"""How many tokens one stands for: counted in attention and in means, and by restoring."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mame_sd import MaMeConfig
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.perception.merged_block import merge_weighted
from mame_sd.perception.plans import plan_block
from tests.builders.perception import VIT


@torch.no_grad()
def test_sizes_count_unless_they_can_t() -> None:
    model, inputs = VIT.build(), VIT.batch()
    handle = apply_encoder(model, keep=0.5)
    assert (handle.prop_attn, handle.report().prop_attn) == (True, True)
    assert "attention counts how many" in str(handle.report())
    counted = VIT.call(model, inputs)["logits"]
    other = apply_encoder(model, keep=0.5, prop_attn=False)
    assert "attention does not count how many" in str(other.report())
    assert not torch.equal(VIT.call(model, inputs)["logits"], counted)
    handle = apply_encoder(model, keep=0.5)
    VIT.call(model, inputs)
    assert handle._shared.now.sizes is None, "a graph of gradients would hang on them"
    model.vit.config._attn_implementation = "flash_attention_2"
    assert (handle.prop_attn, handle.report().prop_attn) == (False, False), (
        "as the model is set now"
    )
    apply_encoder(model, keep=0.5, blocks=2, prop_attn=True)
    with pytest.raises(
        ValueError, match="expected attention implementation 'eager' or 'sdpa', got"
    ):
        VIT.call(model, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("fields", [{"keep": 0.6}, {"tau": -0.2}], ids=str)
def test_means_of_tokens_that_stand_for_many_count_these(fields: Any, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 33, 8, generator=g).to(dtype).requires_grad_()
    sizes = torch.randint(1, 40, (2, 33), generator=g).float()
    sizes[:, 0] = 1
    plan = plan_block(x.detach(), MaMeConfig(**fields), None, 1)
    got, summed = merge_weighted(plan, x, sizes)
    # The share of each token that goes to each kept one.
    shares = torch.zeros(2, plan.tokens_kept, 33, dtype=torch.float64)
    for column in range(33):
        one = torch.zeros(2, 33, 1, dtype=torch.float64)
        one[:, column] = 1
        shares[:, :, column] = plan.merge(one).squeeze(-1) * plan.sizes
    total = (shares * sizes.double().unsqueeze(1)).sum(2)
    torch.testing.assert_close(summed.double(), total, rtol=1e-5, atol=1e-5)
    wanted = shares * sizes.double().unsqueeze(1) @ x.double() / total.unsqueeze(-1)
    rough = 0.004 if dtype == torch.float16 else 1e-5
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, rtol=rough, atol=rough)
    gradients = (
        torch.autograd.grad(one.double().square().sum(), x)[0].double() for one in (got, wanted)
    )
    torch.testing.assert_close(*gradients, rtol=2 * rough, atol=2 * rough)


@pytest.mark.parametrize("fields", [{"keep": 0.5}, {"tau": 0.5}], ids=str)
@torch.no_grad()
def test_a_large_value_times_its_size_stays_in_range(fields: Any) -> None:
    x = torch.full((1, 8, 4), 2000.0, dtype=torch.float16)
    plan = plan_block(x, MaMeConfig(**fields), None, 0)
    assert torch.equal(merge_weighted(plan, x, torch.full((1, 8), 60.0))[0], x[:, :4])
