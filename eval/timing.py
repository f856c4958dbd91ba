"""Interleaved timing: the one engine behind ``mame-sd-eval benchmark`` and the benchmarks.

Each round calls every row once, and the order turns by one a round. So a slow minute of the machine
falls on all rows, and none is always behind the same one. Whole rounds are what counts: who times
keeps each one as it ends and says which are done, so a stopped measurement continues. A row that is
added later is timed in rounds of its own, beside the row that it is compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")


def interleaved(
    rows: Sequence[str],
    rounds: int,
    call: Callable[[str, int], T],
    *,
    done: Collection[int] = (),
    warm_up: Callable[[str], object] = lambda row: None,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Iterator[tuple[int, dict[str, T]]]:
    """Measure every row once in each of `rounds` rounds; gives each round's number and what its
    calls gave, as it ends.

    Args:
        call: measures a row in the round of that number, and gives what is to be kept of it.
        done: numbers of the rounds that were measured before; they are left out.
        warm_up: called with each row before anything is measured; not called where nothing is to be
            measured.
        on_progress: told (calls done, calls in all), those of earlier rounds included, at the start
            and after each call.
    """
    todo = [number for number in range(rounds) if number not in done]
    calls, total = (rounds - len(todo)) * len(rows), rounds * len(rows)
    on_progress(calls, total)
    for row in rows if todo else ():
        warm_up(row)
    for number in todo:
        turn = number // 2 % len(rows)
        order = [*rows[turn:], *rows[:turn]]
        found: dict[str, T] = {}
        # so that a row does not always come after the same one
        for row in order[:: -1 if number % 2 else 1]:
            found[row] = call(row, number)
            calls += 1
            on_progress(calls, total)
        yield number, found


def timed(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What `call` returns and its seconds, the device's queue empty before and after."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


def seconds_of(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What `call` returns and its seconds: of the CPU, which other programs hardly change, or of
    the clock where another device computes.
    """
    if device.type != "cpu":
        return timed(call, device)
    start = time.process_time()
    return call(), time.process_time() - start


def synchronize(device: torch.device) -> None:
    """Return when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile, interpolated linearly."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float(low), float(median), float(high)
