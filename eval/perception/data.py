"""Images or clips to classify: a folder of class folders, as torchvision and timm read them, or a
folder of images without labels.

A clip is a folder of frames, or a video file that PyAV reads (`pip install mame-sd[video]`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mame_sd.errors import UserError, first_line
from mame_sd.runs.files import shown

from ..frames import SUFFIXES, check_read, evenly, frames_in
from ..images import image_files, load_image
from .encoders import check_size

VIDEOS = (".mp4", ".webm", ".mkv", ".avi", ".mov", ".mpg", ".mpeg", ".m4v")


@dataclass(frozen=True)
class ImageSet:
    """Images, or clips, in the order in which batches take them: shuffled once and for all, so that
    classes mix.

    Attributes:
        folder: where they lie.
        files: relative to `folder`.
        labels: number of the class of each, by its folder; None: no labels.
        classes: names of the class folders, sorted.
        frames: how many of each clip the model sees, evenly spaced; None: they are images.
    """

    folder: Path
    files: tuple[str, ...]
    labels: tuple[int, ...] | None
    classes: tuple[str, ...]
    frames: int | None = None

    def load(self, places: Iterable[int]) -> list[np.ndarray]:
        """The pixels of images, uint8 [H, W, 3], or of clips [frames, H, W, 3].

        Raises UserError, naming it, for one that can't be read or is too small, or a clip whose
        frames differ in size.
        """
        paths = [self.folder / self.files[place] for place in places]
        loaded = [self._pixels(path) for path in paths]
        for path, one in zip(paths, loaded, strict=True):
            check_size(one, str(path))
        return loaded

    def _pixels(self, path: Path) -> np.ndarray:
        if self.frames is None:
            return load_image(path, convert=True)
        every: list[Any] = _frames_of(path) if path.is_dir() else _decoded(path)
        chosen = [every[number] for number in evenly(len(every), self.frames)]
        made = [load_image(one, convert=True) if isinstance(one, Path) else one for one in chosen]
        sizes = sorted({frame.shape[1::-1] for frame in made})
        if len(sizes) > 1:
            names = " and ".join(f"{width} x {height}" for width, height in sizes[:2])
            raise UserError(
                f"expected frames of one size in {path}, got {names}; make the clip again or take"
                " it out"
            )
        return np.stack(made)

    def part(self, places: slice) -> ImageSet:
        """Take some of them."""
        labels = None if self.labels is None else self.labels[places]
        return replace(self, files=self.files[places], labels=labels)

    def batches(self, size: int) -> list[range]:
        """Places in `files` of the images of each batch."""
        count = len(self.files)
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def digest(self, files: Iterable[str] | None = None) -> str:
        """The sha256 of names and sizes of some of its images or clips, or of all."""
        digest = hashlib.sha256()
        for name in self.files if files is None else files:
            path = self.folder / name
            parts = _frames_of(path) if path.is_dir() else [path]
            size = sum(part.stat().st_size for part in parts)
            digest.update(f"{name}\0{size}\0".encode())
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


def open_images(folder: Path, num: int | None = None, frames: int | None = None) -> ImageSet:
    """The images of `folder`, or `num` of them; with `frames`, its clips.

    Raises:
        UserError: no folder, no images, a class folder without images, images beside class folders,
            or clips without class folders.
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
            f"--data {folder}: expected class folders or images, got both ({classes[0]!r} beside"
            f" {loose[0]!r}); take one away"
        )
    if frames is not None and not classes:
        raise UserError(
            f"--data {folder}: expected {wanted}, found no folder in it; give the folder above"
        )
    found = [
        (f"{name}/{one}", number)
        for number, name in enumerate(classes)
        for one in _in_class(folder / name, frames is not None)
    ]
    if not classes:
        found = [(path.name, -1) for path in image_files(folder)]
    order = np.random.default_rng(0).permutation(len(found)).tolist()[:num]
    names = tuple(found[place][0] for place in order)
    labels = tuple(found[place][1] for place in order) if classes else None
    return ImageSet(folder, names, labels, classes, frames)


def _entries(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _in_class(folder: Path, clips: bool) -> list[str]:
    """Names of the images, or the clips, of one class folder."""
    entries = _entries(folder)
    if clips:
        kind, suffixes = "folders of frames or video files", ", ".join(VIDEOS)
        found = [one for one in entries if one.is_dir() or one.suffix.lower() in VIDEOS]
    else:
        check_read(entries)
        kind, suffixes = "images", ", ".join(SUFFIXES)
        found = [one for one in entries if one.is_file() and one.suffix.lower() in SUFFIXES]
    if not found:
        raise UserError(
            f"--data: expected {kind} ({suffixes}) in each class folder, found none in"
            f" {folder}; take the folder out or put them in"
        )
    return [one.name for one in found]


def _frames_of(folder: Path) -> list[Path]:
    """The frames of a clip in the order of the numbers in their names."""
    files = frames_in(folder)
    if not files:
        raise UserError(
            f"expected frames ({', '.join(SUFFIXES)}) in {folder}, found none; take the folder out"
        )
    return files


def _decoded(path: Path) -> list[np.ndarray]:
    """Every frame of a video file."""
    try:
        import av
    except ImportError:
        raise UserError(
            f"expected the package av to read {path}; pip install mame-sd[video], or give folders"
            " of frames"
        ) from None
    try:
        with av.open(str(path)) as container:
            frames = [one.to_ndarray(format="rgb24") for one in container.decode(video=0)]
    except (OSError, ValueError, IndexError) as error:  # what PyAV raises is among these
        raise UserError(
            f"expected a video in {path}, but it can't be read ({first_line(error)}); make it"
            " again or take it out"
        ) from error
    if not frames:
        raise UserError(f"expected a video in {path}, found no frame; take it out")
    return frames


def labelled(images: ImageSet, labels: dict[str, int]) -> tuple[ImageSet, str]:
    """Label images with the model's numbers of classes, and say how these were found: by the class
    folders' names, or else by their order.

    Args:
        images: with labels.
        labels: the model's names of classes and their numbers.

    Raises:
        UserError: folders that are neither named as the model's classes nor as many.
    """
    known = [name in labels for name in images.classes]
    if not any(known) and len(images.classes) == len(labels):
        return images, "class folders in sorted order"
    if not all(known):
        missing = images.classes[known.index(False)]
        raise UserError(
            f"--data {images.folder}: expected class folders named as the model's {len(labels)}"
            f" classes, or just as many in their order, got {len(images.classes)} with {missing!r},"
            " which the model has not; rename the folders, or give another model"
        )
    numbers = (labels[images.classes[label]] for label in images.labels or ())
    return replace(images, labels=tuple(numbers)), "class folders by name"
