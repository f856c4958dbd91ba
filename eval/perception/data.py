"""Images to classify: a folder of class folders, as torchvision and timm read them, or a folder of
images without labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mame_sd.errors import UserError
from mame_sd.runs.files import shown

from ..frames import SUFFIXES
from ..images import image_files, load_image


@dataclass(frozen=True)
class ImageSet:
    """Images in the order in which batches take them: shuffled once and for all, so that classes
    mix.

    Attributes:
        folder: where they lie.
        files: relative to `folder`.
        labels: number of the class folder of each; None: no labels.
        classes: names of the class folders, sorted.
    """

    folder: Path
    files: tuple[str, ...]
    labels: tuple[int, ...] | None
    classes: tuple[str, ...]

    def load(self, place: int) -> np.ndarray:
        """The pixels of one image, uint8 [H, W, 3].

        Raises UserError, naming it, for one that can't be read.
        """
        return load_image(self.folder / self.files[place], convert=True)

    def bytes_of(self, name: str) -> int:
        """Size of a file."""
        return (self.folder / name).stat().st_size

    def batches(self, size: int) -> list[range]:
        """Places in `files` of the images of each batch."""
        return [
            range(start, min(start + size, len(self.files)))
            for start in range(0, len(self.files), size)
        ]

    def digest(self, files: Iterable[str] | None = None) -> str:
        """The sha256 of names and sizes of some of its files, or of all."""
        digest = hashlib.sha256()
        for name in self.files if files is None else files:
            digest.update(f"{name}\0{self.bytes_of(name)}\0".encode())
        return digest.hexdigest()

    def about(self) -> dict[str, Any]:
        """JSON values that tell this set from others: names of its files; and their sizes, of which
        each batch of answers knows its own.
        """
        return {
            "name": shown(self.folder.resolve().name),
            "images": len(self.files),
            "classes": len(self.classes) if self.labels is not None else None,
            "files": hashlib.sha256("\0".join(self.files).encode()).hexdigest(),
            "sha256": self.digest(),
        }


def open_images(folder: Path, num: int | None = None) -> ImageSet:
    """The images of `folder`, or `num` of them.

    Raises:
        UserError: no folder, no images, a class folder without images, or images beside class
            folders.
    """
    if not folder.is_dir():
        raise UserError(
            f"--data {folder}: expected a folder of class folders or of images, found none; check"
            " the path"
        )
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    classes = tuple(entry.name for entry in entries if entry.is_dir())
    loose = [
        entry.name for entry in entries if entry.suffix.lower() in SUFFIXES and entry.is_file()
    ]
    if classes and loose:
        raise UserError(
            f"--data {folder}: expected class folders or images, got both ({classes[0]!r} beside"
            f" {loose[0]!r}); take one away"
        )
    if classes:
        found = [
            (f"{name}/{path.name}", n)
            for n, name in enumerate(classes)
            for path in _class_files(folder / name)
        ]
    else:
        found = [(path.name, -1) for path in image_files(folder)]
    chosen = shuffled(found)[:num]
    labels = tuple(label for _, label in chosen) if classes else None
    return ImageSet(folder, tuple(name for name, _ in chosen), labels, classes)


def shuffled(found: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Files and their labels in the order in which batches take them."""
    order: Sequence[int] = np.random.default_rng(0).permutation(len(found)).tolist()
    return [found[place] for place in order]


def _class_files(folder: Path) -> list[Path]:
    try:
        return image_files(folder)
    except UserError:
        raise UserError(
            f"--data: expected images ({', '.join(SUFFIXES)}) in each class folder, found none in"
            f" {folder}; take the folder out or put its images in"
        ) from None


def class_numbers(images: ImageSet, labels: dict[str, int]) -> tuple[tuple[int, ...], str]:
    """The model's number of each class folder, and how it was found: by the folders' names, or else
    by their order.

    Args:
        images: with labels.
        labels: the model's names of classes and their numbers.

    Raises:
        UserError: folders that are neither named as the model's classes nor as many.
    """
    known = [name in labels for name in images.classes]
    if all(known):
        return tuple(labels[name] for name in images.classes), "class folders by name"
    if not any(known) and len(images.classes) == len(labels):
        return tuple(range(len(labels))), "class folders in sorted order"
    missing = images.classes[known.index(False)]
    raise UserError(
        f"--data {images.folder}: expected class folders named as the model's {len(labels)}"
        f" classes, or just as many in their order, got {len(images.classes)} with {missing!r},"
        " which the model has not; rename the folders, or give another model"
    )
