"""Prepare the page's images: rows side by side, and maps of their differences.

They are embedded as WebP. Differences are computed from the PNG files.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image

from ..results.schema import MethodResult, Picture, Results
from .numbers import number
from .select import CASES, Focus, cases

QUALITY = 92  # of an embedded image: one of 768 x 768 has at most some 200 kB
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
        caption: text under it.
        label: text next to its enlargement.
        score: its own figure of closeness, or "".
        area: a family, with "map-" before it for a map of differences.
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
        """Count the columns on a phone: images with their maps below, or all if they are few."""
        images = sum(not shot.area.startswith("map-") for shot in self.shots)
        return images if len(self.shots) > 3 else len(self.shots)


@dataclass(frozen=True)
class Pictures:
    """Everything shown.

    Attributes:
        cases: the images of the best, median and worst prompt.
        scale: difference at which maps are brightest, in levels of 255.
        missing: files that couldn't be read.
    """

    cases: Sequence[Case]
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
        shots = [_shot(image, row, picture, _score(row, picture, chosen)) for row, image in images]
        shots += [_map(difference_map(values, scale), row, picture) for row, values in apart]
        shown.append(Case(_CASE_TITLES[case], picture, shots, bool(case)))
    return Pictures([case for case in shown if case.shots], scale, sorted(missing))


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


def webp_uri(image: Image.Image) -> str:
    """Return an image as a data URI."""
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=QUALITY)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def _scale(differences: Sequence[np.ndarray]) -> int:
    """Return the smallest of `SCALES` that 99.5 % of the pixels stay below."""
    if not differences:
        return SCALES[-1]
    most = max(float(np.quantile(values, 0.995)) for values in differences)
    return next((scale for scale in SCALES if scale >= most), SCALES[-1])


def _shot(image: Image.Image, row: MethodResult, picture: Picture, score: str) -> Shot:
    words = " · ".join(part for part in (row.label, score) if part)
    alt = f"{picture.prompt}, generated with {row.label}"
    return Shot(webp_uri(image), row.label, words, score, alt, row.family, *image.size)


def _map(image: Image.Image, row: MethodResult, picture: Picture) -> Shot:
    label = f"Difference of {row.label} from the baseline"
    uri, alt = webp_uri(image), f"{label}: {picture.prompt}"
    return Shot(uri, f"Difference, {row.label}", label, "", alt, f"map-{row.family}", *image.size)


def _score(row: MethodResult, picture: Picture, chosen: Focus) -> str:
    """Return the image's own figure of closeness with its name, or ""."""
    if chosen.closeness is None:
        return ""
    value = row.per_image.get(chosen.closeness.name, {}).get(picture.key)
    if value is None or row.family == "baseline":
        return ""
    return f"{chosen.closeness.label.split(' (')[0]} {number(value, chosen.closeness.digits)}"
