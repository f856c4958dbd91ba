"""Contact sheets: images in rows and columns with lines of text under them, drawn with pillow."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from mame_sd.errors import UserError
from mame_sd.runs.files import check_place, nearest, write_atomically, writing

FONT_SIZE = 15
LINE = 20  # pixels from one line of text to the next
MARGIN = 12
_INK, _PAPER = (24, 24, 27), (255, 255, 255)


@dataclass(frozen=True)
class Cell:
    """One image of a sheet and the lines under it."""

    image: Image.Image
    lines: tuple[str, ...] = ()


def draw_sheet(rows: Sequence[Sequence[Cell]], title: str = "") -> Image.Image:
    """All cells on white, each column as wide as its widest cell; long lines are shortened to
    fit.
    """
    columns = max(len(row) for row in rows)
    widths = [max(row[i].image.width for row in rows if i < len(row)) for i in range(columns)]
    images = [max(cell.image.height for cell in row) for row in rows]
    texts = [LINE * max(len(cell.lines) for cell in row) for row in rows]
    top = MARGIN + (LINE + MARGIN // 2 if title else 0)
    height = top + sum(images) + sum(texts) + MARGIN * len(rows)
    size = sum(widths) + MARGIN * (columns + 1), height
    sheet = Image.new("RGB", size, _PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT_SIZE)

    def write(x: int, y: int, line: str, width: int) -> None:
        """The line at (x, y), shortened to `width` pixels, without control characters."""
        line = "".join(char if char.isprintable() else " " for char in line[:500])
        while line.rstrip(".") and font.getlength(line) > width:
            line = line.removesuffix("...")[:-1] + "..."
        draw.text((x, y), line, _INK, font)

    write(MARGIN, MARGIN // 2 + 2, title, size[0] - 2 * MARGIN)
    y = top
    for row, image, below in zip(rows, images, texts, strict=True):
        x = MARGIN
        for cell, width in zip(row, widths, strict=False):
            sheet.paste(cell.image, (x, y))
            for number, line in enumerate(cell.lines):
                write(x, y + image + 2 + LINE * number, line, width)
            x += width + MARGIN
        y += image + below + MARGIN
    return sheet


def enlarge(image: Image.Image, side: int) -> Image.Image:
    """The image, times the whole number that brings its longer side nearest to `side` without
    passing it.
    """
    factor = max(1, side // max(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


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
