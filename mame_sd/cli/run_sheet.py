"""``mame-sd sheet``: the images of finished runs side by side. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from PIL import Image

from mame_sd.cli.console import answer
from mame_sd.cli.sheet import (
    PANEL_SIDE,
    Cell,
    check_sheet_path,
    enlarge,
    in_columns,
    nearness,
    write_sheet,
)
from mame_sd.errors import UserError
from mame_sd.runs.records import read_samples


def run_sheet(folders: Sequence[Path], out: Path, num: int) -> None:
    """Write the sheet of finished runs."""
    if num < 1:
        raise UserError(f"--num: expected at least 1, got {num}; raise it")
    check_sheet_path(out)
    names = [folder.name for folder in folders]
    write_sheet(out, folders_sheet(folders, num), {"folders": names})
    answer(str(out), {"sheet": str(out), "folders": names})


def folders_sheet(folders: Sequence[Path], limit: int) -> Image.Image:
    """The first `limit` images of several run folders, `COLUMNS` side by side, run below run.

    Each run tells its PSNR to the first one.

    Raises:
        UserError: a folder that holds no run, or lacks an image that the first one has or has it
            of another prompt.
    """
    runs = [read_samples(folder, "run generate into a new folder") for folder in folders]
    columns = []  # one an image: its cell of each run
    for name, first in list(runs[0].items())[:limit]:
        column: list[Cell] = []
        for folder, samples in zip(folders, runs, strict=True):
            if name not in samples:
                raise UserError(
                    f"{folder}: expected the image {name}, which {folders[0]} has, found none;"
                    " finish that run first"
                )
            if (other := samples[name].prompt) != first.prompt:
                pairs = enumerate(zip_longest(first.prompt, other))
                alike = next(n for n, (one, two) in pairs if one != two)
                part = slice(max(0, alike - 40), alike + 40)  # where they differ
                raise UserError(
                    f"{folder}: expected {name} of the prompt {first.prompt[part]!r}, as"
                    f" {folders[0]} has it, got {other[part]!r}; give runs of the same prompts"
                )
            image = _open(samples[name].path)
            lines = [_about(folder, samples[name].row)]
            if column and image.size == column[0].image.size:
                lines.append(nearness(column[0].image, image))
            column.append(Cell(image, tuple(lines if column else [first.prompt, *lines])))
        columns.append(column)
    if not columns:
        raise UserError(f"{folders[0]}: expected a run with images, found none; run generate first")
    return in_columns(columns)


def _about(folder: Path, row: Mapping[str, Any]) -> str:
    parts = [folder.name]
    if row.get("seconds"):
        parts.append(f"{row['seconds']:.2f} s")
    for level in row.get("levels", [])[:1]:
        share = level["tokens_kept"] / level["tokens_in"]
        parts.append(f"{share:.0%} of {level['tokens_in']:.0f} kept")
    return ", ".join(parts)


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return enlarge(image.convert("RGB"), PANEL_SIDE // 2)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path}: can't be read as an image ({error}); run generate again"
        ) from None
