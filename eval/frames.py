"""Images as viewers show them, and the frames of a clip: which files of a folder they are, in which
order, and which of them a model of clips sees.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")  # of images


def is_turned(image: Image.Image) -> bool:
    """Whether EXIF says that the pixels must be turned or mirrored to be seen upright."""
    return image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)


def as_shown(image: Image.Image) -> Image.Image:
    """`image` in 8-bit RGB as viewers show it: turned as EXIF says, the upper 8 of 16 bits,
    see-through pixels on white, the first of several frames.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # Pillow would cut off at 255
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def frames_in(folder: Path) -> list[Path]:
    """The images in `folder` in the order of the numbers in their names."""
    files = [one for one in folder.iterdir() if one.suffix.lower() in SUFFIXES]
    return sorted(files, key=lambda one: [int(n) for n in re.findall(r"\d+", one.stem)])


def evenly(count: int, wanted: int) -> list[int]:
    """Numbers of `wanted` of `count` frames, the first and the last among them; some twice where
    there are fewer: `evenly(15, 8)` is 0, 2, ..., 14, and `evenly(2, 4)` is 0, 0, 1, 1.
    """
    return [int(place) for place in np.rint(np.linspace(0, count - 1, wanted))]
