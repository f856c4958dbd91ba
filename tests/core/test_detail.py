"""Groups restored with detail: their means stay, and what follows their surroundings and inputs
comes back.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.detail import Detail
from mame_sd.core.merge import plan_merge
from tests.builders.tokens import tokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_groups_restored_with_detail_keep_their_means_and_vary(dtype: torch.dtype) -> None:
    x = tokens(2, 2 + 48, 4, dtype=torch.promote_types(dtype, torch.float32))
    y = tokens(2, 2 + 24, 3, seed=1, dtype=dtype)
    plan, detail = (
        plan_merge(x, MaMeConfig(keep=0.5, merge="qkv", tiles=4), (6, 8), special=2),
        Detail(x[:, 2:], (6, 8)),
    )
    restored = plan.restore(y, detail)
    assert restored.dtype == dtype
    assert torch.equal(restored[:, :2], y[:, :2])
    torch.testing.assert_close(
        plan.merge(restored), y, rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
    )
    assert (restored - plan.restore(y)).abs().max() > 0.1
    flat = torch.ones_like(y)
    assert torch.equal(plan.restore(flat, detail), plan.restore(flat))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_follows_the_inputs_is_restored_and_what_does_not_is_left(dtype: torch.dtype) -> None:
    x = tokens(2, 1024, 16, dtype=dtype)
    plan, detail = plan_merge(x, MaMeConfig(keep=0.5, merge="qkv")), Detail(x, (32, 32))

    def error(detail: Detail | None, t: Tensor) -> float:
        return float((plan.restore(plan.merge(t), detail) - t).float().square().mean())

    follows = x @ tokens(16, 8, seed=1, dtype=dtype)
    assert error(detail, follows) < 0.05 * error(None, follows)
    noise = tokens(2, 1024, 8, seed=2, dtype=dtype)
    assert error(detail, noise) < 1.1 * error(None, noise)


def test_a_plan_restores_again_with_gradients_and_in_a_wider_dtype() -> None:
    x = tokens(2, 256, 8).requires_grad_()
    plan, detail = plan_merge(x, MaMeConfig(keep=0.5, merge="qkv")), Detail(x, (16, 16))
    with torch.no_grad():
        before = plan.restore(plan.merge(x), detail)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(
            plan.restore(plan.merge(x.detach()), detail).square().sum(), x
        )
        assert gradient.norm() > 0
    again = plan.restore(plan.merge(x.double()), detail)
    assert again.dtype == torch.float64
    torch.testing.assert_close(again.float(), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("special", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_means_of_the_feature_that_are_known_change_nothing(
    special: int, dtype: torch.dtype
) -> None:
    x = tokens(2, special + 256, 8, dtype=dtype).requires_grad_()
    plan = plan_merge(x, MaMeConfig(keep=0.6, merge="qkv"), (16, 16), special)
    merged, found = plan.merge(x), []
    for means in (None, merged):
        output = plan.restore(merged * 2, Detail(x[:, special:], (16, 16), means))
        (gradient,) = torch.autograd.grad(output.square().sum(), x, retain_graph=True)
        found += [output, gradient]
    bound = 1e-9 if dtype == torch.float64 else 2e-2
    for one, other in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(
            one, other, rtol=bound, atol=bound * float(other.detach().abs().max())
        )
    with pytest.raises(ValueError, match="detail: expected the feature"):
        plan.restore(merged, Detail(x[:, special:], (16, 16), merged[:, 1:]))


def test_a_ramp_of_cells_is_restored_as_a_ramp() -> None:
    ramp = torch.arange(16.0).repeat(16, 1).view(1, 256, 1)
    plan = plan_merge(ramp, MaMeConfig(keep=0.25, merge="qkv", tiles=2))
    inner = plan.restore(plan.merge(ramp), Detail(ramp, (16, 16))).view(16, 16)[:, 2:-2]
    torch.testing.assert_close(inner, ramp.view(16, 16)[:, 2:-2])


@pytest.mark.parametrize(("length", "plane"), [(64, (8, 7)), (63, (8, 8)), (63, (9, 7))])
def test_detail_of_other_tokens_is_refused(length: int, plane: tuple[int, int]) -> None:
    x = tokens(1, 64, 4)
    plan = plan_merge(x, MaMeConfig(keep=0.5, merge="qkv"))
    with pytest.raises(ValueError, match=r"detail: expected the feature \[1, 64, d\]"):
        plan.restore(plan.merge(x), Detail(x[:, :length], plane))
