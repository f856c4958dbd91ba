"""Plans by products of tiles, which run on CUDA without Triton: here on the CPU, against plain
loops in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd import MaMeConfig, plan_merge
from mame_sd.config import Study
from mame_sd.core import tiled_plan
from mame_sd.core.detail import Detail
from mame_sd.core.plan import RowPlan
from mame_sd.core.reference import reference_plan
from mame_sd.core.tiled_plan import TiledPlan
from mame_sd.diffusion.families.keys import GroupedKeys, MergedKeys
from mame_sd.diffusion.layer import Tokens

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CASES: dict[str, tuple[tuple[int, int], dict[str, Any], torch.dtype]] = {
    "cut tiles": ((9, 20), {}, torch.float32),
    "some sources preserved": ((11, 13), {"tiles": 8, "keep": 0.6, "merge": "qkv"}, torch.float16),
    "one destination each": (
        (16, 8),
        {"tiles": 8, "study": Study(stride=(8, 8)), "keep": 0.1},
        torch.bfloat16,
    ),
    "alternating": (
        (16, 16),
        {"study": Study(partition="alternating"), "keep": 0.5},
        torch.float16,
    ),
    "ranked, whole tiles": ((16, 32), {"keep": 0.6, "study": Study(stride=(2, 2))}, torch.float32),
}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiled_plan, "DEVICES", {"cpu"})
    with torch.no_grad():
        yield


def tokens(
    size: tuple[int, int], width: int = 20, dtype: torch.dtype = torch.float32, seed: int = 3
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, size[0] * size[1], width, generator=generator).to(dtype)


def both(
    x: Tensor, config: MaMeConfig, size: tuple[int, int], **more: Any
) -> tuple[TiledPlan, RowPlan]:
    """The plan by tiles, and that of a CPU."""
    plan = plan_merge(x, config, size, **more)
    before, tiled_plan.DEVICES = tiled_plan.DEVICES, set()
    plain = plan_merge(x, config, size, **more)
    tiled_plan.DEVICES = before
    assert type(plan) is TiledPlan
    assert type(plain) is RowPlan
    return plan, plain


@pytest.mark.parametrize("name", CASES)
def test_plans_are_those_of_the_loops(name: str) -> None:
    size, fields, dtype = CASES[name]
    x, config, draw = tokens(size, dtype=dtype), MaMeConfig(**fields), torch.tensor([37])
    leader = torch.tensor([1, 1])
    plan, plain = both(x, config, size, draw=draw, leader=leader)
    led = x[leader].double()
    exact = reference_plan(led, config, size, draw=draw)
    order = torch.arange(plan.tokens_kept).expand(2, -1)
    if not torch.equal(plan.kept, plain.kept):  # preserved sources in another order
        order = plan.kept.argsort(1).gather(1, plain.kept.argsort(1).argsort(1))
    assert torch.equal(plan.kept.expand(2, -1).gather(1, order), plain.kept.expand(2, -1))
    assert torch.equal(order.argsort(1).gather(1, plan.rows), plain.rows)
    assert torch.equal(plan.sizes.gather(1, order), plain.sizes)
    assert torch.equal(plan.weights, plain.weights)
    assert torch.equal(plan.sample_rows, plan.rows[:, plan.positions.sample])
    t = tokens(size, 7, dtype, seed=5)
    y, expected = plan.with_sample(t), exact.merge(t.double())
    merged = y[:, : plan.tokens_kept].double().gather(1, order.unsqueeze(-1).expand(-1, -1, 7))
    torch.testing.assert_close(merged, expected, rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(y[:, : plan.tokens_kept], plan.merge(t))
    assert torch.equal(y[:, plan.tokens_kept :], t[:, plan.positions.sample])
    assert torch.equal(
        plan.restore(plan.merge(t)),
        plain.restore(plan.merge(t).gather(1, order.unsqueeze(-1).expand(-1, -1, 7))),
    )
    found = plan.restore(plan.merge(t), Detail(x, size, plan.merge(x))).double()
    exact_whole = exact.restore(expected, Detail(x.double(), size))
    torch.testing.assert_close(found, exact_whole, rtol=0, atol=20 * TOLERANCE[dtype])
    copies = exact.restore(expected)
    assert (exact_whole - copies).norm() > 20 * (
        found - exact_whole
    ).norm() or dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("size", "keep", "text", "dtype"),
    [
        ((10, 20), 0.25, 0, torch.float16),
        ((10, 20), 0.25, 0, torch.bfloat16),
        ((2, 6, 8), 0.25, 3, torch.float32),
        ((8, 16), 0.6, 5, torch.float16),
    ],
    ids=str,
)
def test_keys_values_and_their_correction(
    size: tuple[int, ...], keep: float, text: int, dtype: torch.dtype
) -> None:
    lie = Tokens(size)
    assert lie.plane is not None
    generator = torch.Generator().manual_seed(1)
    call = {
        name: torch.randn(2, 2, lie.count + text, w, generator=generator).to(dtype)
        for name, w in (("query", 12), ("key", 12), ("value", 17))
    }
    call["value"][..., :12] += call["key"]  # so that means lack something
    x = tokens(lie.plane, 24, dtype)
    plan, plain = both(x, MaMeConfig(keep=keep, study=Study(stride=(2, 2)), merge="kv"), lie.plane)
    attention, shape = F.scaled_dot_product_attention, (2, lie.count + text)
    wide = {name: t.double() for name, t in call.items()}
    for first in {0, text}:  # text after the image, or before it
        found = MergedKeys(plan, lie, shape, first, True, True).attend(attention, dict(call))
        exact = MergedKeys(plain, lie, shape, first, True, True).attend(attention, dict(wide))
        alone = MergedKeys(plain, lie, shape, first, False, True).attend(attention, dict(wide))
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=2 * TOLERANCE[dtype])
        assert (exact - alone).norm() > 4 * (found.double() - exact).norm()
    if not text:
        query = x.unflatten(2, (2, 12)).transpose(1, 2)
        outputs = []
        for made, width in ((plan, dtype), (plain, torch.float64)):
            grouped = GroupedKeys(made)
            keys = grouped.keys_of(x.to(width)).unflatten(2, (2, 12)).transpose(1, 2)
            given = {"query": query.to(width), "key": keys * 2, "value": keys + 1}
            outputs.append(grouped.attend(attention, given).double())
        torch.testing.assert_close(*outputs, rtol=0, atol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize(("bad", "position"), [(math.nan, 0), (math.inf, 1), (math.nan, 5)])
def test_what_is_not_finite_stays_in_its_sample_and_tile(bad: float, position: int) -> None:
    x = tokens((16, 32))
    x[0, position, 5] = bad
    y = plan_merge(x, MaMeConfig(tiles=16), (16, 32)).merge(x)
    assert y[1].isfinite().all()
    assert not y[0].isfinite().all()
    assert y[0].isfinite().all(1).sum() >= y.shape[1] // 2


@pytest.mark.parametrize("scale", [1e-30, 0.0, 1e30])
def test_scale_does_not_matter_and_constant_images_stay(scale: float) -> None:
    x = tokens((8, 8))
    power = 2.0 ** round(math.log2(scale)) if scale else 0.0
    plan = plan_merge(x * power, MaMeConfig(), (8, 8))
    if scale:
        assert torch.equal(plan.rows, plan_merge(x, MaMeConfig(), (8, 8)).rows)
    same = torch.full((1, 64, 16), 6e4).half()
    plan = plan_merge(same, MaMeConfig(merge="qkv", keep=0.5), (8, 8))
    assert torch.equal(plan.restore(plan.merge(same)), same)


def test_gradients_and_float64_take_the_other_form() -> None:
    x = tokens((8, 8))
    assert type(plan_merge(x.double(), MaMeConfig(), (8, 8))) is RowPlan
    plan, plain = both(x, MaMeConfig(), (8, 8))
    grads = []
    for made in (plan, plain):
        with torch.enable_grad():
            wanted = x.clone().requires_grad_()
            made.restore(made.merge(wanted)).square().sum().backward()
        grads.append(wanted.grad)
    torch.testing.assert_close(*grads)
