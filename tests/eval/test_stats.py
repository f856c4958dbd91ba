"""Intervals, p-values and timing: known answers, coverage, independence of order and counts."""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

from mame_sd.eval.stats import (
    mcnemar_p,
    mean_interval,
    median_interval,
    paired_difference,
    sign_flip_p,
)
from mame_sd.eval.timing import in_turns, quartiles, timed, times_as_fast
from mame_sd.json_files import json_text

ONE_EACH = {str(i): str(i) for i in range(200)}


def keyed(values: Any) -> dict[str, float]:
    return {str(i): float(value) for i, value in enumerate(values)}


def test_the_interval_is_that_of_the_mean_in_any_order() -> None:
    values = np.random.default_rng(1).normal(5, 2, 200)
    found = mean_interval(keyed(values), ONE_EACH)
    half = 1.96 * values.std() / math.sqrt(200)
    assert found["mean"] == pytest.approx(values.mean())
    assert found["low"] == pytest.approx(values.mean() - half, abs=0.05)
    assert found["high"] == pytest.approx(values.mean() + half, abs=0.05)
    assert found["n"] == 200
    assert mean_interval(dict(reversed(keyed(values).items())), ONE_EACH) == found
    uneven = {"a_0": 1.0, "a_1": 1.0, "b_0": 4.0}
    assert mean_interval(uneven, {key: key[0] for key in uneven})["mean"] == 2.0


def test_intervals_of_few_prompts_are_as_wide_as_students_t() -> None:
    values = np.array([NormalDist().inv_cdf((n + 0.5) / 8) for n in range(8)])
    found = mean_interval(keyed(values), ONE_EACH)
    half = 2.3646 * values.std(ddof=1) / math.sqrt(8)  # plain percentiles reach 0.78 of it
    assert (found["low"], found["high"]) == pytest.approx((-half, half), rel=0.1)


def test_the_interval_of_a_median_is_that_of_the_sign_test() -> None:
    for n, ends in ((1, (0, 0)), (5, (0, 4)), (6, (0, 5)), (8, (0, 7)), (9, (1, 7)), (20, (5, 14))):
        values = [float(value) for value in range(n)]
        assert median_interval(values[::-1]) == ((n - 1) / 2, *ends)


def test_repeats_of_a_prompt_are_no_new_evidence() -> None:
    values = np.random.default_rng(4).random(20)
    once = mean_interval(keyed(values), ONE_EACH)
    prompts = {f"{i}_{j}": str(i) for i in range(20) for j in range(5)}
    often = mean_interval(
        {key: float(values[int(prompt)]) for key, prompt in prompts.items()}, prompts
    )
    assert often["n"] == 100
    assert (often["low"], often["high"]) == pytest.approx((once["low"], once["high"]))
    one = mean_interval({"a_0": 1.0, "a_1": 3.0}, {"a_0": "a", "a_1": "a"})
    assert (one["mean"], one["low"], one["high"], one["n"]) == (2.0, None, None, 2)
    assert "one prompt" in one["note"]


def test_infinite_values_are_counted_and_left_out_of_the_mean_and_nan_is_refused() -> None:
    found = mean_interval({"0": math.inf, "1": 40.0, "2": 50.0}, ONE_EACH)
    rest = mean_interval({"1": 40.0, "2": 50.0}, ONE_EACH)
    assert found == {**rest, "n": 3, "equal": 1}
    one = mean_interval({"0": math.inf, "1": 40.0}, ONE_EACH)
    assert (one["mean"], one["low"]) == (40.0, None)
    assert one["note"] == "no interval: one prompt, needs two"
    every = mean_interval({"0": math.inf, "1": math.inf}, ONE_EACH)
    assert (every["mean"], every["low"], every["equal"]) == (math.inf, None, 2)
    assert paired_difference({"0": math.inf}, {"0": 1.0}, ONE_EACH)["p"] is None
    for values in ({}, {"0": math.nan, "1": 1.0}):
        with pytest.raises(ValueError, match="expected numbers to average"):
            mean_interval(values, ONE_EACH)
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text({"psnr": math.nan})


def test_p_values_are_those_of_all_sign_flips_or_of_drawn_ones() -> None:
    gaps = np.array([0.3, -0.1, 0.8, 0.5, 0.2])
    sums = [abs(float(np.dot(signs, gaps))) for signs in itertools.product((1, -1), repeat=5)]
    expected = sum(value >= abs(gaps.sum()) - 1e-12 for value in sums) / 32
    assert sign_flip_p(gaps) == expected
    assert sign_flip_p(np.ones(10)) == 2 / 1024
    assert sign_flip_p(np.zeros(10)) == 1.0
    many = np.random.default_rng(5).normal(0.2, 1, 100)
    z = abs(many.sum()) / math.sqrt(float((many**2).sum()))
    assert sign_flip_p(many) == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.02)
    assert sign_flip_p(np.ones(100)) == 1 / 10_001, "what was seen is one more draw"


def test_differences_are_taken_by_key() -> None:
    a, b = {"x": 1.0, "y": 5.0, "z": 2.0}, {"z": 1.0, "y": 4.0, "x": 0.0}
    found = paired_difference(a, b, {"x": "x", "y": "y", "z": "z"})
    assert (found["mean"], found["low"], found["high"]) == (1.0, 1.0, 1.0)
    assert found["p"] == 2 / 8
    with pytest.raises(ValueError, match="same images"):
        paired_difference(a, {"x": 1.0}, {})


def test_mcnemars_p_is_the_binomial_tail_of_the_cases_that_differ() -> None:
    """36 both right, 12 and 2 right on one side alone: Newcombe 1998, table I."""
    ours, others = [True] * 48 + [False] * 2, [True] * 36 + [False] * 12 + [True] * 2
    tail = sum(math.comb(14, k) for k in range(3)) / 2**14
    assert mcnemar_p(ours, others) == mcnemar_p(others, ours) == pytest.approx(2 * tail)
    assert mcnemar_p(ours, ours) == 1.0


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
