"""The records of a run, read back: manifest.json and samples.jsonl."""

from __future__ import annotations

import json
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
    if not (isinstance(values, dict) and values.get("format") == FORMAT and isinstance(values.get("settings"), dict)):
        raise UserError(f"{path}: expected the manifest of a run ({FORMAT!r}), got another file; {advice}")
    return values


def read_samples(folder: Path, advice: str) -> dict[str, Sample]:
    """What samples.jsonl of the run in `folder` says of its images, by key, in its order; the images are not looked at.

    Raises UserError, which ends in `advice`, for a file that is missing, broken, or names an image twice.
    """
    path = folder / "samples.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise UserError(f"{folder}: expected samples.jsonl of a run, found none; {advice}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read ({error}); {advice}") from None
    samples = [_sample(path, number, line, advice) for number, line in enumerate(lines, 1) if line.strip()]
    found = {sample.key: sample for sample in samples}
    if len(found) < len(samples):
        keys = [sample.key for sample in samples]
        key = next(key for key in keys if keys.count(key) > 1)
        raise UserError(f"{path}: expected one record an image, got {keys.count(key)} of {key}; {advice}")
    return found


def _sample(path: Path, number: int, line: str, advice: str) -> Sample:
    """The sample of one line of samples.jsonl."""
    try:
        row = json.loads(line)
        key = f"{row['id']}_{row['repeat']}"
        if row["file"] != f"images/{key}.png" or not isinstance(row["prompt"], str) or not isinstance(row["seed"], int):
            raise ValueError(f"file {row['file']!r} for the image {key!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}:{number}: expected the record of an image, got {type(error).__name__}: {error}; {advice}"
        ) from None
    image = path.parent / "images" / f"{key}.png"
    return Sample(key, str(row["id"]), row["prompt"], row["seed"], row.get("negative_prompt"), image, row)
