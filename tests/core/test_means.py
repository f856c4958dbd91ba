"""Means of groups against plain loops: every dtype, heads, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mame_sd import MaMeConfig, plan_merge
from mame_sd.core import plan

ROWS = torch.tensor(
    [[0, 2, 1, 0, 2, 2, 1], [1, 1, 0, 2, 1, 0, 1]]
)  # of two samples of seven tokens, three groups each
SIZES = torch.tensor([[2, 2, 3], [2, 4, 1]])


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
        dtype
    )


def loops(t: Tensor) -> Tensor:
    """[B, 3, C] of t [B, L, C]."""
    return torch.stack(
        [
            torch.stack(
                [
                    torch.stack([x for x, row in zip(sample, rows, strict=True) if row == i]).mean(
                        0
                    )
                    for i in range(3)
                ]
            )
            for sample, rows in zip(t.double(), ROWS, strict=True)
        ]
    )


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_means_are_those_of_loops(dtype: torch.dtype) -> None:
    t = tokens(2, 7, 5, dtype=dtype)
    with torch.no_grad():
        got = plan.group_means(t.flatten(0, 1), plan.groups_of(ROWS, 3)).view(2, 3, 5)
    assert got.dtype == dtype
    close = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), loops(t), rtol=close, atol=close)
    torch.testing.assert_close(
        plan.group_means_with_gradients(t, ROWS, SIZES).double(), loops(t), rtol=close, atol=close
    )
    assert torch.equal(got[1, 2], t[1, 3]), "a group of one is as it was"


def test_heads_are_grouped_alike() -> None:
    t = tokens(2, 3, 7, 4)  # [B, H, L, D]
    groups = plan.groups_of_heads(plan.groups_of(ROWS, 3), 2, 3)
    got = plan.group_means(t.reshape(-1, 4), groups).view(2, 3, 3, 4)
    for head in range(3):
        torch.testing.assert_close(got[:, head], loops(t[:, head]))


def test_sums_of_half_precision_leave_its_range_and_means_do_not() -> None:
    t = torch.full((2, 7, 2), 6e4, dtype=torch.float16)
    assert bool((plan.group_means(t.flatten(0, 1), plan.groups_of(ROWS, 3)) == t[0, 0]).all())
    assert bool((plan.group_means_with_gradients(t, ROWS, SIZES) == t[0, 0]).all())


def test_gradients_are_right_to_the_second_order() -> None:
    t = tokens(2, 7, 2).requires_grad_()

    def merged(t: Tensor) -> Tensor:
        return plan.group_means_with_gradients(t, ROWS, SIZES)

    assert torch.autograd.gradcheck(merged, t)
    assert torch.autograd.gradgradcheck(lambda t: merged(t).square(), t)


def test_what_is_not_finite_stays_in_its_group() -> None:
    t = tokens(2, 7, 2)
    t[0, 1, 0] = float("nan")  # group 2 of the first sample
    found = plan.group_means(t.flatten(0, 1), plan.groups_of(ROWS, 3)).view(2, 3, 2).isnan()
    assert found.nonzero().tolist() == [[0, 2, 0]]


@pytest.mark.parametrize("fields", [{"keep": 0.25}, {"keep": 0.4}, {"tau": 0.1}], ids=str)
def test_no_samples_merge_into_none(fields: dict[str, float]) -> None:
    x = tokens(0, 64, 4)
    y = plan_merge(x, MaMeConfig.from_dict({**fields, "merge": "qkv"}), (8, 8)).merge(x)
    assert y.shape[0] == 0
    assert y.shape[2] == 4


def test_what_a_plan_did_in_inference_mode_keeps_no_gradient_from_it() -> None:
    x = tokens(2, 64, 4)
    plan = plan_merge(x, MaMeConfig(keep=0.25), (8, 8))
    with torch.inference_mode():
        before = plan.merge(x)
        plan.counts.mul_(10)
    wanted = x.clone().requires_grad_()
    y = plan.merge(wanted)
    torch.testing.assert_close(y.detach(), before.clone())
    y.sum().backward()
    assert wanted.grad is not None
    torch.testing.assert_close(wanted.grad.sum(1), torch.full((2, 4), 16.0).double())


class Merged(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        plan = plan_merge(x, KEPT, (8, 8))
        return plan.restore(plan.merge(x))


KEPT = MaMeConfig(keep=0.4, merge="qkv")


@torch.no_grad()
def test_an_export_takes_any_number_of_samples() -> None:
    x = tokens(3, 64, 4)
    made = torch.export.export(
        Merged(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=False
    ).module()
    for samples in (3, 2, 5):
        some = tokens(samples, 64, 4)
        torch.testing.assert_close(made(some), Merged()(some))
