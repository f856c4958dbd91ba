"""Prepare the page's images: rows side by side, maps of their differences, and a gallery.

Everything is embedded as WebP of bounded size, lossless if that fits. So the page's size is bounded
too: 12 prompts of 768 x 768 stay below 8 MB. Differences are computed from the PNG files.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image

from ..results.schema import MethodResult, Picture, Results
from .numbers import number
from .select import CASES, Focus, cases

LARGE_BYTES, THUMB_BYTES = 240_000, 22_000  # of one embedded image
THUMB_SIDE = 256
GALLERY_PROMPTS, GALLERY_IMAGES = 12, 84
SCALES = (8, 16, 32, 64, 128, 255)  # of difference maps, in levels of 255
_COLORS = (
    (matplotlib.colormaps["inferno"](np.linspace(0, 1, 256))[:, :3] * 255).round().astype(np.uint8)
)  # [256, 3]
_CASE_TITLES = dict(zip(CASES, ("Closest", "Median", "Furthest"), strict=True)) | {
    "only": "The image",
    "": "Image",
}


@dataclass(frozen=True)
class Shot:
    """One embedded image.

    Attributes:
        src: its data URI.
        caption: text under it.
        label: text next to its enlargement.
        score: its own figure of closeness, or "".
        alt: text for screen readers.
        area: a family, with "map-" before it for a map of differences.
        width: pixels.
        height: pixels.
    """

    src: str
    caption: str
    label: str
    score: str
    alt: str
    area: str
    width: int
    height: int


@dataclass(frozen=True)
class Case:
    """One prompt's images: baseline, rival and MaMe, then the differences of the latter two."""

    title: str
    picture: Picture
    shots: Sequence[Shot]
    ranked: bool = False

    @property
    def across(self) -> int:
        """Number of columns on a phone: images with their maps below, or all if they are few."""
        images = sum(not shot.area.startswith("map-") for shot in self.shots)
        return images if len(self.shots) > 3 else len(self.shots)


@dataclass(frozen=True)
class Pictures:
    """Everything shown.

    Attributes:
        cases: the images of the best, median and worst prompt.
        gallery: small images of further prompts.
        scale: difference at which maps are brightest, in levels of 255.
        missing: files that couldn't be read.
    """

    cases: Sequence[Case]
    gallery: Sequence[Case]
    scale: int
    missing: Sequence[str]


def load_pictures(results: Results, chosen: Focus, folder: Path) -> Pictures:
    """Load the images that the page shows.

    Args:
        results: the results.
        chosen: the rows to show next to each other.
        folder: the folder that holds the runs of the rows.

    Returns:
        The images; `missing` lists files that can't be read.
    """
    missing: set[str] = set()

    def read(row: MethodResult, key: str) -> Image.Image | None:
        if row.run is None:
            return None
        path = Path(row.run, "images", f"{key}.png")
        try:
            with Image.open(folder / path) as image:
                return image.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            missing.add(path.as_posix())
            return None

    by_key = {picture.key: picture for picture in results.pictures}
    columns = [row for row in (chosen.baseline, chosen.rival, chosen.mame) if row is not None]
    chosen_images = []
    for case, key in cases(results, chosen):
        images = [(row, image) for row in columns if (image := read(row, key))]
        base = next((image for row, image in images if row.family == "baseline"), None)
        apart = [
            (row, difference(base, image))
            for row, image in images
            if row.family != "baseline" and base is not None and image.size == base.size
        ]
        chosen_images.append((case, by_key[key], images, apart))
    scale = _scale([values for *_, apart in chosen_images for _, values in apart])
    shown = []
    for case, picture, images, apart in chosen_images:
        shots = [
            _shot(image, row.label, picture, row.family, LARGE_BYTES, _score(row, picture, chosen))
            for row, image in images
        ]
        shots += [_map(difference_map(values, scale), row, picture) for row, values in apart]
        shown.append(Case(_CASE_TITLES[case], picture, shots, bool(case)))
    rows, gallery = results.measured, []
    count = min(GALLERY_PROMPTS, GALLERY_IMAGES // max(1, len(rows)))
    for picture in results.pictures[:count]:
        shots = []
        for row in rows:
            if image := read(row, picture.key):
                image.thumbnail((THUMB_SIDE, THUMB_SIDE), Image.Resampling.LANCZOS)
                shots.append(_shot(image, row.label, picture, row.family, THUMB_BYTES))
        gallery.append(Case(picture.prompt, picture, shots))
    return Pictures(
        [case for case in shown if case.shots],
        [case for case in gallery if case.shots],
        scale,
        sorted(missing),
    )


def difference(one: Image.Image, other: Image.Image) -> np.ndarray:
    """Return the mean over channels of |one - other|, float32 [H, W] in levels of 255."""
    return np.abs(np.asarray(one, np.float32) - np.asarray(other, np.float32)).mean(-1)


def difference_map(values: np.ndarray, scale: int) -> Image.Image:
    """Colour a difference: black for none, brightest from `scale` levels on."""
    return Image.fromarray(_COLORS[np.clip(values * (255 / scale), 0, 255).astype(np.uint8)])


def gradient() -> str:
    """Return the colours of the maps as a CSS gradient, from none to most."""
    stops = ", ".join("#%02x%02x%02x" % tuple(_COLORS[n]) for n in range(0, 256, 17))  # noqa: UP031 (reads best)
    return f"linear-gradient(90deg, {stops})"


def webp_uri(image: Image.Image, limit: int) -> str:
    """Return an image as a data URI of at most `limit` bytes before encoding.

    It is lossless if that fits; otherwise quality and then size are reduced.
    """
    options: list[dict[str, Any]] = [
        {"lossless": True},
        *({"quality": quality} for quality in (92, 82, 70, 55, 40, 20)),
    ]
    while True:
        for option in options:
            buffer = io.BytesIO()
            image.save(buffer, "WEBP", method=4, **option)
            if buffer.tell() <= limit:
                return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
        image = image.resize(
            (max(1, image.width // 2), max(1, image.height // 2)), Image.Resampling.LANCZOS
        )


def _scale(differences: Sequence[np.ndarray]) -> int:
    """Return the smallest of `SCALES` that 99.5 % of the pixels stay below."""
    if not differences:
        return SCALES[-1]
    most = max(float(np.quantile(values, 0.995)) for values in differences)
    return next((scale for scale in SCALES if scale >= most), SCALES[-1])


def _shot(
    image: Image.Image, label: str, picture: Picture, family: str, limit: int, score: str = ""
) -> Shot:
    words = " · ".join(part for part in (label, score) if part)
    alt = f"{picture.prompt}, generated with {label}"
    return Shot(webp_uri(image, limit), label, words, score, alt, family, *image.size)


def _map(image: Image.Image, row: MethodResult, picture: Picture) -> Shot:
    label = f"Difference of {row.label} from the baseline"
    uri, alt = webp_uri(image, LARGE_BYTES), f"{label}: {picture.prompt}"
    return Shot(uri, f"Difference, {row.label}", label, "", alt, f"map-{row.family}", *image.size)


def _score(row: MethodResult, picture: Picture, chosen: Focus) -> str:
    """Return the image's own figure of closeness with its name, or ""."""
    if chosen.closeness is None:
        return ""
    value = row.per_image.get(chosen.closeness.name, {}).get(picture.key)
    if value is None or row.family == "baseline":
        return ""
    return f"{chosen.closeness.label.split(' (')[0]} {number(value, chosen.closeness.digits)}"
