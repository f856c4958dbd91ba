"""Samples that merge alike: who leads, and plans by the leaders' tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mame_sd.config import MaMeConfig
from mame_sd.core.merge import plan_merge
from mame_sd.core.pairs import leaders, leaders_in
from mame_sd.core.reference import reference_plan

SETTINGS: list[dict[str, Any]] = [
    {},
    {"keep": 0.4, "stride": (2, 2)},
    {"tau": 0.2},
    {"merge": "qkv", "keep": 0.5},
    {"weights": "average", "keep": 0.5},
    {"weights": "average", "tau": 0.1, "tiles": 3},
    {"weights": "pick", "keep": 0.4},
    {"weights": "pick", "tau": 0.1},
    {"preset": "plain", "tau": 0.1},
]


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_second_half_leads_where_both_are_the_same_latents() -> None:
    x = tokens(2, 4, 8, 8)
    found = leaders(torch.cat([x, x]))
    assert found is not None
    assert found.tolist() == [2, 3, 2, 3]


@pytest.mark.parametrize("where", [(0, 0, 0, 0), (1, 3, 7, 7)], ids=str)
def test_each_leads_itself_where_one_number_differs(where: tuple[int, ...]) -> None:
    x = tokens(2, 4, 8, 8)
    twice = torch.cat([x, x])
    twice[where] += 1
    found = leaders(twice)
    assert found is not None
    assert found.tolist() == [0, 1, 2, 3]


def test_nobody_leads_an_odd_batch() -> None:
    assert leaders(tokens(1, 4, 8, 8).expand(3, -1, -1, -1)) is None


def test_frames_lead_frame_by_frame() -> None:
    leader = torch.tensor([1, 1])
    assert leaders_in(leader, tokens(6, 5, 3)).tolist() == [3, 4, 5, 3, 4, 5]  # type: ignore[union-attr]
    assert leaders_in(leader, tokens(3, 5, 3)) is None
    assert leaders_in(None, tokens(2, 5, 3)) is None


@pytest.mark.parametrize("compiling", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("leader", [[1, 1], [0, 1], [1, 0], [2, 3, 2, 3]], ids=str)
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_plans_equal_the_loops(
    fields: dict[str, Any], leader: list[int], compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiling:  # what a graph does, which knows no values
        monkeypatch.setattr("mame_sd.core.merge.torch.compiler.is_compiling", lambda: True)
    config, size, who = MaMeConfig(**fields), (6, 9), torch.tensor(leader)
    x, t = tokens(len(leader), 54, 6), tokens(len(leader), 54, 3, seed=1)
    plan = plan_merge(x, config, size, leader=who)
    monkeypatch.undo()
    slow = reference_plan(x, config, size, leader=who)
    merged = plan.merge(t)
    torch.testing.assert_close(merged.double(), slow.merge(t), rtol=1e-5, atol=1e-5)
    if config.weights != "pick":
        torch.testing.assert_close(plan.restore(merged).double(), slow.restore(merged), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_a_sample_that_leads_merges_as_by_itself(fields: dict[str, Any]) -> None:
    config, x = MaMeConfig(**fields), tokens(2, 54, 6)
    both, alone = plan_merge(x, config, (6, 9), leader=torch.tensor([1, 1])), plan_merge(x[1:], config, (6, 9))
    for sample in range(2):
        t = tokens(2, 54, 3, seed=1)
        torch.testing.assert_close(both.merge(t)[sample], alone.merge(t[sample : sample + 1])[0])
