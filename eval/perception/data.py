"""Read images or clips to classify.

They are a folder of class folders, as torchvision and timm read them, or a folder of images without
labels. A clip is a folder of frames.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mame_sd.errors import UserError
from mame_sd.runs.files import shown

from ..images import SUFFIXES, check_read, evenly, frames_in, image_files, load_image
from .encoders import check_size


@dataclass(frozen=True)
class ImageSet:
    """Images or clips in a fixed shuffled order, so that classes mix.

    Attributes:
        files: paths relative to `folder`.
        labels: index of each one's class, from its folder. If None, there are no labels.
        classes: names of the class folders, sorted.
        frames: number of evenly spaced frames of each clip that the model sees. If None, they are
            images.
    """

    folder: Path
    files: tuple[str, ...]
    labels: tuple[int, ...] | None
    classes: tuple[str, ...]
    frames: int | None = None

    def load(self, places: Iterable[int]) -> list[np.ndarray]:
        """Return the pixels of images, uint8 [H, W, 3], or of clips, [frames, H, W, 3].

        Raises:
            UserError: one can't be read or is too small, or the frames of a clip differ in
                size.
        """
        paths = [self.folder / self.files[place] for place in places]
        loaded = [self._pixels(path) for path in paths]
        for path, one in zip(paths, loaded, strict=True):
            check_size(one, str(path))
        return loaded

    def _pixels(self, path: Path) -> np.ndarray:
        if self.frames is None:
            return load_image(path)
        every = frames_in(path)
        made = [load_image(every[number]) for number in evenly(len(every), self.frames)]
        sizes = sorted({frame.shape[1::-1] for frame in made})
        if len(sizes) > 1:
            names = " and ".join(f"{width} x {height}" for width, height in sizes[:2])
            raise UserError(
                f"expected frames of one size in {path}, got {names}; make the clip again or take"
                " it out"
            )
        return np.stack(made)

    def batches(self, size: int) -> list[range]:
        """Return the indices in `files` of each batch's images."""
        count = len(self.files)
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def digest(self, files: Iterable[str]) -> str:
        """Return the sha256 of names and sizes of some files."""
        digest = hashlib.sha256()
        for name in files:
            path = self.folder / name
            parts = frames_in(path) if path.is_dir() else [path]
            size = sum(part.stat().st_size for part in parts)
            digest.update(f"{name}\0{size}\0".encode())
        return digest.hexdigest()

    def about(self) -> dict[str, Any]:
        """Return JSON values that identify this set by the names of its files."""
        return {
            "name": shown(self.folder.resolve().name),
            "images": len(self.files),
            "classes": len(self.classes) if self.labels is not None else None,
            "files": hashlib.sha256("\0".join(self.files).encode()).hexdigest(),
        }


def open_images(folder: Path, num: int | None = None, frames: int | None = None) -> ImageSet:
    """Open the images of a folder, or `num` of them.

    Args:
        folder: the folder.
        num: number of images. If None, all.
        frames: number of frames of each clip. If None, the folder has images.

    Raises:
        UserError: there is no folder or no image, images are next to class folders, or if
            clips have no class folders.
    """
    wanted = "class folders or of images" if frames is None else "class folders of clips"
    if not folder.is_dir():
        raise UserError(
            f"--data {folder}: expected a folder of {wanted}, found none; check the path"
        )
    entries = _entries(folder)
    classes = tuple(entry.name for entry in entries if entry.is_dir())
    loose = [one.name for one in entries if one.suffix.lower() in SUFFIXES and one.is_file()]
    if frames is None and classes and loose:
        raise UserError(
            f"--data {folder}: expected class folders or images, got both ({classes[0]!r} next to"
            f" {loose[0]!r}); take one away"
        )
    if frames is not None and not classes:
        raise UserError(
            f"--data {folder}: expected {wanted}, found no folder in it; give the folder above"
        )
    files = [
        (f"{name}/{one}", number)
        for number, name in enumerate(classes)
        for one in _in_class(folder / name, frames is not None)
    ]
    if not classes:
        files = [(path.name, -1) for path in image_files(folder)]
    order = np.random.default_rng(0).permutation(len(files)).tolist()[:num]
    names = tuple(files[place][0] for place in order)
    labels = tuple(files[place][1] for place in order) if classes else None
    return ImageSet(folder, names, labels, classes, frames)


def _entries(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _in_class(folder: Path, clips: bool) -> list[str]:
    """Return the names of the images or clips of one class folder."""
    entries = _entries(folder)
    if clips:
        kind = "folders of frames"
        matching = [one for one in entries if one.is_dir()]
    else:
        check_read(entries)
        kind = f"images ({', '.join(SUFFIXES)})"
        matching = [one for one in entries if one.is_file() and one.suffix.lower() in SUFFIXES]
    if not matching:
        raise UserError(
            f"--data: expected {kind} in each class folder, found none in {folder}; take the folder"
            " out or put them in"
        )
    return [one.name for one in matching]


def labelled(images: ImageSet, labels: dict[str, int]) -> tuple[ImageSet, str]:
    """Replace the labels by the model's class indices.

    Args:
        images: images with labels.
        labels: the model's class names and indices.

    Returns:
        The images, and how classes were matched: by folder names, or by order.

    Raises:
        UserError: the folders are neither named as the model's classes nor equally many.
    """
    matched = [name in labels for name in images.classes]
    if not any(matched) and len(images.classes) == len(labels):
        return images, "class folders in sorted order"
    if not all(matched):
        missing = images.classes[matched.index(False)]
        raise UserError(
            f"--data {images.folder}: expected class folders named as the model's {len(labels)}"
            f" classes, or just as many in their order, got {len(images.classes)} with {missing!r},"
            " which the model lacks; rename the folders, or give another model"
        )
    numbers = (labels[images.classes[label]] for label in images.labels or ())
    return replace(images, labels=tuple(numbers)), "class folders by name"
