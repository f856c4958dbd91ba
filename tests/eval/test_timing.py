"""Interleaved timing: the order of calls, warm-up, rounds that were measured before."""

from __future__ import annotations

import torch

from mame_sd.eval.timing import interleaved, quartiles, timed


def test_every_round_calls_every_row_and_the_order_turns_round() -> None:
    calls: list[tuple[str, int | str]] = []
    progress: list[tuple[int, int]] = []

    def call(row: str, number: int) -> str:
        calls.append((row, number))
        return f"{row}{number}"

    rounds = interleaved(
        "abc",
        3,
        call,
        warm_up=lambda row: calls.append((row, "warm-up")),
        on_progress=lambda *done: progress.append(done),
    )
    assert list(rounds) == [
        (0, {"a": "a0", "b": "b0", "c": "c0"}),
        (1, {"c": "c1", "b": "b1", "a": "a1"}),
        (2, {"b": "b2", "c": "c2", "a": "a2"}),
    ]
    order = [(row, number) for number, rows in enumerate(("abc", "cba", "bca")) for row in rows]
    assert calls == [*((row, "warm-up") for row in "abc"), *order]
    assert progress == [(done, 9) for done in range(10)]


def test_rounds_that_are_done_are_left_out_and_nothing_to_do_warms_nothing_up() -> None:
    progress: list[tuple[int, int]] = []
    rounds = interleaved(
        "ab", 3, lambda row, number: number, done={0, 2}, on_progress=lambda *n: progress.append(n)
    )
    assert list(rounds) == [(1, {"b": 1, "a": 1})]
    assert progress == [(4, 6), (5, 6), (6, 6)]

    def refuse(*_: object) -> None:
        raise AssertionError("nothing is to be measured")

    assert list(interleaved("ab", 2, refuse, done={0, 1, 2}, warm_up=refuse)) == []


def test_a_call_gives_its_result_and_seconds_and_rounds_their_quartiles() -> None:
    result, seconds = timed(lambda: torch.ones(2).sum().item(), torch.device("cpu"))
    assert result == 2
    assert seconds > 0
    assert quartiles([4, 1, 2, 3, 5]) == (2, 3, 4)
    assert quartiles([1.0]) == (1, 1, 1)
