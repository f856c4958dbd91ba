"""Samples that merge alike: who leads."""

from __future__ import annotations

import pytest
import torch

from mame_sd.core.merge import leaders


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("prompt_first", [False, True])
def test_the_half_with_the_prompt_leads_where_both_are_the_same_input(prompt_first: bool) -> None:
    x = tokens(2, 4, 8, 8)
    expected = [0, 1, 0, 1] if prompt_first else [2, 3, 2, 3]
    assert leaders(torch.cat([x, x]), [prompt_first is False, prompt_first]).tolist() == expected


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
    assert leaders(torch.ones(4, 4, 8, 8), unguided).tolist() == expected


def test_a_chunk_of_another_input_leads_itself() -> None:
    """Of three prompts' areas and a negative one, that covers the second prompt's."""
    x = tokens(3, 4, 8, 8)
    assert leaders(torch.cat([x[1:2], x]), [True, False, False, False]).tolist() == [
        0,
        1,
        2,
        3,
    ]
    assert leaders(torch.cat([x[:1], x]), [True, False, False, False]).tolist() == [
        1,
        1,
        2,
        3,
    ]
