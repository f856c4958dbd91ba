"""The records of a run, read back: manifest.json and samples.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError

FORMAT = "mame-sd run 1"


@dataclass(frozen=True)
class Sample:
    """One image of a run: its key `<id>_<repeat>`, what it was made from, its file.

    `row` is all that samples.jsonl says of it: seconds, levels, size, ...
    """

    key: str
    prompt_id: str
    prompt: str
    seed: int
    negative_prompt: str | None
    path: Path
    row: Mapping[str, Any]


def read_manifest(path: Path, advice: str) -> dict[str, Any]:
    """The manifest of a run. Raises UserError, which ends in `advice`, for any other file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected the manifest of a run, got: {error}; {advice}") from None
    if not (
        isinstance(values, dict)
        and values.get("format") == FORMAT
        and isinstance(values.get("settings"), dict)
        and isinstance(values.get("environment", {}), dict)
    ):
        raise UserError(
            f"{path}: expected the manifest of a run ({FORMAT!r}), got another file; {advice}"
        )
    return values


def read_samples(folder: Path, advice: str) -> dict[str, Sample]:
    """What samples.jsonl of the run in `folder` says of its images, by key, in its order; the
    images are not looked at.

    Raises UserError, which ends in `advice`, for a file that is missing, broken, or names an image
    twice.
    """
    path = folder / "samples.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise UserError(
            f"{folder}: expected samples.jsonl of a run, found none; {advice}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read ({error}); {advice}") from None
    samples = [
        _sample(path, number, line, advice) for number, line in enumerate(lines, 1) if line.strip()
    ]
    found = {sample.key: sample for sample in samples}
    if len(found) < len(samples):
        keys = [sample.key for sample in samples]
        key = next(key for key in keys if keys.count(key) > 1)
        raise UserError(
            f"{path}: expected one record an image, got {keys.count(key)} of {key}; {advice}"
        )
    return found


def check_measured(row: Mapping[str, Any]) -> None:
    """Raise ValueError where what a record says was measured is of another kind than `generate`
    writes.

    `seconds` and each level's tokens are finite numbers, a level has tokens; either may be missing.
    """
    levels, numbers = row.get("levels", []), [row.get("seconds", 0.0)]
    if not isinstance(levels, list) or not all(isinstance(level, dict) for level in levels):
        raise ValueError(f"levels of another kind ({str(levels)[:40]})")
    for level in levels:
        numbers += [level.get(name) for name in ("level", "tokens_in", "tokens_kept")]
        if not level.get("tokens_in"):
            raise ValueError("a level without tokens")
    wrong = [
        n
        for n in numbers
        if isinstance(n, bool) or not isinstance(n, int | float) or not math.isfinite(n)
    ]
    if wrong:
        raise ValueError(f"{str(wrong[0])[:40]} for a number")


def _sample(path: Path, number: int, line: str, advice: str) -> Sample:
    """The sample of one line of samples.jsonl."""
    try:
        row = json.loads(line)
        key = f"{row['id']}_{row['repeat']}"
        if (
            row["file"] != f"images/{key}.png"
            or not isinstance(row["prompt"], str)
            or not isinstance(row["seed"], int)
        ):
            raise ValueError(f"file {row['file']!r} for the image {key!r}")
        if "/" in key or "\\" in key:
            raise ValueError(f"an image outside of its folder, {key!r}")
        check_measured(row)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(
            f"{path}:{number}: expected the record of an image, got {type(error).__name__}:"
            f" {error}; {advice}"
        ) from None
    image = path.parent / "images" / f"{key}.png"
    return Sample(
        key, str(row["id"]), row["prompt"], row["seed"], row.get("negative_prompt"), image, row
    )
