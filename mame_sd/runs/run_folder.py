"""Write the folder of a run, such that it can go on after a kill at any moment.

    images/<id>_<repeat>.png   each appears whole or not at all
    samples.jsonl              one object for each image: seconds, tokens kept, prompt, ...
    manifest.json              settings, model and versions; written first, never changed
    .mame-sd/                  temporary files and a record of each new image; removed at the end

An image's record is written before the image, so a finished image always has one. The manifest and
the images depend on the settings alone, so a run that was killed and continued ends with the same
bytes as an undisturbed one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mame_sd.errors import UserError, unexpected
from mame_sd.runs.files import check_place, write_atomically, writing
from mame_sd.runs.records import FORMAT, RECORD_ERRORS, read_manifest, sample_of

_NO_LOCKS = (None, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of a file system without locks


class RunFolder:
    """One run's folder. The main process calls `prepare` and `collect`, every process the rest.

    Args:
        path: the folder, which `prepare` creates.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.images = path / "images"
        self.work = path / ".mame-sd"
        self.manifest = path / "manifest.json"
        self.samples = path / "samples.jsonl"
        self._lock = FileLock(self.work / "lock", timeout=0)

    def check(self, settings: Mapping[str, Any] | None = None) -> None:
        """Raise UserError if the folder can't hold a run with these settings, as far as known.

        This is quick and creates nothing.
        """
        if check_place(self.path, self.path) != self.path:
            return
        for folder in (self.images, self.work):
            if folder.is_symlink():
                allowed, got = f"{folder.name} to be a folder", f"a link to {os.readlink(folder)!r}"
                raise unexpected(f"--out {self.path}", allowed, got, "make --out a link instead")
        with writing(self.path):
            foreign = sorted(entry for entry in os.listdir(self.path) if entry != self.work.name)
        if foreign and self.manifest.name not in foreign:
            allowed = "a new or empty folder, or one begun by this command"
            got = f"one with other things in it ({', '.join(map(repr, foreign[:3]))})"
            raise unexpected(f"--out {self.path}", allowed, got, "choose another")
        if foreign:
            self._begun_with(settings or {}, partly=True)

    def prepare(self, manifest: Mapping[str, Any]) -> None:
        """Create the folder with a manifest, or continue in it with the same settings.

        Raises:
            UserError: the folder is foreign, can't be written, has other settings, or is in use.
        """
        self.check()
        with writing(self.path):
            self.work.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire()
            except Timeout:
                raise UserError(
                    f"--out {self.path}: another run is writing to this folder; wait for it, or"
                    " choose another"
                ) from None
            except (OSError, NotImplementedError) as error:
                if getattr(error, "errno", None) not in _NO_LOCKS:
                    raise
        if not (self.manifest.exists() and self._begun_with(manifest["settings"])):
            text = json.dumps({"format": FORMAT, **manifest}, indent=2, sort_keys=True) + "\n"
            write_atomically(self.manifest, text.encode(), self.work / "manifest.tmp")
        with writing(self.images):
            self.images.mkdir(exist_ok=True)

    def finished(self, names: Iterable[str]) -> set[str]:
        """Return the names of images that are complete and match their records."""
        records = self._records()
        return {name for name in names if self._is_whole(name, records.get(name, {}))}

    def write_image(self, name: str, png: bytes, record: Mapping[str, Any]) -> None:
        """Add a finished image: first its record, then the file in one step.

        Args:
            name: name of the image, without ending.
            png: content of the file.
            record: what is known of the image.
        """
        row = {"name": name, **record, "sha256": hashlib.sha256(png).hexdigest()}
        text = json.dumps(row, sort_keys=True)
        write_atomically(self.work / f"{name}.json", text.encode(), self.work / f"{name}.tmp")
        write_atomically(self.images / f"{name}.png", png, self.work / f"{name}.tmp")

    def collect(self, expected: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Write samples.jsonl from all records so far, and return its rows.

        `expected` has the names of all images of the run, with what is known of each beforehand.
        """
        records = self._records()
        done = self.finished(expected)
        rows = [{**records[name], **fixed} for name, fixed in expected.items() if name in done]
        text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows)
        write_atomically(self.samples, text.encode(), self.work / "samples.tmp")
        for part in self.work.glob("*.json"):
            with writing(part):
                part.unlink()
        return rows

    def close(self, complete: bool) -> None:
        """Release the folder, and remove temporary files if the run is complete."""
        if complete:
            for path in self.work.glob("*"):
                if path.name != "lock":  # Windows removes no open file
                    path.unlink(missing_ok=True)
        self._lock.release()
        if complete:
            shutil.rmtree(self.work, ignore_errors=True)

    def _records(self) -> dict[str, Mapping[str, Any]]:
        """Return the latest record of each image; what is no record is dropped."""
        with writing(self.path):
            lines = self.samples.read_bytes().split(b"\n") if self.samples.exists() else []
            for part in self.work.glob("samples-*.jsonl"):  # of versions before 0.2
                lines += part.read_bytes().split(b"\n")
            lines += [part.read_bytes() for part in self.work.glob("*.json")]
        records: dict[str, Mapping[str, Any]] = {}
        for line in lines:
            with contextlib.suppress(*RECORD_ERRORS):
                sample = sample_of(self.path, line)
                records[sample.key] = sample.row
        return records

    def _is_whole(self, name: str, record: Mapping[str, Any]) -> bool:
        """Return True if an image has a record, and the hash of that record, if any."""
        try:
            digest = hashlib.sha256((self.images / f"{name}.png").read_bytes()).hexdigest()
        except OSError:
            return False
        return bool(record) and record.get("sha256", digest) == digest

    def _begun_with(self, settings: Mapping[str, Any], partly: bool = False) -> bool:
        """Return True if the folder has an image; without one its manifest may be replaced.

        Raises:
            UserError: there is no manifest, or there are images of other settings.
        """
        there = read_manifest(self.manifest, "choose another --out")
        if not any(self.images.glob("*.png")):
            return False
        if different := differences(there["settings"], settings, partly):
            raise UserError(
                f"--out {self.path}: the folder was begun with other settings"
                f" ({in_short(different)}); choose another folder, or give the same settings"
            )
        return True


def differences(there: Any, here: Any, partly: bool = False, name: str = "") -> list[str]:
    """Return `name: old there, new here` for each different leaf of two JSON values.

    Args:
        there: the old value.
        here: the new value.
        partly: if True, only leaves of `here` count.
        name: name of the values.
    """
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        lines = []
        for key in sorted(here if partly else {*there, *here}):
            inner = f"{name}.{key}" if name else key
            lines += differences(there.get(key), here.get(key), partly, inner)
        return lines
    if there == json.loads(json.dumps(here)):  # a file turns tuples into lists
        return []
    if name.endswith(".sha256"):  # the digits mean nothing to a reader
        return [f"other {name.removesuffix('.sha256').replace('.', ' ')}"]
    return [f"{name}: {_shortened(there)} there, {_shortened(here)} here"]


def in_short(different: Sequence[str]) -> str:
    """Format the first three differences on one line and count the rest."""
    left = len(different) - 3
    return "; ".join(different[:3]) + (f"; and {left} more" if left > 0 else "")


def _shortened(value: Any) -> str:
    text = "settings" if isinstance(value, Mapping) else json.dumps(value)
    return text if len(text) <= 30 else f"{text[:27]}..."
