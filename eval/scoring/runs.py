"""Read finished runs of ``mame-sd generate`` and pair their images.

Images are paired by key ``<id>_<repeat>``, never by file order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unicodedata import normalize

from mame_sd.errors import UserError
from mame_sd.runs.records import Sample, read_manifest, read_samples

AGAIN = "run generate again, into a new folder where that does not help"


@dataclass(frozen=True)
class Run:
    """A finished run: it has every image that its manifest promises, and no other.

    Attributes:
        settings: as in manifest.json.
        environment: as in manifest.json.
        items: images by key, in the order of the run's prompts.
        plain: True if it is a plain folder of images, without prompts and seeds.
    """

    folder: Path
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    items: Mapping[str, Sample]
    plain: bool = False

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the image files, in the order of `items`."""
        return tuple(item.path for item in self.items.values())

    @classmethod
    def open_any(cls, folder: Path) -> Run:
        """Read a run folder, or a folder of images that are paired by file name.

        Raises UserError for anything else.
        """
        if not folder.is_dir() or any(
            (folder / name).exists() for name in ("manifest.json", "samples.jsonl")
        ):
            return cls.open(folder)
        from ..images import image_files  # imports torch, which errors of runs can do without

        files = image_files(folder)
        names = [(path, normalize("NFC", path.stem)) for path in files]
        items = {name: Sample(name, name, "", 0, None, path, {}) for path, name in names}
        if len(items) < len(files):
            raise UserError(
                f"{folder}: expected names that differ without their endings, got some twice;"
                " rename them"
            )
        return cls(folder, {}, {}, items, plain=True)

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Read a run folder.

        Raises:
            UserError: it is no run, it isn't finished, or its images and samples.jsonl
                differ.
        """
        if not folder.is_dir():
            raise UserError(
                f"{folder}: expected a run folder or a folder of images, found none; check the path"
            )
        if not (folder / "manifest.json").exists():
            raise UserError(
                f"{folder}: expected a folder that `mame-sd generate` wrote, found no"
                " manifest.json; run generate first"
            )
        manifest = read_manifest(folder / "manifest.json", AGAIN)
        settings = manifest["settings"]
        items = read_samples(folder, AGAIN)
        if not items:
            raise UserError(f"{folder}: expected a run with images, found none; {AGAIN}")
        items = _complete(folder, settings, items)
        return cls(folder, settings, manifest.get("environment", {}), items)


@dataclass(frozen=True)
class Pair:
    """Two images of one prompt, seed and repeat.

    Attributes:
        b: the image that is compared with it.
    """

    key: str
    prompt_id: str
    a: Path
    b: Path


def pair(a: Run, b: Run) -> list[Pair]:
    """Pair every image of `a` with the one of `b` that has its key, in the order of `a`.

    Raises:
        UserError: only one run has an image, or prompts, negative prompts or seeds differ;
            the message names the first one.
    """
    for one, other in ((a, b), (b, a)):
        lacking = [key for key in one.items if key not in other.items]
        if lacking:
            alike = "the same prompts" if not (a.plain or b.plain) else "the same file names"
            raise UserError(
                f"{other.folder}: expected the image {lacking[0]} as in {one.folder}, found none "
                f"({len(lacking)} missing); compare folders of {alike}"
            )
    for key, first in () if a.plain or b.plain else a.items.items():
        second = b.items[key]
        for name in ("prompt", "negative_prompt", "seed"):
            there, here = getattr(first, name), getattr(second, name)
            if there != here:
                raise UserError(
                    f"{b.folder}: expected the {name.replace('_', ' ')} of {key} to be {there!r} as"
                    f" in {a.folder}, got {here!r}; compare runs of the same prompts and seeds"
                )
    return [
        Pair(key, item.prompt_id, item.path, b.items[key].path) for key, item in a.items.items()
    ]


def differing_settings(a: Run, b: Run) -> list[str]:
    """List the settings, except the method, in which two runs differ, such as ``steps: 20, 10``."""
    differences: list[str] = []
    if a.plain or b.plain:
        return differences
    for name in sorted({*a.settings, *b.settings} - {"mame", "rival", "prompts"}):
        there, here = a.settings.get(name), b.settings.get(name)
        if there != here:
            differences.append(f"{name}: {json.dumps(there)}, {json.dumps(here)}")
    return differences


def _complete(
    folder: Path, settings: Mapping[str, Any], items: Mapping[str, Sample]
) -> dict[str, Sample]:
    """Return the items with their files as this system names them.

    Raises UserError unless the images are those of samples.jsonl, and as many as the settings
    promise.
    """
    try:
        present = {normalize("NFC", path.name): path for path in (folder / "images").iterdir()}
    except OSError:
        present = {}
    wanted = {key: normalize("NFC", item.path.name) for key, item in items.items()}
    lacking = [name for name in wanted.values() if name not in present]
    if lacking:
        raise UserError(
            f"{folder}: expected the image {lacking[0]}, found none ({len(lacking)} missing);"
            f" {AGAIN}"
        )
    extra = sorted(present.keys() - {*wanted.values()})
    if extra:
        raise UserError(
            f"{folder}: expected only images of samples.jsonl, got {extra[0]!r} ({len(extra)} too"
            " many); move it away, or finish the run first"
        )
    try:
        promised = settings["prompts"]["count"] * settings["images_per_prompt"]
    except (KeyError, TypeError):
        raise UserError(
            f"{folder}/manifest.json: expected the number of prompts, found none; {AGAIN}"
        ) from None
    if len(items) != promised:
        raise UserError(
            f"{folder}: expected {promised} images, found {len(items)}; finish that run first (the"
            " same command continues)"
        )
    return {key: replace(item, path=present[wanted[key]]) for key, item in items.items()}
