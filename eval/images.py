"""Read images from files, without silent changes.

Any file that holds the same picture as 8-bit RGB is accepted: RGB, grey, palettes, an alpha channel
that hides nothing. Whatever a conversion would change is refused: 16 bits, transparent pixels,
CMYK, animations, colours of a profile other than sRGB. Pixels are turned as EXIF says, as viewers
do; `turned_note` counts such files.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from mame_sd.errors import UserError

from .frames import SUFFIXES, as_shown, check_read, in_srgb, orientation

ROUNDING = 1  # by which a profile of sRGB itself may change an 8-bit value
_PNG_SIGNATURE, _PNG_DEPTH_AT = b"\x89PNG\r\n\x1a\n", 24


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


def load_image(path: Path, convert: bool = False) -> np.ndarray:
    """Read the pixels of a file, uint8 [H, W, 3].

    The file is decoded to its last byte, and for PNG every checksum is verified.

    Args:
        path: the file.
        convert: if True, convert what RGB can't hold unchanged, as other programs show it: CMYK,
            the upper 8 of 16 bits, transparent pixels on white, the first of several frames, the
            colours of a profile.

    Raises:
        UserError: there is no such file, or it isn't an image, is truncated or corrupt, or
            has a mode that RGB can't hold unchanged.
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
                return np.array(as_shown(image) if convert else _as_rgb(image, data, path))
    except UserError:
        raise
    # Pillow raises OSError, SyntaxError, ValueError, struct.error, ... for broken files
    except Exception as error:
        reason = (
            "it is not an image" if isinstance(error, Image.UnidentifiedImageError) else str(error)
        )
        raise UserError(
            f"expected a whole image in {path}, but {reason}; make the file again or take it out"
        ) from error


def turned_note(files: Iterable[Path]) -> str:
    """Return a note on images that EXIF turns or mirrors, or "" if there are none."""
    count = 0
    for file in files:
        with contextlib.suppress(Exception), Image.open(file) as image:  # loading reports it
            count += orientation(image) in range(2, 9)
    return (
        f"{count} image{'s are' if count > 1 else ' is'} turned as EXIF says, as viewers do"
        if count
        else ""
    )


def size_of(file: Path) -> tuple[int, int]:
    """Return (width, height) of an image as it is shown, from its header.

    Raises UserError as `load_image` does.
    """
    try:
        with Image.open(file) as image:
            width, height = image.size
            across = orientation(image) in range(5, 9)
    except Exception:  # load_image explains it
        height, width = load_image(file).shape[:2]
        across = False
    return (height, width) if across else (width, height)


def _as_rgb(image: Image.Image, data: bytes, path: Path) -> Image.Image:
    """Convert an image to RGB and turn it upright, if that is the same picture."""
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # a photograph and its preview
        raise _wrong_mode(path, f"{image.n_frames} frames")  # type: ignore[attr-defined]
    # Pillow drops the low byte without a word
    if data.startswith(_PNG_SIGNATURE) and data[_PNG_DEPTH_AT] == 16:
        raise _wrong_mode(path, "16 bits per channel")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if np.array(image)[..., 3].min() < 255:
            raise _wrong_mode(path, "transparent pixels")
    if image.mode not in ("RGB", "RGBA", "RGBX", "L", "1", "P"):
        raise _wrong_mode(path, f"mode {image.mode}")
    rgb = image.convert("RGB")
    if image.info.get("icc_profile"):
        try:
            shown = in_srgb(image).convert("RGB")
        except ValueError as error:
            raise _wrong_mode(path, f"a colour profile that can't be read ({error})") from None
        apart = np.abs(np.asarray(shown, np.int16) - np.asarray(rgb, np.int16))
        if apart.max() > ROUNDING:
            raise _wrong_mode(path, "a colour profile that changes its colours")
    return ImageOps.exif_transpose(image).convert("RGB")


def _wrong_mode(path: Path, got: str) -> UserError:
    return UserError(f"expected an 8-bit RGB image, but {path} has {got}; convert it to RGB")


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
