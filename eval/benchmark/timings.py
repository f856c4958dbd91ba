"""Take timings, keep them in a file, and summarise them as metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..results.schema import Value
from ..runner import Store, measure_cases
from ..stats import median_interval
from ..timing import quartiles, timed

FORMAT = "mame-sd timings 3"
KEYS = ("round", "method")
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Timing:
    """The timing of one call; None where something wasn't measured.

    Attributes:
        seconds: wall-clock seconds per image.
        allocated: peak bytes, weights included.
        cpu: the process's CPU seconds per image, if the CPU computes.
    """

    seconds: float
    allocated: int | None = None
    cpu: float | None = None


def timing_of(call: Callable[[], object], count: int, device: torch.device) -> Timing:
    """Time one call that makes or reads `count` images, on an idle device.

    CUDA counts its peak of memory while it is timed, a CPU only in a separate call (`peak_bytes`).

    Args:
        call: makes or reads the images.
        count: number of images.
        device: device that computes.
    """
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before = time.process_time()
    _, seconds = timed(call, device)
    cpu = (time.process_time() - before) / count if device.type == "cpu" else None
    peak = torch.cuda.max_memory_allocated(device) if on_cuda else None
    return Timing(seconds / count, peak, cpu)


def timed_rounds(
    rows: Sequence[str],
    rounds: int,
    call: Callable[[str, int], Timing],
    record: Path,
    about: Mapping[str, Any],
    *,
    warm_up: Callable[[str], object],
    on_progress: Callable[[int, int], object],
) -> dict[str, list[Timing]]:
    """Time rows in turns.

    Args:
        rows: names of the rows.
        rounds: number of rounds.
        call: calls a row in the round of that number.
        record: JSON lines that hold the timings of every round as soon as it ends. A stopped call
            continues after the last whole round.
        about: everything that timings depend on (prompts, rows and their settings, model,
            machine). Timings of anything else are taken anew.
        warm_up: called with each row before anything is timed.
        on_progress: called with the number of calls done and of all calls.

    Returns:
        The timings of each row, round by round.

    Raises:
        UserError: `record` is another file.
    """
    check_record(record)
    store = Store(record, FORMAT, "timings", about, KEYS, fresh=True)

    def measure(number: int, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((name, asdict(call(name, number))) for name in names)

    measure_cases(
        store, range(rounds), rows, measure, lambda number, name: {"round": number, "method": name},
        together=True, warm_up=warm_up, on_progress=on_progress,
    )  # fmt: skip
    return {row: [_timing(store.lines[n, row]) for n in range(rounds)] for row in rows}


def check_record(path: Path) -> None:
    """Raise UserError if the file is no record of this version, which isn't ours to overwrite."""
    Store(path, FORMAT, "timings", {}, KEYS, fresh=True)


def _timing(line: Mapping[str, Any]) -> Timing:
    return Timing(**{name: value for name, value in line.items() if name not in KEYS})


def of_rounds(values: Sequence[float]) -> Value:
    """Return the median and quartiles of what rounds measured; one round has no quartiles."""
    low, median, high = quartiles(values)
    value = Value(mean=median, n=len(values))
    return replace(value, low=low, high=high) if len(values) > 1 else value


def speedup(own: Sequence[float], baseline: Sequence[float]) -> Value:
    """Compute how many times as fast as the baseline a method is, by their seconds in each round.

    Each round compares two calls on the same batch within minutes, so that the ratio is less noisy
    than the times.
    """
    ratios = [base / seconds for seconds, base in zip(own, baseline, strict=True)]
    median, low, high = median_interval(ratios)
    value = Value(mean=median, n=len(ratios))
    return replace(value, low=low, high=high) if len(ratios) > 1 else value


def summary(timings: Sequence[Timing], baseline: Sequence[Timing]) -> dict[str, Value]:
    """Compute the cost metrics of one method from its timings and the baseline's, by metric.

    They are median and quartiles of seconds, how many times as fast as the baseline it is, and the
    highest peak of memory. On a CPU, "speedup" is that of CPU seconds, which other programs hardly
    change.
    """
    seconds, theirs = ([timing.seconds for timing in them] for them in (timings, baseline))
    costs = {"latency": of_rounds(seconds), "speedup": speedup(seconds, theirs)}
    cpu, cpu_theirs = ([t.cpu for t in them if t.cpu is not None] for them in (timings, baseline))
    if cpu:
        costs |= {"cpu": of_rounds(cpu), "speedup": speedup(cpu, cpu_theirs)}
    if allocated := [t.allocated for t in timings if t.allocated is not None]:
        costs["memory"] = Value(mean=max(allocated) / MEBIBYTE, n=len(allocated))
    return costs
