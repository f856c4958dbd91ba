"""Timings: what one call gives, the file that keeps them as soon as they are taken, and their
summary as metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..results.schema import Gate, Value
from ..store import Store, another_file, read_store
from ..timing import interleaved, quartiles

FORMAT = "mame-sd timings 2"
KEYS = ("round", "method")
MEBIBYTE = 2**20
TIMING_GATE = "timing on a machine with nothing else to do"
LARGEST_SPREAD = 0.25  # of the baseline's rounds: (longest - shortest) / median
SMALLEST_SHARE = 0.6  # of the cores' time that the process had, at the median


@dataclass(frozen=True)
class Timing:
    """One call: seconds an image in all and in denoising, peak bytes in all and in denoising.

    Peaks include the weights. `cpu` is the process's CPU seconds an image, where the CPU is what
    computes. None: not measured (a pipeline without a decoder; memory on other than CUDA).
    """

    seconds: float
    denoising: float | None = None
    allocated: int | None = None
    allocated_denoising: int | None = None
    cpu: float | None = None


class Record:
    """Timings in a file, a line for each call.

    Attributes:
        rounds: those that are whole, by number and then by method.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """Opens or begins it. What was taken of anything else than `about` is left out; its
        "methods" are those of a whole round.

        Raises UserError as `check_record`.
        """
        check_record(path)
        self._store = Store(path, FORMAT, "timings", about, KEYS, fresh=True)
        found: dict[int, dict[str, Timing]] = {}
        for (number, name), line in self._store.found.items():
            found.setdefault(number, {})[name] = _timing(line)
        methods = set(about["methods"])
        self.rounds = {n: timings for n, timings in found.items() if timings.keys() >= methods}

    def add(self, number: int, timings: Mapping[str, Timing]) -> None:
        """Keep a round."""
        self.rounds[number] = dict(timings)
        for name, timing in timings.items():
            self._store.add({"round": number, "method": name, **asdict(timing)})


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
    """What `call` gives of each row in each round, interleaved; by row, in order of rounds.

    Args:
        record: JSON lines that hold the timings of every round as soon as it ends. A stopped call
            continues after the last round in them. Were they taken of anything else than `about`
            (prompts, rows and their settings, model, machine), it starts over.
        warm_up, on_progress: as `interleaved` takes them.

    Raises UserError when `record` is another file.
    """
    done = Record(record, about)
    for number, timings in interleaved(
        rows, rounds, call, done=done.rounds, warm_up=warm_up, on_progress=on_progress
    ):
        done.add(number, timings)
    return {row: [done.rounds[number][row] for number in range(rounds)] for row in rows}


def check_record(path: Path) -> None:
    """Raise UserError for a file that is no record of this version: it is not ours to
    overwrite.
    """
    lines = read_store(path, FORMAT, "timings", None, KEYS)
    try:
        for line in lines.values():
            if any(not isinstance(one, int | float | None) for one in vars(_timing(line)).values()):
                raise ValueError("timings that are no numbers")
    except (ValueError, TypeError) as error:
        raise another_file(path, FORMAT, "timings", error) from None


def _timing(line: Mapping[str, Any]) -> Timing:
    return Timing(**{name: value for name, value in line.items() if name not in KEYS})


def summary(timings: Sequence[Timing]) -> dict[str, Value]:
    """The cost metrics of one method: median and quartiles of seconds, the highest peak of memory.

    A single round has no quartiles.
    """
    found: dict[str, Value] = {}
    for name, field in (("latency", "seconds"), ("denoising", "denoising"), ("cpu", "cpu")):
        values = [
            getattr(timing, field) for timing in timings if getattr(timing, field) is not None
        ]
        if values:
            low, median, high = quartiles(values)
            several = len(values) > 1
            found[name] = Value(
                mean=median,
                low=low if several else None,
                high=high if several else None,
                n=len(values),
                statistic="median, quartiles",
            )
    for name, field in (("memory", "allocated"), ("memory_denoising", "allocated_denoising")):
        peaks = [getattr(timing, field) for timing in timings if getattr(timing, field) is not None]
        if peaks:
            found[name] = Value(mean=max(peaks) / MEBIBYTE, n=len(peaks))
    return found


def timing_gate(timings: Mapping[str, Sequence[Timing]], baseline: str, cores: int) -> Gate:
    """Whether wall-clock seconds of this machine can be believed, as an entry of the sanity gates.

    On a busy machine the baseline's own rounds differ, and a process waits: its CPU seconds fall
    short of the wall clock's. Where that is so, wall-clock seconds are withheld
    (`without_seconds`).

    Args:
        timings: by row, in order of rounds.
        baseline: the name of the unmerged row.
        cores: threads that the process may keep busy at once.
    """
    own = [timing.seconds for timing in timings[baseline]]
    spread = (max(own) - min(own)) / quartiles(own)[1]
    shares = [
        t.cpu / (t.seconds * cores)
        for found in timings.values()
        for t in found
        if t.cpu is not None
    ]
    share = quartiles(shares)[1] if shares else None
    expected = f"at least 2 rounds, the baseline's within {LARGEST_SPREAD:.0%}"
    got = f"{len(own)} round{'s' * (len(own) != 1)}, {spread:.0%} apart"
    passed = len(own) > 1 and spread <= LARGEST_SPREAD
    if share is not None:
        expected += f", {SMALLEST_SHARE:.0%} of the cores' time"
        got += f", {share:.0%} of the time of {cores} core{'s' * (cores != 1)}"
        passed = passed and share >= SMALLEST_SHARE
    return Gate(TIMING_GATE, expected, got, passed, withholds=True)


def without_seconds(costs: Mapping[str, Value]) -> dict[str, Value]:
    """The costs of a method with its wall-clock seconds withheld."""
    found = dict(costs)
    for name in {"latency", "denoising"} & found.keys():
        found[name] = Value(n=found[name].n, withheld="the machine was busy")
    return found
