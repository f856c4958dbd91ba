"""The fast path against the float64 loops, values and gradients, and the properties that hold for
any input.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.detail import Detail
from mame_sd.core.merge import plan_merge
from mame_sd.core.owners import owners_of
from mame_sd.core.partition import positions
from mame_sd.core.plan import Plan
from mame_sd.core.reference import ReferencePlan, reference_plan
from tests.builders.tokens import detail_of, tokens

PARTITIONS = ("alternating", "sequential", "random", "grid")
SIZES = {
    1: (1, 1),
    2: (1, 2),
    3: (3, 1),
    5: (1, 5),
    7: (7, 1),
    50: (5, 10),
    197: (1, 197),
    256: (16, 16),
}
SETTINGS: list[dict[str, Any]] = [
    {"tau": 0.2},
    {"tau": 0.2, "refine": False},
    {"tau": 0.2, "variant": "paper"},
    {"tau": 0.1, "tiles": 3},
    {"keep": 0.5},
    {"keep": 0.6, "tiles": 4},
    {"keep": 0.7, "refine": False, "tiles": 0},
    {"keep": 0.01, "metric": "euclidean"},
    {"tau": 0.3, "metric": "dot"},
    {"tau": -0.8, "metric": "euclidean"},
    {"tau": 0.1, "metric": "softmax", "tiles": 4},
    {"tau": 0.2, "weights": "best"},
    {"keep": 0.5, "weights": "best", "tiles": 4},
    {"keep": 0.25, "weights": "best", "tiles": 2},
    {"keep": 0.5, "weights": "best", "tiles": 4, "merge": "qkv", "detail": True},
    {"tau": 0.2, "weights": "best", "merge": "qkv", "detail": True},
]
IDS = ["-".join(f"{k}={v}" for k, v in setting.items()) for setting in SETTINGS]


def config(**fields: Any) -> MaMeConfig:
    tau = {"weights": "average"} if "tau" in fields else {}  # soft weights, as the paper has them
    return MaMeConfig.from_dict({"tiles": 0, **tau, **fields})


def dense(plan: Plan) -> Tensor:
    """W^F [B, M, N] of a plan with any tiles, in the order of positions.dst and positions.src."""
    pos, w = plan.positions, plan.weights
    full = w.new_zeros(w.shape[0], pos.L, pos.L)
    for t in range(pos.blocks):
        dst, src = pos.dst_slots[t], pos.src_slots[t]
        for i, p in enumerate(dst.tolist()):
            full[:, p].index_add_(1, src, w[:, t, i])
    return full[:, pos.dst][:, :, pos.src]


def restored(
    plan: Plan, slow: ReferencePlan, y: torch.Tensor, detail: Detail | None
) -> tuple[torch.Tensor, ...]:
    return plan.restore(y, detail).double(), slow.restore(y, detail)


def assert_same(plan: Plan, slow: ReferencePlan, tol: float) -> None:
    b = slow.weights.shape[0]
    preserved = torch.zeros(b, len(slow.src), dtype=torch.bool)
    for mask, indices in zip(preserved, slow.preserved, strict=True):
        mask[indices] = True
    assert plan.positions.dst.tolist() == slow.dst
    assert plan.tokens_kept == slow.special + len(slow.dst) + len(slow.preserved[0])
    assert torch.equal(plan.preserved, preserved)
    torch.testing.assert_close(dense(plan).double(), slow.weights, rtol=0, atol=tol)
    torch.testing.assert_close(plan.counts.double(), slow.counts, rtol=tol, atol=tol)


@pytest.mark.parametrize("fields", SETTINGS, ids=IDS)
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 50])
def test_values_equal_the_loops(length: int, partition: str, fields: dict[str, Any]) -> None:
    cfg, size, special = config(partition=partition, **fields), SIZES[length], length % 3
    x, t = tokens(2, special + length, 6), tokens(2, special + length, 3, seed=1)
    plan, slow = plan_merge(x, cfg, size, special), reference_plan(x, cfg, size, special)
    assert_same(plan, slow, 2e-5)
    y = plan.merge(t)
    torch.testing.assert_close(y.double(), slow.merge(t), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        *restored(plan, slow, y, detail_of(x, cfg, size, special)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "fields",
    [{}, {"tiles": 4}, {"tiles": 2, "keep": 0.25}, {"merge": "qkv", "partition": "random"}],
    ids=str,
)
@pytest.mark.parametrize("draw", [0, 1, 5])
def test_values_of_each_draw_equal_the_loops(draw: int, fields: dict[str, Any]) -> None:
    cfg = MaMeConfig.from_dict({"keep": 0.4, "min_tokens": 1, **fields})
    x, row = tokens(2, 60, 6), torch.tensor([draw])
    plan, slow = plan_merge(x, cfg, (6, 10), draw=row), reference_plan(x, cfg, (6, 10), draw=row)
    assert_same(plan, slow, 2e-5)
    detail = detail_of(x, cfg, (6, 10))
    torch.testing.assert_close(*restored(plan, slow, plan.merge(x), detail), rtol=1e-5, atol=1e-5)
    owners = owners_of(plan)
    assert all(owners[:, p].eq(p).all() for p in slow.dst)


@pytest.mark.parametrize("fields", [{"tau": 0.5}, {"keep": 0.6, "tiles": 6}], ids=str)
@pytest.mark.parametrize("length", [197, 256])
def test_values_equal_the_loops_at_length(length: int, fields: dict[str, Any]) -> None:
    x, cfg = tokens(1, length, 6), config(partition="alternating", **fields)
    assert_same(plan_merge(x, cfg, SIZES[length]), reference_plan(x, cfg, SIZES[length]), 5e-5)


@pytest.mark.parametrize("tau", [-1.0, -0.5, 0.0, 0.3, 0.6, 0.8, 0.95, 0.999, 1.0])
def test_values_equal_the_loops_over_the_range_of_tau(tau: float) -> None:
    x, cfg = tokens(2, 50, 4), config(tau=tau, partition="grid")
    assert_same(plan_merge(x, cfg, (5, 10)), reference_plan(x, cfg, (5, 10)), 1e-4)


@pytest.mark.parametrize("fields", SETTINGS, ids=IDS)
@pytest.mark.parametrize(("length", "partition"), [(5, "alternating"), (7, "random"), (12, "grid")])
def test_gradients_equal_the_loops(length: int, partition: str, fields: dict[str, Any]) -> None:
    cfg, size = config(partition=partition, **fields), (3, 4) if length == 12 else (1, length)
    x = tokens(2, length + 1, 5, dtype=torch.float64)
    grads = []
    for make in (plan_merge, reference_plan):
        feature, t = (
            x.clone().requires_grad_(),
            tokens(2, length + 1, 3, seed=2).double().requires_grad_(),
        )
        plan = make(feature, cfg, size, 1)
        y = plan.merge(t)
        z = plan.restore(y * y, detail_of(feature, cfg, size, 1))
        (z * torch.linspace(-1, 1, z.numel(), dtype=torch.float64).view_as(z)).sum().backward()
        grads.append((torch.zeros_like(x) if feature.grad is None else feature.grad, t.grad))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-11)
    reached = grads[0][1]
    assert reached is not None
    assert bool((reached.abs().sum(-1) > 0).all()), "a token without gradient"


@pytest.mark.parametrize("fields", SETTINGS, ids=IDS)
def test_working_in_place_changes_nothing(fields: dict[str, Any]) -> None:
    x, cfg = tokens(2, 35, 5), config(partition="grid", **fields)
    lean, kept = plan_merge(x, cfg, (5, 7)), plan_merge(x.clone().requires_grad_(), cfg, (5, 7))
    assert torch.equal(lean.weights, kept.weights)
    assert torch.equal(x, tokens(2, 35, 5)), "the input was written to"


@pytest.mark.parametrize(
    "fields", [{"tau": 0.3}, {"keep": 0.5}, {"keep": 0.5, "tiles": 4}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_decide_as_fp64_does(dtype: torch.dtype, fields: dict[str, Any]) -> None:
    x, cfg = tokens(2, 50, 8, dtype=dtype), config(partition="grid", **fields)
    plan, slow = plan_merge(x, cfg, (5, 10)), reference_plan(x, cfg, (5, 10))
    assert_same(plan, slow, 2e-5)
    assert plan.weights.dtype == torch.float32
    y = plan.merge(x)
    z = plan.restore(y)
    assert y.dtype == z.dtype == dtype
    tol = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), slow.merge(x), rtol=tol, atol=tol)
    torch.testing.assert_close(z.double(), slow.restore(y), rtol=tol, atol=tol)


def test_autocast_is_stepped_out_of() -> None:
    x, cfg = tokens(2, 64, 8), config(tau=0.3)
    plan = plan_merge(x, cfg)
    y = plan.merge(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = plan_merge(x, cfg)
        assert torch.equal(inside.weights, plan.weights)
        assert torch.equal(inside.merge(x), y)
        assert torch.equal(inside.restore(y), plan.restore(y))


def test_fp16_sums_of_many_large_tokens_stay_in_range() -> None:
    x = torch.full((1, 256, 4), 3e4, dtype=torch.float16)
    plan = plan_merge(x, config(keep=0.01, partition="grid", stride=(16, 16)), (16, 16))
    assert plan.tokens_kept == 3
    assert torch.equal(plan.restore(plan.merge(x)), x)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize(
    "fields", [{"tau": 1.0}, {"keep": 1.0}, {"keep": 1.0, "tiles": 2}], ids=str
)
def test_tau_one_and_keep_one_merge_nothing(partition: str, fields: dict[str, Any]) -> None:
    x = torch.cat([tokens(1, 15, 3), torch.ones(1, 15, 3)], 1).repeat(2, 1, 1)
    plan = plan_merge(x, config(partition=partition, **fields), (5, 6))
    assert plan.tokens_kept == plan.tokens_in == 30
    assert not plan.weights.any()
    assert torch.equal(plan.restore(plan.merge(x)), x)
    assert torch.equal(owners_of(plan), torch.arange(30).repeat(2, 1))


@pytest.mark.parametrize("fields", [*SETTINGS[:2], *SETTINGS[3:]], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_columns_sum_to_one_or_are_zero(fields: dict[str, Any], seed: int) -> None:
    x = tokens(3, 54, 4, seed=seed)
    x[0, ::3] = x[0, 0]  # identical tokens
    x[1, ::5] = 0.0  # zero tokens
    x[2] = x[2] * 1e-3 + 1  # nearly constant
    plan = plan_merge(x, config(partition="grid", **fields), (6, 9))
    merged = (~plan.preserved).double()
    torch.testing.assert_close(dense(plan).double().sum(1), merged, rtol=0, atol=1e-6)
    assert bool((plan.weights >= 0).all())
    assert not dense(plan).transpose(1, 2)[plan.preserved].any(), (
        "a preserved column is not exactly 0"
    )


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "fields", [{"tau": 0.8}, {"keep": 0.5}, {"keep": 0.5, "tiles": 4}, {"keep": 0.3}], ids=str
)
def test_a_constant_field_survives(
    partition: str, dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    x = torch.tensor([0.5, -2.0, 0.0, 4.0]).to(dtype).expand(2, 64, 4)
    cfg = config(partition=partition, **fields)
    plan = plan_merge(x, cfg)
    kept = max(plan.positions.M, round(64 * (cfg.keep or 0)))
    assert plan.tokens_kept == kept
    z = plan.restore(plan.merge(x))
    if cfg.keep is not None:  # ties go to one destination each, with weight 1
        assert torch.equal(z, x)
    torch.testing.assert_close(z, x)


def test_keep_counts_hold_for_every_sample_and_half_stays_half() -> None:
    x = torch.cat([torch.ones(1, 64, 4), tokens(2, 64, 4), torch.zeros(1, 64, 4)])
    for share in (0.25, 0.26, 0.375, 0.5, 0.9):
        plan = plan_merge(x, config(keep=share, partition="grid"))
        assert plan.tokens_kept == round(share * 64)
        assert bool(((~plan.preserved).sum(1) == 64 - plan.tokens_kept).all())
    assert (
        plan_merge(x, config(keep=0.01, partition="grid", stride=(2, 2))).tokens_kept == 16
    )  # the destinations


def test_ties_are_broken_by_position() -> None:
    x = torch.ones(1, 8, 2)
    plan = plan_merge(
        x, config(keep=0.75, partition="alternating")
    )  # sources 1, 3, 5, 7: two merge
    assert plan.preserved.tolist() == [[False, False, True, True]]
    assert owners_of(plan).tolist() == [[0, 0, 2, 0, 4, 5, 6, 7]]
    tiled = plan_merge(
        torch.ones(1, 16, 2), config(keep=0.875, partition="alternating", tiles=2), (4, 4)
    )
    assert owners_of(tiled)[0].tolist() == [0, 0, 2, 2, *range(4, 16)]


def test_a_single_candidate_takes_the_source_whole() -> None:
    x = torch.tensor([[[1.0, 0.0], [1.0, 0.05], [0.0, 1.0], [-1.0, 0.0]]])
    plan = plan_merge(x, config(tau=0.9, partition="alternating"))
    assert plan.weights[0, 0].tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert owners_of(plan).tolist() == [[0, 0, 2, 3]]
    torch.testing.assert_close(plan.merge(x)[0, 0], torch.tensor([1.0, 0.025]))


@pytest.mark.parametrize(
    "fields", [{"tau": 0.4}, {"keep": 0.4, "tiles": 4}, {"keep": 0.25}], ids=str
)
def test_best_weights_give_each_source_to_one_destination(fields: dict[str, Any]) -> None:
    x = tokens(2, 64, 6)
    plan = plan_merge(x, config(weights="best", partition="grid", **fields), (8, 8))
    w = dense(plan)
    assert set(w.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(w.sum(1).bool(), ~plan.preserved)
    average = plan_merge(x, config(partition="grid", **fields), (8, 8))
    assert torch.equal(plan.preserved, average.preserved), (
        "how weights are shared decides nothing on who merges"
    )


def test_near_ties_agree_with_fp64_and_keep_gradients_small() -> None:
    x = 1 + 1e-6 * tokens(2, 20, 4, dtype=torch.float64)
    feature = x.float().requires_grad_()
    plan = plan_merge(feature, config(tau=0.8, partition="alternating"))
    slow = reference_plan(x.float(), config(tau=0.8, partition="alternating"))
    torch.testing.assert_close(plan.weights[:, 0].double(), slow.weights, rtol=0, atol=1e-5)
    plan.restore(
        plan.merge(torch.ones_like(x).float() * torch.arange(20)[:, None])
    ).square().sum().backward()
    assert feature.grad is not None
    assert feature.grad.abs().max() < 100


def test_zero_tokens_have_similarity_zero() -> None:
    x = tokens(1, 12, 4)
    x[0, 5] = 0
    x.requires_grad_()
    plan = plan_merge(x, config(tau=-0.0, partition="alternating"))
    assert bool(plan.preserved[0, 2])
    below = plan_merge(x, config(tau=-0.5, partition="alternating"))
    torch.testing.assert_close(below.weights[0, 0, :, 2], torch.full((6,), 1 / 6))
    below.restore(below.merge(x)).sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e19, 1e37])
def test_tiny_and_huge_tokens_have_their_cosine(scale: float, dtype: torch.dtype) -> None:
    x = tokens(1, 24, 8).to(dtype)
    x[0, 7] = 0
    scales = torch.where(torch.arange(24) % 3 == 0, scale, 1.0).to(dtype).unsqueeze(-1)
    cfg = config(tau=-0.5, partition="alternating")
    plans, grads = [], []
    for t in (x.double(), x * scales):
        feature = t.clone().requires_grad_()
        plan = plan_merge(feature, cfg)
        plan.weights.double().square().sum().backward()
        assert feature.grad is not None
        plans.append(plan)
        grads.append(feature.grad.double())
    # Rounding by the scale itself is at most one unit of the dtype; gradients of a token grow as it
    # shrinks.
    tol = 0.02 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(plans[1].weights.double(), plans[0].weights, atol=tol, rtol=tol)
    torch.testing.assert_close(plan_merge(x * scales, cfg).weights, plans[1].weights)
    assert bool(
        (plans[1].weights[0, 0, :, 3] > 0).all()
    )  # zero token: cosine 0 is above tau everywhere
    if scale > 1e-37 or dtype == torch.float64:
        torch.testing.assert_close(grads[1] * scales.double(), grads[0], atol=2 * tol, rtol=2 * tol)


def test_preserved_tokens_come_back_bit_equal_and_special_ones_too() -> None:
    x = tokens(2, 66, 4)
    plan = plan_merge(x, config(tau=0.9, partition="grid"), (8, 8), special=2)
    assert 2 + 16 < plan.tokens_kept < 66
    z = plan.restore(plan.merge(x))
    kept = plan.positions.src[plan.preserved[0]] + 2
    assert torch.equal(z[:, kept], x[:, kept])
    assert torch.equal(z[:, :2], x[:, :2])
    assert owners_of(plan)[:, kept].tolist() == [kept.tolist()] * 2


@pytest.mark.parametrize("fields", [{"keep": 0.5, "tiles": 4}, {"tau": 0.5}], ids=str)
def test_permuting_samples_permutes_results(fields: dict[str, Any]) -> None:
    x, order = tokens(4, 64, 6), torch.tensor([2, 0, 3, 1])
    plan, moved = plan_merge(x, config(**fields)), plan_merge(x[order], config(**fields))
    torch.testing.assert_close(
        moved.restore(moved.merge(x[order])), plan.restore(plan.merge(x))[order]
    )
    assert torch.equal(moved.preserved, plan.preserved[order])


def test_per_sample_results_do_not_depend_on_neighbours_and_shared_ones_do() -> None:
    x = torch.cat([torch.ones(1, 64, 4), tokens(1, 64, 4)])
    both, alone = plan_merge(x, config(keep=0.5)), plan_merge(x[1:], config(keep=0.5))
    assert torch.equal(both.preserved[1:], alone.preserved)
    tau = config(tau=0.8)
    first, second = plan_merge(x[:1], tau), plan_merge(x[1:], tau)
    assert torch.equal(plan_merge(x, tau).preserved[0], (first.preserved | second.preserved)[0])


def test_any_leading_dimensions() -> None:
    x, cfg = tokens(2, 3, 16, 5), config(keep=0.5)
    plan, flat = plan_merge(x, cfg), plan_merge(x.flatten(0, 1), cfg)
    y = plan.merge(x)
    assert y.shape == (2, 3, 8, 5)
    assert torch.equal(y.flatten(0, 1), flat.merge(x.flatten(0, 1)))
    assert plan.restore(y).shape == x.shape
    assert (plan.counts.shape, plan.preserved.shape) == (
        (2, 3, plan.positions.M),
        (2, 3, plan.positions.N),
    )
    assert owners_of(plan).shape == (2, 3, 16)
    assert plan.weights.shape[:3] == (2, 3, 1)
    one = plan_merge(x[0, 0], cfg)
    assert torch.equal(one.restore(one.merge(x[0, 0])), plan.restore(y)[0, 0])


def test_tiles_of_one_destination_are_means_that_compare_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mame_sd.core.merge.nearest", None)
    x, t = tokens(2, 6 * 10, 4), tokens(2, 6 * 10, 3, seed=1)
    for draw in (torch.tensor([0]), torch.tensor([3])):
        plan = plan_merge(
            x, MaMeConfig(keep=0.25, tiles=2), (6, 10), draw=draw, leader=torch.tensor([1, 1])
        )
        cells = (
            torch.nn.functional.avg_pool2d(t.transpose(1, 2).unflatten(2, (6, 10)), 2)
            .flatten(2)
            .transpose(1, 2)
        )
        torch.testing.assert_close(plan.merge(t), cells)


def test_tiles_keep_merging_inside_a_tile() -> None:
    x = torch.ones(1, 6 * 10, 3)
    plan = plan_merge(x, config(keep=0.01, tiles=4, partition="grid", stride=(2, 2)), (6, 10))
    rows, columns = torch.arange(60) // 10 // 4, torch.arange(60) % 10 // 4
    owner = owners_of(plan)[0]
    assert torch.equal(rows[owner], rows)
    assert torch.equal(columns[owner], columns)
    assert plan.tokens_kept == plan.positions.M == 15


@pytest.mark.parametrize(
    "fields", [{"tau": 0.8}, {"keep": 0.5}, {"keep": 0.5, "tiles": 4}, {"tau": -1.0}], ids=str
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 1])
def test_nan_is_never_hidden_and_never_leaves_its_sample(
    where: int, bad: float, fields: dict[str, Any]
) -> None:
    x = tokens(2, 64, 4)
    x[0, where, 2] = bad
    plan = plan_merge(x, config(**fields))
    y = plan.merge(x)
    z = plan.restore(y)
    assert not bool(y[0].isfinite().all())
    assert not bool(z[0, where].isfinite().all())
    assert bool(z[1].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_plans_gradient_is_the_same_at_every_image(dtype: torch.dtype) -> None:
    plan = plan_merge(tokens(2, 63, 5, dtype=dtype), config(keep=0.5), (7, 9))
    share = tokens(2, plan.tokens_kept, 5, seed=1, dtype=dtype)  # of each merged token in the loss
    grads = []
    for t in (tokens(2, 63, 5, seed=2, dtype=dtype), torch.full((2, 63, 5), 0.1, dtype=dtype)):
        merged = plan.merge(t.requires_grad_())
        grads.append(torch.autograd.grad((merged * share).sum(), t)[0])
    assert torch.equal(merged, torch.full_like(merged, 0.1))
    assert torch.equal(*grads)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("metric", ["cosine", "euclidean", "dot", "softmax"])
def test_a_source_of_nan_is_preserved_with_tau_and_the_last_to_merge_with_keep(
    metric: str, grad: bool
) -> None:
    x = tokens(1, 32, 4).requires_grad_(grad)
    bad = torch.zeros(1, 32, 4)
    bad[0, [1, 9], 2] = float("nan")  # sources 0 and 4 of 16
    for fields in ({"tau": -1.0 if metric == "euclidean" else 0.0}, {"keep": 0.75}, {"keep": 0.6}):
        plan = plan_merge(x + bad, config(partition="alternating", metric=metric, **fields))
        assert bool(plan.preserved[0, [0, 4]].all())
        assert bool(plan.weights.isfinite().all())
        z = plan.restore(plan.merge(x + bad))
        assert bool(z[0, [1, 9], 2].isnan().all())
    # With a budget that needs every source the others merge by the lowest of their own, and NaN is
    # seen where it went.
    plan = plan_merge(x + bad, config(partition="alternating", metric=metric, keep=0.5))
    assert not bool(plan.preserved.any())
    others = [j for j in range(16) if j not in (0, 4)]
    torch.testing.assert_close(plan.weights[0, 0][:, others].sum(0), torch.ones(14))
    assert bool(plan.restore(plan.merge(x + bad))[0, [1, 9]].isnan().any(-1).all())


def test_a_plan_made_in_inference_mode_first_does_not_spoil_training() -> None:
    cfg = config(keep=0.5, partition="grid", stride=(3, 2))
    with torch.inference_mode():
        first = plan_merge(tokens(1, 36, 4), cfg)
        first.restore(first.merge(tokens(1, 36, 4)))
    x = tokens(1, 36, 4).requires_grad_()
    plan = plan_merge(x, cfg)
    plan.restore(plan.merge(x)).square().sum().backward()
    assert x.grad is not None


def test_the_global_random_state_is_left_alone() -> None:
    state = torch.random.get_rng_state()
    plan_merge(tokens(1, 38, 4), config(tau=0.5, partition="random", seed=11))
    torch.random.set_rng_state(state)
    plan_merge(torch.ones(1, 39, 4), config(tau=0.5, partition="random", seed=12))
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's own, while it traces
@pytest.mark.parametrize(
    "fields", [{"keep": 0.5, "tiles": 4}, {"keep": 0.5, "partition": "random"}], ids=str
)
def test_a_budget_compiles_into_one_graph(fields: dict[str, Any]) -> None:
    def through(x: Tensor) -> Tensor:
        plan = plan_merge(x, cfg, (12, 10))
        return plan.restore(plan.merge(x))

    cfg, x = config(**fields), tokens(2, 120, 4)
    compiled = torch.compile(through, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), through(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "fields", [{"tau": 0.3}, {"keep": 0.5}, {"keep": 0.5, "tiles": 4}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_decides_as_the_loops_do(dtype: torch.dtype, fields: dict[str, Any]) -> None:
    x, cfg = tokens(2, 50, 8, dtype=dtype), config(partition="grid", **fields)
    plan, slow = plan_merge(x.cuda(), cfg, (5, 10)), reference_plan(x, cfg, (5, 10))
    assert torch.equal(plan.preserved.cpu(), plan_merge(x, cfg, (5, 10)).preserved)
    torch.testing.assert_close(dense(plan).cpu().double(), slow.weights, rtol=0, atol=2e-5)
    tol = 1e-5 if dtype == torch.float32 else 16 * torch.finfo(dtype).eps
    y = plan.merge(x.cuda())
    torch.testing.assert_close(y.cpu().double(), slow.merge(x), rtol=tol, atol=tol)
    torch.testing.assert_close(
        plan.restore(y).cpu().double(), slow.restore(y.cpu()), rtol=tol, atol=tol
    )


def test_wrong_shapes_are_named() -> None:
    plan = plan_merge(tokens(2, 16, 4), config(keep=0.5))
    with pytest.raises(ValueError, match=r"merge: expected .*\[2, 16, 'C'\].*got \[2, 15, 4\]"):
        plan.merge(torch.ones(2, 15, 4))
    with pytest.raises(ValueError, match=r"restore: expected .*\[2, 8, 'C'\].*got \[1, 8, 4\]"):
        plan.restore(torch.ones(1, 8, 4))
    with pytest.raises(ValueError, match=r"x: expected floating point .*int64"):
        plan_merge(torch.ones(2, 16, 4, dtype=torch.long), config(keep=0.5))
    with pytest.raises(ValueError, match="x: expected floating point"):
        plan_merge(torch.ones(4), config(keep=0.5))
    with pytest.raises(ValueError, match="special: expected fewer than the 16 tokens"):
        plan_merge(torch.ones(16, 4), config(keep=0.5), special=16)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_made_up_input_equals_the_loops(data: st.DataObject) -> None:
    h, w = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    b, special = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 2))
    # Small integers and d = 4: dot products and their division by 2 are exact, so ties are ties in
    # both.
    count = b * (special + h * w) * 4
    values = data.draw(st.lists(st.integers(-2, 2), min_size=count, max_size=count))
    x = torch.tensor(values, dtype=torch.float32).view(b, special + h * w, 4)
    limit = data.draw(
        st.sampled_from([{"tau": -1.0}, {"tau": 0.0}, {"tau": 1.5}, {"keep": 0.3}, {"keep": 0.7}])
    )
    cfg = config(
        metric="dot",
        partition=data.draw(st.sampled_from(PARTITIONS)),
        tiles=data.draw(st.sampled_from([0, 2, 3])),
        refine=data.draw(st.booleans()),
        weights=data.draw(st.sampled_from(["average", "best"])),
        stride=data.draw(st.sampled_from([(2, 2), (1, 2), (3, 1)])),
        **limit,
    )
    plan, slow = plan_merge(x, cfg, (h, w), special), reference_plan(x, cfg, (h, w), special)
    assert_same(plan, slow, 1e-5)
    y = plan.merge(x)
    torch.testing.assert_close(y.double(), slow.merge(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        *restored(plan, slow, y, detail_of(x, cfg, (h, w), special)), rtol=1e-5, atol=1e-5
    )
    owners = owners_of(plan)
    assert torch.equal(owners.gather(1, owners), owners)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), tau=st.floats(-1, 1), length=st.integers(1, 30))
def test_made_up_thresholds_leave_columns_whole(seed: int, tau: float, length: int) -> None:
    x = tokens(2, length, 3, seed=seed)
    plan = plan_merge(x, config(tau=tau, partition="alternating"))
    torch.testing.assert_close(plan.weights[:, 0].sum(1), (~plan.preserved).float())
    assert plan.tokens_kept == positions(
        length, plan_config := config(tau=tau, partition="alternating")
    ).M + int(plan.preserved[0].sum()), plan_config
