"""Read the records of a run: manifest.json and samples.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import normalize

from mame_sd.errors import UserError, unexpected

FORMAT = "mame-sd run 1"
# Errors that reading a line raises if the line is no record.
RECORD_ERRORS = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Sample:
    """One image of a run, by its key `<id>_<repeat>`. Its `row` is the whole record."""

    key: str
    prompt_id: str
    prompt: str
    seed: int
    negative_prompt: str | None
    path: Path
    row: Mapping[str, Any]


def read_manifest(path: Path, advice: str) -> dict[str, Any]:
    """Return the manifest of a run, or raise UserError, which ends in `advice`."""
    try:
        values = json.loads(path.read_bytes().decode())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected the manifest of a run, got: {error}; {advice}") from None
    is_run = isinstance(values, dict) and values.get("format") == FORMAT
    parts = (values.get("settings"), values.get("environment", {})) if is_run else (None,)
    if not all(isinstance(part, dict) for part in parts):
        allowed = f"the manifest of a run ({FORMAT!r})"
        raise unexpected(str(path), allowed, "another file", advice)
    return dict(values)


def sample_of(folder: Path, line: str | bytes) -> Sample:
    """Return the sample of a line in samples.jsonl of the run in `folder`.

    Raises:
        RECORD_ERRORS: the line is no record of `generate`. Seconds and tokens of levels, where
            given, must be finite numbers, and a level must have tokens.
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
    """Return the samples of a run by key, in the order of samples.jsonl, without reading images.

    Keys are in Unicode's form NFC, so that files of other systems pair.

    Raises:
        UserError: the file is missing or broken, or names an image twice. It ends in `advice`.
    """
    path = folder / "samples.jsonl"
    try:
        lines = path.read_bytes().decode().split("\n")
    except (FileNotFoundError, NotADirectoryError):
        got = "one without samples.jsonl" if folder.is_dir() else "no such folder"
        raise unexpected(str(folder), "the folder of a run", got, advice) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read ({error}); {advice}") from None
    by_key: dict[str, Sample] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            sample = sample_of(folder, line)
        except RECORD_ERRORS as error:
            got = f"{type(error).__name__}: {error}"
            place = f"{path}:{number}"
            raise unexpected(place, "the record of an image", got, advice) from None
        key = normalize("NFC", sample.key)
        if key in by_key:
            allowed, got = "one record an image", f"another one of {sample.key}"
            raise unexpected(f"{path}:{number}", allowed, got, advice)
        by_key[key] = sample
    return by_key
