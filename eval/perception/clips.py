"""Clips to classify: a folder of class folders whose entries are clips. A clip is a folder of
frames, or a video file that PyAV reads (`pip install mame-sd[video]`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mame_sd.errors import UserError, first_line

from ..frames import SUFFIXES, evenly, frames_in
from ..images import load_image
from .data import ImageSet, shuffled

VIDEOS = (".mp4", ".webm", ".mkv", ".avi", ".mov", ".mpg", ".mpeg", ".m4v")


@dataclass(frozen=True)
class ClipSet(ImageSet):
    """Clips, in the order in which batches take them.

    Attributes:
        frames: how many of each clip the model sees, evenly spaced.
    """

    frames: int = 16

    def load(self, place: int) -> np.ndarray:
        """The frames of one clip, uint8 [frames, H, W, 3].

        Raises UserError, naming it, for a clip that can't be read or whose frames differ in size.
        """
        path = self.folder / self.files[place]
        if path.is_dir():
            files = _frames_of(path)
            chosen = [files[number] for number in evenly(len(files), self.frames)]
            made = [load_image(file, convert=True) for file in chosen]
        else:
            made = _decoded(path)
            made = [made[number] for number in evenly(len(made), self.frames)]
        sizes = sorted({frame.shape[1::-1] for frame in made})
        if len(sizes) > 1:
            names = " and ".join(f"{width} x {height}" for width, height in sizes[:2])
            raise UserError(
                f"expected frames of one size in {path}, got {names}; make the clip again or take"
                " it out"
            )
        return np.stack(made)

    def bytes_of(self, name: str) -> int:
        """Size of a clip's files."""
        path = self.folder / name
        files = [path] if path.is_file() else _frames_of(path)
        return sum(file.stat().st_size for file in files)


def open_clips(folder: Path, frames: int, num: int | None = None) -> ClipSet:
    """The clips of `folder`, or `num` of them.

    Args:
        folder: class folders of clips.
        frames: how many the model sees of each.
        num: how many clips; None: all.

    Raises:
        UserError: no folder, no class folders, or one without clips.
    """
    if not folder.is_dir():
        raise UserError(
            f"--data {folder}: expected a folder of class folders, found none; check the path"
        )
    classes = tuple(
        sorted(one.name for one in folder.iterdir() if one.is_dir() and one.name[0] != ".")
    )
    found = [
        (f"{name}/{path.name}", number)
        for number, name in enumerate(classes)
        for path in _clips_in(folder / name)
    ]
    if not found:
        raise UserError(
            f"--data {folder}: expected class folders of clips, found no folder in it; give the"
            " folder above"
        )
    chosen = shuffled(found)[:num]
    files, labels = tuple(name for name, _ in chosen), tuple(label for _, label in chosen)
    return ClipSet(folder, files, labels, classes, frames)


def _clips_in(folder: Path) -> list[Path]:
    entries = sorted(one for one in folder.iterdir() if one.name[0] != ".")
    clips = [one for one in entries if one.is_dir() or one.suffix.lower() in VIDEOS]
    if not clips:
        got = f", got {entries[0].name!r}" if entries else ", found none"
        raise UserError(
            f"--data: expected folders of frames or video files ({', '.join(VIDEOS)}) in"
            f" {folder}{got}; put each clip's frames into a folder of its own"
        )
    return clips


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
