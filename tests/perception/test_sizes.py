"""How many tokens one stands for: counted in attention and in means, and by restoring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mame_sd import MaMeConfig
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.perception.known_encoders import find_encoder
from mame_sd.perception.merged_block import weighted
from mame_sd.perception.plans import plan_block
from tests.builders.perception import ROWS, SIDE, Row

VIT = next(row for row in ROWS if row.name == "ViTForImageClassification")
MEAN = next(row for row in ROWS if row.name == "SiglipForImageClassification")
POOLED = next(row for row in ROWS if row.name == "SiglipVisionModel")


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
    apply_encoder(model, keep=0.5, prop_attn=True)
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
    got, summed = weighted(plan, x, sizes)
    shares = torch.zeros(
        2, plan.tokens_kept, 33, dtype=torch.float64
    )  # of each token that goes to each kept one
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
    assert torch.equal(weighted(plan, x, torch.full((1, 8), 60.0))[0], x[:, :4])


def twins(row: Row, model: nn.Module) -> dict[str, Any]:
    """Images whose patches come in pairs of equals, to a model that does not see where they are."""
    encoder = find_encoder(model)[0]
    for name, part in encoder.named_parameters():
        if "position_embedding" in name:
            part.data.zero_()
    inputs = row.batch()
    values = inputs["pixel_values"].unflatten(-1, (SIDE // 8, 2, 4))
    return {**inputs, "pixel_values": values[:, :, :, :, :1].expand_as(values).flatten(-3)}


@pytest.mark.parametrize("row", [VIT, MEAN, POOLED], ids=lambda row: row.name)
@torch.no_grad()
def test_counting_sizes_makes_merging_of_equals_exact(row: Row) -> None:
    model = row.build()
    inputs = twins(row, model)
    key = "pooler_output" if row is POOLED else "logits"
    want = row.call(model, inputs)[key]
    # half of the tokens: the class token takes no part, and a plain mean of what every pair became
    # is the pairs' mean
    pairs: dict[str, Any] = {"prop_attn": True, "restore": True}
    handle = apply_encoder(model, tau=0.9999, blocks=(0, 2), **pairs)
    torch.testing.assert_close(row.call(model, inputs)[key], want, rtol=1e-4, atol=1e-4)
    assert handle.report().blocks[0].share < 0.6
    if row is VIT:  # without counting, the class token weighs twice as much beside pairs
        apply_encoder(model, tau=0.9999, blocks=(0,), prop_attn=False)
        assert not torch.allclose(row.call(model, inputs)[key], want, rtol=1e-4, atol=1e-4)
