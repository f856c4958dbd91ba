"""Picked keys and values: the rows that the loops keep, unchanged, and nothing compared where the
draw decides alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mame_sd.config import MaMeConfig
from mame_sd.core import pick_plan
from mame_sd.core.merge import plan_merge
from mame_sd.core.owners import owners_of
from mame_sd.core.reference import reference_plan
from tests.builders.settings import nested

SETTINGS: list[dict[str, Any]] = [
    {"keep": 0.25},
    {"keep": 0.4},
    {"keep": 1.0},
    {"keep": 0.6, "partition": "alternating", "tiles": 0},
    {"keep": 0.5, "tiles": 4, "stride": (2, 2)},
    {"tau": 0.2},
    {"tau": 0.1, "tiles": 3, "partition": "random", "redraw": True},
    {"tau": -0.8, "metric": "euclidean"},
]
each = pytest.mark.parametrize("fields", SETTINGS, ids=str)


def picking(**fields: Any) -> MaMeConfig:
    return MaMeConfig(**nested({"weights": "pick", **fields}))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@each
@pytest.mark.parametrize("draw", [None, 0, 3], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (3, 1), (6, 10), (5, 7)], ids=str)
def test_rows_equal_the_loops(
    size: tuple[int, int], draw: int | None, fields: dict[str, Any]
) -> None:
    special, config = size[0] % 3, picking(**fields)
    x, t = (
        tokens(2, special + size[0] * size[1], 6),
        tokens(2, special + size[0] * size[1], 3, seed=1),
    )
    row = None if draw is None else torch.tensor([draw])
    plan = plan_merge(x, config, size, special, row)
    slow = reference_plan(x, config, size, special, row)
    assert torch.equal(plan.merge(t).double(), slow.merge(t))
    kept = plan.kept.expand(2, -1)
    assert torch.equal(plan.merge(t), torch.stack([t[b, kept[b]] for b in range(2)]))
    assert torch.equal(plan.counts, torch.ones_like(plan.counts))
    assert torch.equal(plan.counts.double(), slow.counts)
    assert not plan.weights.any()
    assert not slow.weights.any()
    owners = owners_of(plan)
    assert [sorted(o[o >= 0].tolist()) for o in owners] == [sorted(k.tolist()) for k in kept]


def test_destinations_alone_are_taken_without_comparing_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("similarity was computed")

    monkeypatch.setattr(pick_plan, "similarity_of", refuse)
    plan = plan_merge(tokens(3, 64, 4), picking(keep=0.25))
    assert plan.kept.shape == (16,), "one choice for all samples"
    plan_merge(tokens(3, 64, 4), picking(keep=1.0))
    with pytest.raises(AssertionError, match="similarity was computed"):
        plan_merge(tokens(3, 64, 4), picking(keep=0.3))


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_and_gradients_to_the_kept_tokens_alone(
    dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    x = tokens(2, 60, 4).to(dtype).requires_grad_()
    plan = plan_merge(x, picking(**fields), (6, 10))
    y = plan.merge(x)
    assert y.dtype == dtype
    y.sum().backward()
    want = torch.zeros(2, 60).scatter_(1, plan.kept.expand(2, -1), 1.0)
    assert x.grad is not None
    assert torch.equal(x.grad[..., 0].float(), want)


def test_restoring_says_what_to_do() -> None:
    plan = plan_merge(tokens(1, 64, 4), picking())
    with pytest.raises(
        ValueError, match="restore: expected a plan that merges, got one of weights='pick'"
    ):
        plan.restore(tokens(1, 16, 4))


@pytest.mark.parametrize("fields", SETTINGS[:3], ids=str)
def test_one_graph_for_all_draws(fields: dict[str, Any]) -> None:
    torch._dynamo.reset()
    config, x = picking(**fields), tokens(2, 64, 4)

    def merged(x: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
        return plan_merge(x, config, draw=draw).merge(x)

    compiled = torch.compile(merged, backend="eager", fullgraph=True)
    found = [compiled(x, torch.tensor([0]))]
    with torch.compiler.set_stance("fail_on_recompile"):
        found += [compiled(x, torch.tensor([i])) for i in (1, 2, 3)]
    for i, y in enumerate(found):
        assert torch.equal(y, merged(x, torch.tensor([i])))
