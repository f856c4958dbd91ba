"""The loops themselves: the printed algorithms against their own equations, and what we measured
wrong with them.
"""

from __future__ import annotations

import pytest
import torch

from mame_sd.config import MaMeConfig, Study
from mame_sd.core.reference import (
    algorithm_1,
    algorithm_2,
    paper_column,
    reference_plan,
    settled_column,
)

DST, SRC = [0, 2, 4, 6], [1, 3, 5, 7]


def tokens(seed: int = 0, count: int = 8, d: int = 4) -> torch.Tensor:
    return torch.randn(count, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_printed_last_line_agrees_with_the_equations_where_mask_is_positive(seed: int) -> None:
    x = tokens(seed)
    _, final, mask = algorithm_1(x, 0.1, DST, SRC)
    plan = reference_plan(
        x[None], MaMeConfig(tau=0.1, study=Study(variant="paper", partition="alternating"))
    )
    assert plan.preserved[0] == [j for j in range(4) if mask[j] == 0]
    for j in range(4):
        if mask[j] > 0:  # W_F as printed is W / Mask; refining that W gives the equation's W_F
            w = final[:, j] * (mask[j] + 1e-6)
            zeta = w.sum() / ((w > 0).sum().double() + 1e-6)
            expected = (w - zeta).relu() / ((w - zeta).relu().sum() + 1e-6)
            torch.testing.assert_close(plan.weights[0, :, j], expected)
            assert final[:, j].sum() >= 1


@pytest.mark.parametrize("seed", range(5))
def test_printed_restore_divides_as_the_variant_paper_does(seed: int) -> None:
    x = tokens(seed)
    plan = reference_plan(
        x[None], MaMeConfig(tau=0.1, study=Study(variant="paper", partition="alternating"))
    )
    mask = torch.tensor([0.0 if j in plan.preserved[0] else 1.0 for j in range(4)])
    y = plan.merge(x[None])
    torch.testing.assert_close(
        algorithm_2(y[0], plan.weights[0], mask, DST, SRC), plan.restore(y)[0]
    )


def test_a_single_candidate_blows_up_as_printed_and_never_merges_by_the_equations() -> None:
    x = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [-1.0, 0.0]])
    _, final, mask = algorithm_1(x, 0.8, [0, 2], [1, 3])
    assert 0 < mask[0] < 1e-5
    assert final[:, 0].sum() > 1e5
    column = torch.tensor([0.2, 0.0], dtype=torch.float64)
    assert paper_column(column, True, 1e-6).sum() < 1  # amplitude lost
    torch.testing.assert_close(
        settled_column(column, True), torch.tensor([1.0, 0.0], dtype=torch.float64)
    )


@pytest.mark.parametrize("refine", [True, False])
def test_settled_columns_sum_to_one_or_zero(refine: bool) -> None:
    for column in ([0.0, 0.0], [0.3, 0.3], [1e-12, 3e-12], [0.5, 0.1], [0.2, 0.2 + 1e-9]):
        s = torch.tensor(column, dtype=torch.float64)
        torch.testing.assert_close(settled_column(s, refine).sum(), (s > 0).any().double())


def test_a_constant_image_survives_ours_and_shrinks_as_printed() -> None:
    x = torch.ones(1, 8, 4)
    ours = reference_plan(x, MaMeConfig(preset="plain", tau=0.8))
    assert ours.merge(x).shape[1] == 4
    torch.testing.assert_close(ours.restore(ours.merge(x)), x.double())
    printed = reference_plan(
        x, MaMeConfig(tau=0.8, study=Study(partition="alternating", variant="paper", refine=False))
    )
    torch.testing.assert_close(
        printed.restore(printed.merge(x)).mean(), torch.tensor(0.5).double(), rtol=0, atol=1e-5
    )


def test_gradients_of_the_loops_pass_gradcheck() -> None:
    config = MaMeConfig(preset="plain", tau=0.1)

    def through(x: torch.Tensor) -> torch.Tensor:
        plan = reference_plan(x, config)
        return plan.restore(plan.merge(x))

    assert torch.autograd.gradcheck(through, tokens(1)[None].requires_grad_())
