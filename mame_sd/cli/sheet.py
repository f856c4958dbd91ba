"""Draw sheets (images in rows and columns with lines of text), and run ``mame-sd sheet``.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from mame_sd.cli.console import answer
from mame_sd.errors import UserError, unexpected
from mame_sd.runs.files import check_place, nearest, write_atomically, writing
from mame_sd.runs.records import read_samples

FONT_SIZE, LARGE = 15, 30  # pixels
LINE, LARGE_LINE = 20, 38  # pixels from one line of text to the next
MARGIN = 12
PANEL_SIDE = 512
COLUMNS = 6  # images side by side
DIFFERENCE_SCALE = 64  # levels of 255 at which a difference map is darkest
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # raised by pillow
_INK, _PAPER = (24, 24, 27), (255, 255, 255)
_DIFFERENCE_COLORS = np.array([(255, 255, 255), (246, 173, 60), (190, 40, 60), (50, 10, 60)], float)


@dataclass(frozen=True)
class Cell:
    """One image of a sheet, with a `heading` in large type and `lines` below it."""

    image: Image.Image
    lines: tuple[str, ...] = ()
    heading: str = ""


def run_sheet(folders: Sequence[Path], out: Path, num: int) -> None:
    """Write the sheet of finished runs.

    Args:
        folders: folders of runs.
        out: the sheet, a .png file.
        num: number of images of each run.
    """
    if num < 1:
        raise UserError(f"--num: expected at least 1, got {num}; raise it")
    check_sheet_path(out)
    names = [folder.name for folder in folders]
    write_sheet(out, folders_sheet(folders, num), {"folders": names})
    answer(str(out), {"sheet": str(out), "folders": names})


def folders_sheet(folders: Sequence[Path], limit: int) -> Image.Image:
    """Draw the first `limit` images of several runs, each run below the previous one.

    Lines below an image give its PSNR to that of the first run.

    Raises:
        UserError: a folder holds no run, lacks an image, or has it of another prompt.
    """
    runs = [read_samples(folder, "make one with mame-sd generate --out") for folder in folders]
    columns = []
    for name, first in list(runs[0].items())[:limit]:
        column: list[Cell] = []
        for folder, samples in zip(folders, runs, strict=True):
            if name not in samples:
                raise UserError(
                    f"{folder}: expected the image {name}, which {folders[0]} has, found none;"
                    " finish that run first"
                )
            if (other := samples[name].prompt) != first.prompt:
                raise UserError(
                    f"{folder}: expected {name} of the prompt {first.prompt!r}, as {folders[0]} has"
                    f" it, got {other!r}; give runs of the same prompts"
                )
            image = _open(samples[name].path)
            lines = [_about(folder, samples[name].row)]
            if column and image.size == column[0].image.size:
                lines.append(nearness(column[0].image, image))
            column.append(Cell(image, tuple(lines if column else [first.prompt, *lines])))
        columns.append(column)
    if not columns:
        raise UserError(f"{folders[0]}: expected a run with images, found none; run generate first")
    parts = [columns[i : i + COLUMNS] for i in range(0, len(columns), COLUMNS)]
    return draw_sheet([row for part in parts for row in zip(*part, strict=True)])


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
    except UNREADABLE as error:
        raise UserError(
            f"{path}: can't be read as an image ({error}); run generate again"
        ) from None


def draw_sheet(rows: Sequence[Sequence[Cell]], title: str = "") -> Image.Image:
    """Draw rows of cells, which may differ in length, on white.

    A column is as wide as its widest cell, and lines are cut to fit. The title is above all rows,
    in large type.
    """
    columns = max(len(row) for row in rows)
    widths = [max(row[i].image.width for row in rows if i < len(row)) for i in range(columns)]
    images = [max(cell.image.height for cell in row) for row in rows]
    headings = [LARGE_LINE * any(cell.heading for cell in row) for row in rows]
    texts = [LINE * max(len(cell.lines) for cell in row) for row in rows]
    top = MARGIN + (LARGE_LINE + MARGIN // 2 if title else 0)
    height = top + sum(images) + sum(headings) + sum(texts) + MARGIN * len(rows)
    size = sum(widths) + MARGIN * (columns + 1), height
    sheet = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(sheet)
    fonts = {side: ImageFont.load_default(side) for side in (FONT_SIZE, LARGE)}

    def write(x: int, y: int, line: str, width: int, side: int = FONT_SIZE) -> None:
        line = "".join(char if char.isprintable() else " " for char in line[:500])
        while line.rstrip(".") and fonts[side].getlength(line) > width:
            line = line.removesuffix("...")[:-1] + "..."
        draw.text((x, y), line, _INK, fonts[side])

    write(MARGIN, MARGIN // 2 + 2, title, size[0] - 2 * MARGIN, LARGE)
    y = top
    for row, image, heading, below in zip(rows, images, headings, texts, strict=True):
        x = MARGIN
        for cell, width in zip(row, widths, strict=False):
            sheet.paste(cell.image, (x, y))
            write(x, y + image + 2, cell.heading, width, LARGE)
            for number, line in enumerate(cell.lines):
                write(x, y + image + heading + 2 + LINE * number, line, width)
            x += width + MARGIN
        y += image + heading + below + MARGIN
    return sheet


def enlarge(image: Image.Image, side: int) -> Image.Image:
    """Return the image times the largest whole number with which it fits in `side` pixels."""
    factor = max(1, side // max(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def difference_map(one: Image.Image, other: Image.Image) -> Image.Image:
    """Draw where two images of one size differ, as means over the channels.

    White means equal, and the darkest color `DIFFERENCE_SCALE` levels or more.
    """
    gap = np.abs(np.asarray(one, float) - np.asarray(other, float)).mean(2) / DIFFERENCE_SCALE
    place = gap.clip(0, 1) * (len(_DIFFERENCE_COLORS) - 1)
    shades = [
        np.interp(place, range(len(_DIFFERENCE_COLORS)), channel)
        for channel in _DIFFERENCE_COLORS.T
    ]
    return Image.fromarray(np.stack(shades, 2).round().astype(np.uint8))


def nearness(one: Image.Image, other: Image.Image) -> str:
    """Return the PSNR of two 8-bit images of one size in words; more is nearer.

    >>> grey = Image.new("RGB", (2, 2), (100, 100, 100))
    >>> nearness(grey, grey), nearness(grey, Image.new("RGB", (2, 2), (101, 101, 101)))
    ('equal to the baseline', '48.1 dB')
    """
    near = psnr(one, other)
    return "equal to the baseline" if near == math.inf else f"{near:.1f} dB"


def psnr(one: Image.Image, other: Image.Image) -> float:
    """Return the PSNR of two 8-bit images of one size in dB; equal ones give infinity."""
    error = float(np.mean((np.asarray(one, np.float64) - np.asarray(other, np.float64)) ** 2))
    return float(10 * np.log10(255**2 / error)) if error else math.inf


def check_sheet_path(path: Path) -> None:
    """Raise UserError if a sheet can't be written to `path`, or if another file is there."""
    with writing(path):
        there = nearest(path) == path
    if path.suffix.lower() != ".png" or (there and path.is_dir()):
        got = "a folder" if there and path.is_dir() else path.suffix or "no ending"
        advice = "name a file such as sheet.png"
        raise unexpected(f"--out {path}", "a file ending in .png", got, advice)
    if there:
        ours = False
        with contextlib.suppress(*UNREADABLE), Image.open(path) as image:
            image.load()
            ours = "mame_sd" in image.info
        if not ours:
            raise UserError(
                f"--out {path}: expected a new file or an earlier sheet, got another file; choose"
                " another name"
            )
    check_place(path.parent, path)


def write_sheet(path: Path, sheet: Image.Image, about: dict[str, Any]) -> None:
    """Write a sheet as a PNG file, in one step.

    Args:
        path: the file.
        sheet: the image.
        about: JSON values for its text chunk `mame_sd`.
    """
    check_sheet_path(path)
    text = PngInfo()
    text.add_text("mame_sd", json.dumps(about, sort_keys=True))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", pnginfo=text)
    write_atomically(path, buffer.getvalue())
