"""Contact sheets: images in rows and columns with lines of text under them, drawn with pillow."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from mame_sd.errors import UserError
from mame_sd.runs.files import check_place, nearest, write_atomically, writing

FONT_SIZE, LARGE = 15, 30  # pixels
LINE, LARGE_LINE = 20, 38  # pixels from one line of text to the next
MARGIN = 12
PANEL_SIDE = 512
COLUMNS = 6  # images side by side
DIFFERENCE_SCALE = 64  # levels of 255 at which a difference map is darkest
_INK, _PAPER = (24, 24, 27), (255, 255, 255)
_DIFFERENCE_COLORS = np.array([(255, 255, 255), (246, 173, 60), (190, 40, 60), (50, 10, 60)], float)


@dataclass(frozen=True)
class Cell:
    """One image of a sheet, a `heading` in large type under it, and lines under that."""

    image: Image.Image
    lines: tuple[str, ...] = ()
    heading: str = ""


def draw_sheet(rows: Sequence[Sequence[Cell]], title: str = "") -> Image.Image:
    """Draw all cells on white, each column as wide as its widest cell; lines are shortened to fit.

    Args:
        rows: of cells; they need not be of one length.
        title: stands above them in large type.
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
        """Write the line at (x, y), shortened to `width` pixels, without control characters."""
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


def in_columns(columns: Sequence[Sequence[Cell]], title: str = "") -> Image.Image:
    """Draw columns of cells, `COLUMNS` side by side, those that are left below them."""
    parts = [columns[i : i + COLUMNS] for i in range(0, len(columns), COLUMNS)]
    return draw_sheet([row for part in parts for row in zip(*part, strict=True)], title)


def enlarge(image: Image.Image, side: int) -> Image.Image:
    """The image, times the whole number that brings its longer side nearest to `side` without
    passing it.
    """
    factor = max(1, side // max(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def difference_map(one: Image.Image, other: Image.Image) -> Image.Image:
    """Show where two images of one size differ: white where they are equal, darkest from
    `DIFFERENCE_SCALE` levels on, means over the channels.
    """
    gap = np.abs(np.asarray(one, float) - np.asarray(other, float)).mean(2) / DIFFERENCE_SCALE
    place = gap.clip(0, 1) * (len(_DIFFERENCE_COLORS) - 1)
    shades = [
        np.interp(place, range(len(_DIFFERENCE_COLORS)), channel)
        for channel in _DIFFERENCE_COLORS.T
    ]
    return Image.fromarray(np.stack(shades, 2).round().astype(np.uint8))


def nearness(one: Image.Image, other: Image.Image) -> str:
    """PSNR in dB of two 8-bit images of one size, in words: more is nearer.

    >>> grey = Image.new("RGB", (2, 2), (100, 100, 100))
    >>> nearness(grey, grey), nearness(grey, Image.new("RGB", (2, 2), (101, 101, 101)))
    ('equal to the baseline', '48.1 dB')
    """
    near = psnr(one, other)
    return "equal to the baseline" if near == math.inf else f"{near:.1f} dB"


def psnr(one: Image.Image, other: Image.Image) -> float:
    """In dB, of two 8-bit images of one size; infinite where they are equal."""
    error = float(np.mean((np.asarray(one, np.float64) - np.asarray(other, np.float64)) ** 2))
    return float(10 * np.log10(255**2 / error)) if error else math.inf


def check_sheet_path(path: Path) -> None:
    """Raise UserError when a sheet can't be written to `path`, or something else is there."""
    if path.suffix.lower() != ".png":
        raise UserError(
            f"--out {path}: expected a file ending in .png, got {path.suffix or 'no ending'};"
            " rename it"
        )
    with writing(path):
        there = nearest(path) == path
    if there and path.is_dir():
        raise UserError(f"--out {path}: expected a file, got a folder; name a file in it")
    if there:
        ours = False
        unread = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
        with contextlib.suppress(*unread), Image.open(path) as image:
            image.load()
            ours = "mame_sd" in image.info
        if not ours:
            raise UserError(
                f"--out {path}: expected a new file or an earlier sheet, got another file; choose"
                " another name"
            )
    check_place(path.parent, path)


def write_sheet(path: Path, sheet: Image.Image, about: dict[str, Any]) -> None:
    """Write the sheet as PNG, all or nothing, with `about` as JSON in its text chunk
    ``mame_sd``.
    """
    check_sheet_path(path)
    text = PngInfo()
    text.add_text("mame_sd", json.dumps(about, sort_keys=True))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", pnginfo=text)
    write_atomically(path, buffer.getvalue())
