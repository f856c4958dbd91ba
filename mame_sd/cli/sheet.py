"""Draw sheets: images in rows and columns with lines of text. Nothing here imports torch."""

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

from mame_sd.errors import UserError, unexpected
from mame_sd.runs.files import check_place, write_atomically, writing

FONT_SIZE, LARGE = 15, 30  # pixels
LINE, LARGE_LINE = 20, 38  # pixels from one line of text to the next
MARGIN = 12
PANEL_SIDE = 512
DIFFERENCE_SCALE = 64  # levels of 255 at which a difference map is darkest
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # raised by pillow
_INK, _PAPER = (24, 24, 27), (255, 255, 255)
_DIFFERENCE_COLORS = np.array([(255, 255, 255), (246, 173, 60), (190, 40, 60), (50, 10, 60)], float)


@dataclass(frozen=True)
class Cell:
    """One image of a sheet, with a `heading` in large type and `lines` below it."""

    image: Image.Image
    lines: tuple[str, ...]
    heading: str = ""


def draw_sheet(rows: Sequence[Sequence[Cell]], title: str) -> Image.Image:
    """Draw rows of cells of one size on white, with a title in large type above them.

    Lines of text are cut to fit.
    """
    width, height = rows[0][0].image.size
    below = LARGE_LINE + LINE * max(len(cell.lines) for row in rows for cell in row)
    top = MARGIN + LARGE_LINE + MARGIN // 2
    across, down = width + MARGIN, height + below + MARGIN
    size = MARGIN + across * max(map(len, rows)), top + down * len(rows)
    sheet = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(sheet)
    fonts = {side: ImageFont.load_default(side) for side in (FONT_SIZE, LARGE)}

    def write(x: int, y: int, line: str, side: int = FONT_SIZE, room: int = width) -> None:
        line = "".join(char if char.isprintable() else " " for char in line[:500])
        while line.rstrip(".") and fonts[side].getlength(line) > room:
            line = line.removesuffix("...")[:-1] + "..."
        draw.text((x, y), line, _INK, fonts[side])

    write(MARGIN, MARGIN // 2 + 2, title, LARGE, size[0] - 2 * MARGIN)
    for number, row in enumerate(rows):
        for column, cell in enumerate(row):
            x, y = MARGIN + across * column, top + down * number
            sheet.paste(cell.image, (x, y))
            write(x, y + height + 2, cell.heading, LARGE)
            for place, line in enumerate(cell.lines):
                write(x, y + height + LARGE_LINE + 2 + LINE * place, line)
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
    """Describe how near two 8-bit images of one size are by their PSNR; more dB is nearer.

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
    check_place(path.parent, path)
    with writing(path):  # its name may be too long
        is_folder = path.is_dir()
    if path.suffix.lower() != ".png" or is_folder:
        got = "a folder" if is_folder else path.suffix or "no ending"
        advice = "name a file such as sheet.png"
        raise unexpected(f"--out {path}", "a file ending in .png", got, advice)
    if path.exists():
        ours = False
        with contextlib.suppress(*UNREADABLE), Image.open(path) as image:
            image.load()
            ours = "mame_sd" in image.info
        if not ours:
            raise UserError(
                f"--out {path}: expected a new file or an earlier sheet, got another file; choose"
                " another name"
            )


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
