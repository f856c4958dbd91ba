"""Features of images on disk, so that a second score or a resumed one looks at no image twice.

One safetensors file per (network, resizing, image). Whole files appear by renaming, so processes
and interruptions can't leave half of one. A file that can't be read counts as not there.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from mame_sd.runs.files import write_atomically


class FeatureCache:
    """Named tensors by key, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def key(self, *parts: str) -> str:
        """One name for the parts that decide a value."""
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def get(self, key: str) -> dict[str, Tensor] | None:
        """The tensors kept under `key`, or None."""
        try:
            return load(self._path(key).read_bytes())
        except (FileNotFoundError, SafetensorError):
            return None

    def put(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Keep `tensors` under `key`.

        Raises UserError or MachineError where nothing can be written.
        """
        write_atomically(self._path(key), save(tensors))

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"
