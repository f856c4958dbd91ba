"""Show images as viewers do, and find the frames of a clip."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageOps

from mame_sd.errors import UserError

# Endings of images, and of images that are not read.
SUFFIXES = (*(".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"),)
UNREAD = (".heic", ".heif", ".jxl", ".jp2", ".tga", ".psd", ".ppm", ".pgm", ".svg")
_SPACES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}  # of colour profiles


def in_srgb(image: Image.Image) -> Image.Image:
    """Convert an image to the colours that viewers show by its profile, and drop the profile.

    Raises ValueError if the profile can't be read, or is of another kind of image.
    """
    data = image.info.get("icc_profile")
    if not data or image.mode.startswith("I"):
        return image
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(data))
        mode = _SPACES[profile.profile.xcolor_space]
        if mode == "CMYK" != image.mode or (mode == "L" and image.mode not in ("L", "LA", "1")):
            raise ValueError(f"of {mode} in an image of {image.mode}")
        colours = image.convert("RGB" if mode == "RGB" else mode)
        shown = ImageCms.profileToProfile(
            colours, profile, ImageCms.createProfile("sRGB"), outputMode="RGB"
        )
    except (OSError, KeyError, ImageCms.PyCMSError) as error:
        raise ValueError(str(error)) from None
    assert shown is not None
    shown.info.pop("icc_profile", None)
    if alpha is not None:
        shown.putalpha(alpha)
    return shown


def as_shown(image: Image.Image) -> Image.Image:
    """Convert an image to 8-bit RGB as viewers show it.

    It is turned as EXIF says and has the colours of its profile. The upper 8 of 16 bits and the
    first of several frames are used, and transparent pixels are put on white.
    """
    image = ImageOps.exif_transpose(image)
    with contextlib.suppress(ValueError):  # viewers ignore such a profile
        image = in_srgb(image)
    if image.mode.startswith("I"):  # Pillow would cut off at 255
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def check_read(files: Iterable[Path]) -> None:
    """Raise UserError for images of a kind that isn't read, instead of leaving them out."""
    unread = sorted(one.name for one in files if one.suffix.lower() in UNREAD)
    if unread:
        raise UserError(
            f"expected images ({', '.join(SUFFIXES)}), got {unread[0]!r} ({len(unread)} of a kind"
            " that is not read); convert it or take it out"
        )


def frames_in(folder: Path) -> list[Path]:
    """Return the images in a folder, at least one, ordered by the numbers in their names."""
    check_read(folder.iterdir())
    files = [one for one in folder.iterdir() if one.suffix.lower() in SUFFIXES]
    if not files:
        raise UserError(
            f"expected frames ({', '.join(SUFFIXES)}) in {folder}, found none; take the folder out"
        )
    return sorted(files, key=lambda one: [int(n) for n in re.findall(r"\d+", one.stem)])


def evenly(count: int, wanted: int) -> list[int]:
    """Return the numbers of `wanted` of `count` frames, evenly spaced from the first to the last.

    If there are fewer frames, some come twice: `evenly(15, 8)` is 0, 2, ..., 14, and `evenly(2, 4)`
    is 0, 0, 1, 1.
    """
    return [int(place) for place in np.rint(np.linspace(0, count - 1, wanted))]
