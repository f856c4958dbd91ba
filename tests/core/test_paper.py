"""Test MaMe and MaRe against loops in float64, the printed algorithms, and their properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mame_sd import plan_tokens
from mame_sd.core.paper import split_positions
from tests import oracle
from tests.builders.tokens import tokens

TAUS = {"cosine": 0.3, "dot": 0.5, "euclidean": -0.9, "softmax": 0.02}
FORMS = [
    *[{"metric": metric, "tau": tau} for metric, tau in TAUS.items()],
    {"tau": 0.3, "refine": False},
    {"tau": 0.3, "partition": "sequential"},
    {"tau": -1.0},
]


def slow(x: Tensor, prefix: int, fields: dict[str, Any]) -> oracle.TokenPlan:
    given = {"metric": "cosine", "partition": "alternating", "refine": True, **fields}
    parts = (given[name] for name in ("tau", "metric", "partition", "refine"))
    return oracle.token_plan(x, *parts, prefix)


@pytest.mark.parametrize("length", [1, 2, 7, 24])
@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_values_and_gradients_equal_the_loops(fields: dict[str, Any], length: int) -> None:
    prefix = 1
    x = tokens(2, length + prefix, 6, dtype=torch.float64).requires_grad_()
    y = tokens(2, length + prefix, 3, seed=1, dtype=torch.float64)
    plan, loop = plan_tokens(x, num_prefix_tokens=prefix, **fields), slow(x, prefix, fields)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(plan.weights, loop.weights, **close)
    assert plan.preserved.tolist() == loop.preserved
    torch.testing.assert_close(plan.sizes.sum(1), torch.full_like(x[:, 0, 0], length + prefix))
    merged = plan.merge(y)
    torch.testing.assert_close(merged, loop.merge(y), **close)
    torch.testing.assert_close(plan.restore(merged), loop.restore(merged), **close)
    if plan.tokens_kept < plan.tokens_in:
        every = [
            torch.autograd.grad((p.restore(p.merge(x)) ** 2).sum(), x)[0] for p in (plan, loop)
        ]
        torch.testing.assert_close(*every, rtol=1e-9, atol=1e-9)


def test_tau_one_merges_nothing_and_preserved_tokens_come_back_bit_equal() -> None:
    x = tokens(2, 33, 8)
    x[:, 1::2] = x[:, :-1:2] * 3  # copies in direction: cosine 1, which is not above 1
    plan = plan_tokens(x, 1.0, num_prefix_tokens=2)
    assert plan.tokens_kept == plan.tokens_in
    assert torch.equal(plan.restore(plan.merge(x)), x)
    plan = plan_tokens(tokens(1, 33, 8), 0.85)
    stays = plan.src[plan.preserved]
    assert 0 < len(stays) < len(plan.src)
    y = tokens(1, 33, 8, seed=1)
    assert torch.equal(plan.restore(plan.merge(y))[:, stays], y[:, stays])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_decide_as_fp32_does(dtype: torch.dtype) -> None:
    x = tokens(2, 64, 16).to(dtype)
    plan, exact = (plan_tokens(t, 0.3) for t in (x, x.float()))
    assert torch.equal(plan.weights, exact.weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plan_tokens(x, 0.3).weights, exact.weights)
    large = torch.full((1, 64, 2), 30000.0, dtype=torch.float16)
    assert plan_tokens(large, 0.3).merge(large).isfinite().all()


def test_what_is_not_finite_stays_in_its_sample_and_zero_tokens_have_cosine_zero() -> None:
    x = tokens(2, 24, 6)
    x[0, 3], x[1, 5] = float("nan"), 0
    plan = plan_tokens(x, 0.1)
    assert {1, 2} <= set(plan.preserved.tolist())
    merged = plan.merge(x)
    assert merged[1].isfinite().all()
    assert merged[0, 12:].isnan().any()
    restored = plan.restore(merged)
    assert restored[0, 3].isnan().all()
    assert restored[1].isfinite().all()


def test_near_ties_keep_gradients_small() -> None:
    near = (torch.ones(1, 24, 6) + 1e-7 * tokens(1, 24, 6)).requires_grad_()
    plan = plan_tokens(near, 0.5)
    plan.restore(plan.merge(near)).square().sum().backward()
    assert near.grad is not None
    assert near.grad.abs().max() < 100


def test_random_partitions_have_a_seed_of_their_own() -> None:
    state = torch.get_rng_state()
    dst, src = split_positions(41, "random", 3, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted([*dst.tolist(), *src.tolist()]) == list(range(41))
    assert len(dst) == 21
    assert torch.equal(split_positions(41, "random", 3, "cpu")[0], dst)
    assert not torch.equal(split_positions(41, "random", 4, "cpu")[0], dst)


def test_wrong_arguments_are_named() -> None:
    x = tokens(2, 9, 4)
    plan = plan_tokens(x, 0.5)
    for call, message in (
        (lambda: plan_tokens(x[0], 0.5), "x: expected floating point tokens"),
        (lambda: plan_tokens(x.long(), 0.5), "x: expected floating point tokens"),
        (lambda: plan_tokens(x, 0.5, 9), "num_prefix_tokens: expected fewer than the 9 tokens"),
        (lambda: plan_tokens(x, 0.5, metric="cosines"), "metric: expected cosine, .*'cosines'"),
        (lambda: plan_tokens(x, 0.5, partition="grid"), "partition: expected alt.* got 'grid'"),
        (lambda: plan.merge(x[:1]), r"merge: expected tokens \[2, 9, C\]"),
        (lambda: plan.restore(x[:, :1]), r"restore: expected tokens \[2, \d, C\]"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
