"""The records of a run, read back: manifest.json and samples.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import normalize

from mame_sd.errors import UserError
from mame_sd.runs.files import read_regular

FORMAT = "mame-sd run 1"
# What reading a line that is no record raises.
STRANGE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


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
        values = json.loads(read_regular(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected the manifest of a run, got: {error}; {advice}") from None
    known = isinstance(values, dict) and values.get("format") == FORMAT
    parts = (values.get("settings"), values.get("environment", {})) if known else (None,)
    if not all(isinstance(part, dict) for part in parts):
        raise UserError(
            f"{path}: expected the manifest of a run ({FORMAT!r}), got another file; {advice}"
        )
    return dict(values)


def sample_of(folder: Path, line: str | bytes) -> Sample:
    """The sample that a line of the run in `folder` tells of.

    Raises one of `STRANGE` for a line that is no record as `generate` writes them: `seconds` and
    each level's tokens are finite numbers, a level has tokens; either may be missing.
    """
    row = json.loads(line)
    key = f"{row['id']}_{row['repeat']}"
    if row["file"] != f"images/{key}.png" or "/" in key or "\\" in key:
        raise ValueError(f"file {row['file']!r} for the image {key!r}")
    if not isinstance(row["prompt"], str) or not isinstance(row["seed"], int):
        raise ValueError(f"{row['prompt']!r:.40} and {row['seed']!r:.40} for prompt and seed")
    numbers = [row.get("seconds", 0.0)]
    for level in row.get("levels", []):
        numbers += [level[name] for name in ("level", "tokens_in", "tokens_kept")]
        if not level["tokens_in"]:
            raise ValueError("a level without tokens")
    for number in numbers:
        if isinstance(number, bool) or not math.isfinite(number):
            raise ValueError(f"{str(number)[:40]} for a number")
    image = folder / "images" / f"{key}.png"
    return Sample(
        key, str(row["id"]), row["prompt"], row["seed"], row.get("negative_prompt"), image, row
    )


def read_samples(folder: Path, advice: str) -> dict[str, Sample]:
    """What samples.jsonl of the run in `folder` says of its images, by key (in Unicode's form NFC,
    so that files of other systems pair), in its order; the images are not looked at.

    Raises UserError, which ends in `advice`, for a file that is missing, broken, or names an image
    twice.
    """
    path = folder / "samples.jsonl"
    try:
        lines = read_regular(path).decode().split("\n")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{folder}: expected samples.jsonl of a run, found none; {advice}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read ({error}); {advice}") from None
    found: dict[str, Sample] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            sample = sample_of(folder, line)
        except STRANGE as error:
            raise UserError(
                f"{path}:{number}: expected the record of an image, got {type(error).__name__}:"
                f" {error}; {advice}"
            ) from None
        key = normalize("NFC", sample.key)
        if key in found:
            raise UserError(
                f"{path}:{number}: expected one record an image, got another one of"
                f" {sample.key}; {advice}"
            )
        found[key] = sample
    return found
