"""Time calls in turns, and measure their memory.

Each round calls every row once, and the order of the rows turns from round to round. So a slow
minute of the machine affects all rows, and no row always follows the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


def turned(rows: Sequence[T], number: int) -> list[T]:
    """Return the order of rows in a round.

    Every second round begins one row later, and each second round runs backwards.

    >>> ["".join(turned("abc", number)) for number in range(4)]
    ['abc', 'cba', 'bca', 'acb']
    """
    start = number // 2 % len(rows)
    order = [*rows[start:], *rows[:start]]
    return order[::-1] if number % 2 else order


def in_turns(
    rows: Sequence[str], rounds: int, seconds: Callable[[str], float]
) -> dict[str, list[float]]:
    """Time rows in turns, after calling each one once to warm up.

    Args:
        rows: names of the rows.
        rounds: number of rounds.
        seconds: calls a row once and returns how long that took.

    Returns:
        The seconds of each row, round by round.
    """
    for row in rows:
        seconds(row)
    taken: dict[str, list[float]] = {row: [] for row in rows}
    for number in range(rounds):
        for row in turned(rows, number):
            taken[row].append(seconds(row))
    return taken


def times_as_fast(taken: dict[str, list[float]], baseline: str, row: str) -> list[float]:
    """Return how many times as fast as the baseline a row is in each round.

    Args:
        taken: the seconds of each row, round by round.
        baseline: name of the baseline.
        row: name of the row.
    """
    return [base / own for base, own in zip(taken[baseline], taken[row], strict=True)]


def timed(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Return what `call` returns and its wall-clock seconds, with an idle device at both ends."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


def seconds_of(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Return what `call` returns and its seconds.

    They are CPU seconds, which other programs hardly change, or wall-clock seconds if another
    device computes.
    """
    if device.type != "cpu":
        return timed(call, device)
    start = time.process_time()
    return call(), time.process_time() - start


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile, interpolated linearly."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float(low), float(median), float(high)


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes that a call allocates at once on a CPU, by the profiler's record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    profiler = profiled.profiler
    assert profiler is not None
    assert profiler.kineto_results is not None
    alive = peak = 0
    for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def weight_bytes(modules: list[nn.Module]) -> int:
    """Return the bytes of the parameters and buffers of modules; shared ones count once."""
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())
