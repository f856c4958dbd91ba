"""Write files such that a kill at any moment leaves the old file or the whole new one."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mame_sd.errors import MachineError, UserError, unexpected

DEEPEST = 256  # new folders, one in another
# Failures of the machine: no space, a broken disk, too many open files.
_MACHINE_ERRNOS = {
    getattr(errno, f"E{name}", None)
    for name in ("NOSPC", "DQUOT", "FBIG", "IO", "NOMEM", "MFILE", "NFILE", "STALE", "BUSY")
}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError from writing `path` into MachineError (full disk) or UserError (no right)."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _MACHINE_ERRNOS:
            raise MachineError(
                f"{path}: could not be written ({reason}); free some space there and run the same"
                " command again"
            ) from error
        raise UserError(f"{path}: can't be written ({reason}); choose another place") from error


def shown(name: str | os.PathLike[str]) -> str:
    """Return a file's name for JSON, pages and terminals: bytes that are not UTF-8 as escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def files_below(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted. Links to folders are not followed."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def check_folder(flag: str, folder: Path | None) -> None:
    """Raise UserError if the option `flag` is given something else than a folder."""
    if folder is not None and not os.path.isdir(folder):
        got = "a file" if os.path.isfile(folder) else "no such folder"
        raise unexpected(f"{flag} {folder}", "a folder", got, "check the path")


def check_place(folder: Path, out: Path) -> Path:
    """Return the nearest existing folder to `folder`.

    Raises:
        UserError: nothing could be written there. The message names `out`.
    """
    place = folder
    with writing(out):
        while not _exists(place):
            if place == place.parent:  # a drive that is missing
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            place = place.parent
    if not place.is_dir():
        problem = f"expected a folder, got the file {place}"
    elif folder != place and folder.is_symlink():
        problem = "expected a folder, got a link to nothing"
    elif len(folder.parts) - len(place.parts) > DEEPEST:  # pathlib creates folders recursively
        problem = f"expected at most {DEEPEST} new folders, one in another"
    elif not os.access(place, os.W_OK | os.X_OK):
        problem = f"expected a folder that can be written, but {place} can't be"
    else:
        return place
    raise UserError(f"--out {out}: {problem}; choose another")


def _exists(path: Path) -> bool:
    """Return True if a path exists; a name that is too long is an OSError."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextlib.contextmanager
def written_whole(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file for a `with` block. It replaces `path` if the block ends without an error.

    Folders above `path` are created. `temporary`, a path on the same file system, is by default
    a hidden file next to `path`.

    Raises:
        UserError, MachineError: see `writing`.
    """
    hidden = f".mame-sd.{os.getpid()}.{threading.get_ident()}.tmp"
    temporary = temporary or path.with_name(hidden)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # of a run that was killed, or a foreign link
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def write_atomically(path: Path, data: bytes, temporary: Path | None = None) -> None:
    """Write `data` to `path` as `written_whole` does."""
    with written_whole(path, temporary) as file:
        file.write(data)
