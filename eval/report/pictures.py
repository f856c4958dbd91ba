"""Images for the page: baseline, ToMeSD and MaMe side by side, maps of what differs, and a gallery
of all prompts.

Everything is embedded as WebP of bounded size, lossless where that fits. So the page's size is
bounded too: 12 prompts of 768 x 768 stay below 8 MB. Differences are computed from the PNG files.
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

from ..results.schema import Picture, Results, Row
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
    """One embedded image as a data URI.

    `caption` stands under it, `label` beside its enlargement; `area` is a family, with "map-"
    before it for a map of differences.
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
    """One prompt's images: baseline, ToMeSD, MaMe, then the differences of the latter two from the
    baseline.
    """

    title: str
    picture: Picture
    shots: Sequence[Shot]
    ranked: bool = False

    @property
    def across(self) -> int:
        """Columns on a phone: the images with their maps below, or all where they are few."""
        images = sum(not shot.area.startswith("map-") for shot in self.shots)
        return images if len(self.shots) > 3 else len(self.shots)


@dataclass(frozen=True)
class Pictures:
    """Everything shown; `scale` is the difference, in levels of 255, at which the maps are
    brightest.
    """

    cases: Sequence[Case]
    gallery: Sequence[Case]
    scale: int
    missing: Sequence[str]


def load_pictures(results: Results, chosen: Focus, folder: Path) -> Pictures:
    """The images of `results`, whose runs lie in `folder`.

    What can't be read is left out and named in `missing`.
    """
    reader = _Reader(folder)
    by_key = {picture.key: picture for picture in results.pictures}
    columns = [row for row in (chosen.baseline, chosen.rival, chosen.mame) if row is not None]
    found = [
        (case, by_key[key], [(row, reader.read(row, key)) for row in columns])
        for case, key in cases(results, chosen)
    ]
    scale = _scale([difference for _, _, images in found for difference in _differences(images)])
    shown = [
        Case(_CASE_TITLES[case], picture, _shots(picture, images, chosen, scale), bool(case))
        for case, picture, images in found
    ]
    rows = results.measured
    count = min(GALLERY_PROMPTS, GALLERY_IMAGES // max(1, len(rows)))
    gallery = [
        Case(
            picture.prompt,
            picture,
            [
                _thumb(row, image, picture)
                for row in rows
                if (image := reader.read(row, picture.key))
            ],
        )
        for picture in results.pictures[:count]
    ]
    return Pictures(
        [case for case in shown if case.shots],
        [c for c in gallery if c.shots],
        scale,
        sorted(reader.missing),
    )


class _Reader:
    """Reads images of runs as RGB and remembers those that it could not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.missing: set[str] = set()

    def read(self, row: Row, key: str) -> Image.Image | None:
        if row.run is None:
            return None
        path = Path(row.run, "images", f"{key}.png")
        try:
            with Image.open(self.folder / path) as image:
                return image.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            self.missing.add(path.as_posix())
            return None


def difference(one: Image.Image, other: Image.Image) -> np.ndarray:
    """Mean over the channels of |one - other|, float32 [H, W] in levels of 255."""
    return np.abs(np.asarray(one, np.float32) - np.asarray(other, np.float32)).mean(-1)


def difference_map(values: np.ndarray, scale: int) -> Image.Image:
    """`difference` as colours: black for none, brightest from `scale` levels on."""
    return Image.fromarray(_COLORS[np.clip(values * (255 / scale), 0, 255).astype(np.uint8)])


def gradient() -> str:
    """The colours of the maps as a CSS gradient, none to most."""
    stops = ", ".join("#%02x%02x%02x" % tuple(_COLORS[n]) for n in range(0, 256, 17))  # noqa: UP031 (reads best)
    return f"linear-gradient(90deg, {stops})"


def webp_uri(image: Image.Image, limit: int) -> str:
    """The image as a data URI of at most `limit` bytes before encoding: lossless if that fits, else
    as good as fits.
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


def _differences(images: Sequence[tuple[Row, Image.Image | None]]) -> list[np.ndarray]:
    """Of each image after the first from the first, where both are there and of one size."""
    base = images[0][1] if images and images[0][0].family == "baseline" else None
    if base is None:
        return []
    return [
        difference(base, image)
        for _, image in images[1:]
        if image is not None and image.size == base.size
    ]


def _scale(differences: Sequence[np.ndarray]) -> int:
    """The smallest of `SCALES` that all but a two-hundredth of the pixels stay below."""
    if not differences:
        return SCALES[-1]
    most = max(float(np.quantile(values, 0.995)) for values in differences)
    return next((scale for scale in SCALES if scale >= most), SCALES[-1])


def _shots(
    picture: Picture, images: Sequence[tuple[Row, Image.Image | None]], chosen: Focus, scale: int
) -> list[Shot]:
    base = next((image for row, image in images if row.family == "baseline"), None)
    shots, maps = [], []
    for row, image in images:
        if image is None:
            continue
        shots.append(_image_shot(row, image, picture, _score(row, picture, chosen), LARGE_BYTES))
        if row.family != "baseline" and base is not None and base.size == image.size:
            maps.append(_map_shot(row, difference_map(difference(base, image), scale), picture))
    return shots + maps


def _thumb(row: Row, image: Image.Image, picture: Picture) -> Shot:
    image.thumbnail((THUMB_SIDE, THUMB_SIDE), Image.Resampling.LANCZOS)
    return _image_shot(row, image, picture, "", THUMB_BYTES)


def _image_shot(row: Row, image: Image.Image, picture: Picture, score: str, limit: int) -> Shot:
    words = " · ".join(part for part in (row.label, score) if part)
    alt = f"{picture.prompt}, generated with {row.label}"
    return Shot(
        webp_uri(image, limit), row.label, words, score, alt, row.family, image.width, image.height
    )


def _map_shot(row: Row, image: Image.Image, picture: Picture) -> Shot:
    label = f"Difference of {row.label} from the baseline"
    alt = f"{label}: {picture.prompt}"
    area = f"map-{row.family}"
    return Shot(
        webp_uri(image, LARGE_BYTES), "Difference", label, "", alt, area, image.width, image.height
    )


def _score(row: Row, picture: Picture, chosen: Focus) -> str:
    """The image's own figure of closeness, with its name."""
    if chosen.closeness is None:
        return ""
    value = row.per_image.get(chosen.closeness.name, {}).get(picture.key)
    if value is None or row.family == "baseline":
        return ""
    return f"{chosen.closeness.label.split(' (')[0]} {number(value, chosen.closeness.digits)}"
