"""Samples that merge alike: who leads, and plans by the leaders' tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mame_sd.config import MaMeConfig
from mame_sd.core.merge import plan_merge
from mame_sd.core.pairs import leaders, leaders_of_chunks
from mame_sd.core.reference import reference_plan
from tests.builders.settings import nested
from tests.builders.tokens import detail_of

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


@pytest.mark.parametrize("prompt_first", [False, True])
def test_the_half_with_the_prompt_leads_where_both_are_the_same_input(prompt_first: bool) -> None:
    x = tokens(2, 4, 8, 8)
    expected = [0, 1, 0, 1] if prompt_first else [2, 3, 2, 3]
    assert leaders(torch.cat([x, x]), prompt_first).tolist() == expected


@pytest.mark.parametrize("where", [(0, 0, 0, 0), (1, 3, 7, 7)], ids=str)
def test_each_leads_itself_where_one_number_differs(where: tuple[int, ...]) -> None:
    x = tokens(2, 4, 8, 8)
    twice = torch.cat([x, x])
    twice[where] += 1
    assert leaders(twice).tolist() == [0, 1, 2, 3]


def test_each_of_an_odd_batch_leads_itself() -> None:
    assert leaders(tokens(1, 4, 8, 8).expand(3, -1, -1, -1)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("unguided", "expected"),
    [
        ([True, False], [2, 3, 2, 3]),
        ([False, True], [0, 1, 0, 1]),
        ([False, False], [0, 1, 2, 3]),
        ([True, True], [0, 1, 2, 3]),
        ([True, False, False, False], [1, 1, 2, 3]),
        ([True, False, False], [0, 1, 2, 3]),  # no chunks of a batch of four
        ([], [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_unguided_chunks_follow_the_first_guided_one(
    unguided: list[bool], expected: list[int]
) -> None:
    assert leaders_of_chunks(torch.ones(4, 4, 8, 8), unguided).tolist() == expected


def test_a_chunk_of_another_input_leads_itself() -> None:
    """Of three prompts' areas and a negative one, that covers the second prompt's."""
    x = tokens(3, 4, 8, 8)
    assert leaders_of_chunks(torch.cat([x[1:2], x]), [True, False, False, False]).tolist() == [
        0,
        1,
        2,
        3,
    ]
    assert leaders_of_chunks(torch.cat([x[:1], x]), [True, False, False, False]).tolist() == [
        1,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("samples", [1, 4, 6], ids=str)
def test_layers_that_see_other_samples_have_no_leaders(samples: int) -> None:
    """Frames of a video in the batch, or a part of it."""
    x, leader, config = tokens(samples, 64, 3), torch.tensor([1, 1]), MaMeConfig(keep=0.5)
    led = plan_merge(x, config, (8, 8), leader=leader)
    assert torch.equal(led.rows, plan_merge(x, config, (8, 8)).rows)


@pytest.mark.parametrize("compiling", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("leader", [[1, 1], [0, 1], [1, 0], [2, 3, 2, 3]], ids=str)
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_plans_equal_the_loops(
    fields: dict[str, Any], leader: list[int], compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiling:  # what a graph does, which knows no values
        monkeypatch.setattr("mame_sd.core.merge.torch.compiler.is_compiling", lambda: True)
    config, size, who = MaMeConfig(**nested(fields)), (6, 9), torch.tensor(leader)
    x, t = tokens(len(leader), 54, 6), tokens(len(leader), 54, 3, seed=1)
    plan = plan_merge(x, config, size, leader=who)
    monkeypatch.undo()
    slow = reference_plan(x, config, size, leader=who)
    merged = plan.merge(t)
    torch.testing.assert_close(merged.double(), slow.merge(t), rtol=1e-5, atol=1e-5)
    detail = detail_of(x, config, size)
    if config.weights != "pick":
        torch.testing.assert_close(
            plan.restore(merged, detail).double(),
            slow.restore(merged, detail),
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_a_sample_that_leads_merges_as_by_itself(fields: dict[str, Any]) -> None:
    config, x = MaMeConfig(**nested(fields)), tokens(2, 54, 6)
    both, alone = (
        plan_merge(x, config, (6, 9), leader=torch.tensor([1, 1])),
        plan_merge(x[1:], config, (6, 9)),
    )
    for sample in range(2):
        t = tokens(2, 54, 3, seed=1)
        torch.testing.assert_close(both.merge(t)[sample], alone.merge(t[sample : sample + 1])[0])
