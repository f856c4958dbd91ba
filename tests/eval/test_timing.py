"""Timing in turns: the order of calls, seconds and quartiles."""

from __future__ import annotations

import torch

from mame_sd.eval.timing import in_turns, quartiles, timed, times_as_fast


def test_rows_take_turns_after_a_call_to_warm_up() -> None:
    calls: list[str] = []

    def seconds(row: str) -> float:
        calls.append(row)
        return len(calls) * (1.0 if row == "a" else 2.0)

    taken = in_turns("abc", 3, seconds)
    assert "".join(calls) == "abc" + "abc" + "cba" + "bca"
    assert taken == {"a": [4, 9, 12], "b": [10, 16, 20], "c": [12, 14, 22]}
    assert times_as_fast(taken, "b", "a") == [10 / 4, 16 / 9, 20 / 12]


def test_a_call_gives_its_result_and_seconds_and_rounds_their_quartiles() -> None:
    result, seconds = timed(lambda: torch.ones(2).sum().item(), torch.device("cpu"))
    assert result == 2
    assert seconds > 0
    assert quartiles([4, 1, 2, 3, 5]) == (2, 3, 4)
    assert quartiles([1.0]) == (1, 1, 1)
