"""Timings: what one call gives, the file that keeps them as soon as they are taken, and their summary as metrics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError
from mame_sd.runs.files import write_atomically

from ..timing import quartiles

FORMAT = "mame-sd timings 1"
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Timing:
    """One call: seconds an image in all and in denoising, peak bytes in all and in denoising, weights included.

    None: not measured (a pipeline without a decoder; in a timed call, memory on other than CUDA).
    """

    seconds: float
    denoising: float | None = None
    allocated: int | None = None
    allocated_denoising: int | None = None


Rounds = dict[int, dict[str, Timing]]  # by round and method


def read_record(path: Path, about: Mapping[str, Any] | None = None) -> Rounds:
    """Timings taken before of just what `about` says, of whole rounds alone. None: a mere check.

    Raises UserError for a file that is no record of this version: it is not ours to overwrite.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        if not lines or lines[0]["format"] != FORMAT:
            raise ValueError(repr(lines[0]["format"]) if lines else "an empty file")
        found: Rounds = {}
        for line in lines[1:]:
            number, name, timing = line.pop("round"), line.pop("method"), Timing(**line)
            if any(not isinstance(value, int | float | None) for value in vars(timing).values()):
                raise ValueError("timings that are no numbers")
            found.setdefault(number, {})[name] = timing
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path}: expected timings ({FORMAT!r}), got another file ({type(error).__name__}: {error}); delete it, or "
            "choose another --out"
        ) from None
    if about is None or lines[0].get("about") != _digest(about):
        return {}
    return {number: timings for number, timings in found.items() if timings.keys() >= set(about["methods"])}


def write_record(path: Path, about: Mapping[str, Any], done: Rounds) -> None:
    """Write all timings, whole or not at all."""
    head = {"format": FORMAT, "about": _digest(about), **{key: about[key] for key in about if key != "batches"}}
    rows = [
        {"round": number, "method": name, **asdict(timing)}
        for number, timings in done.items()
        for name, timing in timings.items()
    ]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in [head, *rows]).encode())


def summary(timings: Sequence[Timing]) -> dict[str, dict[str, Any]]:
    """The cost metrics of one method: median and quartiles of seconds, the highest peak of memory."""
    found: dict[str, dict[str, Any]] = {}
    for name, field in (("latency", "seconds"), ("denoising", "denoising")):
        values = [getattr(timing, field) for timing in timings if getattr(timing, field) is not None]
        if values:
            low, median, high = quartiles(values)
            found[name] = {"mean": median, "low": low, "high": high, "n": len(values), "statistic": "median, quartiles"}
    for name, field in (("memory", "allocated"), ("memory_denoising", "allocated_denoising")):
        peaks = [getattr(timing, field) for timing in timings if getattr(timing, field) is not None]
        if peaks:
            found[name] = {"mean": max(peaks) / MEBIBYTE, "low": None, "high": None, "n": len(peaks)}
    return found


def _digest(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
