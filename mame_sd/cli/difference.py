"""How far two images of one prompt are apart: a number to read and a picture to look at."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

GAIN = 8  # how many times the difference of two images is enlarged to be seen
DIFFERENCE = f"difference, {GAIN} times"


def nearness(one: Image.Image, other: Image.Image) -> str:
    """PSNR in dB of two 8-bit images of one size, in words: more is nearer.

    >>> grey = Image.new("RGB", (2, 2), (100, 100, 100))
    >>> nearness(grey, grey), nearness(grey, Image.new("RGB", (2, 2), (101, 101, 101)))
    ('equal to the baseline', 'PSNR 48.1 dB')
    """
    near = psnr(one, other)
    return "equal to the baseline" if near == math.inf else f"PSNR {near:.1f} dB"


def psnr(one: Image.Image, other: Image.Image) -> float:
    """In dB, of two 8-bit images of one size; infinite where they are equal."""
    error = float(np.mean((np.asarray(one, np.float64) - np.asarray(other, np.float64)) ** 2))
    return float(10 * np.log10(255**2 / error)) if error else math.inf


def difference(one: Image.Image, other: Image.Image) -> Image.Image:
    """The largest difference of the channels of two RGB images of one size, enlarged `GAIN` times,
    dark on white.
    """
    apart = np.abs(np.asarray(one, np.int16) - np.asarray(other, np.int16)).max(-1)
    return Image.fromarray(255 - np.clip(GAIN * apart, 0, 255).astype(np.uint8)).convert("RGB")
