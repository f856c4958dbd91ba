"""Read images from files as viewers show them, find the frames of a clip, and check tensors."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageCms, ImageOps
from torch import Tensor

from mame_sd.errors import UserError

# Endings of images, and of images that are not read.
SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")
UNREAD = (".heic", ".heif", ".jxl", ".jp2", ".tga", ".psd", ".ppm", ".pgm", ".svg")
_SPACES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}  # of colour profiles


def image_files(folder: Path) -> list[Path]:
    """Return the images directly inside a folder, by name.

    Raises UserError if there are none, or if some are of a kind that isn't read.
    """
    if not folder.is_dir():
        raise UserError(f"expected a folder of images, but {folder} is not one; check the path")
    try:
        check_read(folder.iterdir())
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    files = sorted(
        path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file()
    )
    if not files:
        raise UserError(
            f"expected images ({', '.join(SUFFIXES)}) in {folder}, found none; check the path"
        )
    return files


def load_image(path: Path) -> np.ndarray:
    """Read the pixels of a file as viewers show them (`as_shown`), uint8 [H, W, 3].

    The file is decoded to its last byte, and for PNG every checksum is verified.

    Raises UserError if there is no such file, or if it isn't an image, is truncated or corrupt.
    """
    if not path.is_file():
        raise UserError(f"expected an image file, but {path} is not one; check the path")
    data = path.read_bytes()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                image.verify()
            with Image.open(io.BytesIO(data)) as image:
                image.load()
                return np.array(as_shown(image))
    # Pillow raises OSError, SyntaxError, ValueError, struct.error, ... for broken files
    except Exception as error:
        reason = (
            "it is not an image" if isinstance(error, Image.UnidentifiedImageError) else str(error)
        )
        raise UserError(
            f"expected a whole image in {path}, but {reason}; make the file again or take it out"
        ) from error


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


def to_float(images: Sequence[np.ndarray]) -> Tensor:
    """Convert uint8 [H, W, 3] images to a float32 tensor [n, 3, H, W] in [0, 1].

    Raises UserError if their sizes differ.
    """
    if not images:
        raise UserError("expected at least one image, got none")
    sizes = sorted({(image.shape[1], image.shape[0]) for image in images})
    if len(sizes) > 1:
        names = ", ".join(f"{width} x {height}" for width, height in sizes[:4])
        raise UserError(
            f"expected images of one size, got {names}; metrics compare pixel by pixel, so make"
            " both runs at one size"
        )
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).to(torch.float32).div(255)


def check_images(images: Tensor, name: str = "images") -> None:
    """Raise ValueError unless `images` is a floating [n, 3, H, W] with every value in [0, 1]."""
    if (
        images.ndim != 4
        or images.shape[1] != 3
        or not images.is_floating_point()
        or images.numel() == 0
    ):
        raise ValueError(
            f"expected {name} as floats [n, 3, height, width], got {images.dtype}"
            f" {list(images.shape)}"
        )
    low, high = images.aminmax()
    if not (low >= 0 and high <= 1):  # false for NaN too
        raise ValueError(
            f"expected {name} with values from 0 to 1, got {low.item():g} to {high.item():g};"
            " divide bytes by 255"
        )


def check_pair(a: Tensor, b: Tensor) -> None:
    """Raise ValueError unless both are images (see `check_images`) of one shape."""
    check_images(a, "the first images")
    check_images(b, "the second images")
    if a.shape != b.shape:
        sizes = " and ".join(f"{x.shape[3]} x {x.shape[2]}" for x in (a, b))
        raise ValueError(f"expected pairs of one shape, got {len(a)} and {len(b)} of {sizes}")


def to_double(x: Tensor) -> Tensor:
    """Return `x` in float64, on its own device or, if that has no float64 (Apple's), on the CPU."""
    return x.cpu().double() if x.device.type == "mps" else x.double()
