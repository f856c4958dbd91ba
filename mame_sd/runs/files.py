"""Writing files so that a kill at any moment leaves the whole new one or the old one, and saying
why one can't be written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mame_sd.errors import MachineError, UserError

# The machine's, whoever writes: no space, a broken disk, too many open files.
_MACHINE_ERRNOS = {
    getattr(errno, f"E{name}", None)
    for name in ("NOSPC", "DQUOT", "FBIG", "IO", "NOMEM", "MFILE", "NFILE", "STALE", "BUSY")
}


# A link is not followed, and a pipe not waited for, where a system knows these (Windows doesn't).
_OWN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_own(path: Path, flags: int) -> BinaryIO:
    """Open a file of our own to write to, by flags of `os.open`; it is created where it is missing.

    Raises OSError for a link, a pipe, a device or a folder in its place.
    """
    file = os.fdopen(os.open(path, flags | os.O_CREAT | _OWN, 0o666), "wb")
    try:
        _check_regular(file, path)
    except BaseException:
        file.close()
        raise
    return file


def read_regular(path: Path) -> bytes:
    """Return the bytes of a file.

    Raises OSError for what can't be read, and for a pipe or a device, which might never end.
    """
    flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, os.O_RDONLY | flags), "rb") as file:
        _check_regular(file, path)
        return file.read()


def _check_regular(file: BinaryIO, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise OSError(errno.EINVAL, "expected a file, got a pipe or a device", str(path))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError from writing `path` into MachineError (disk full and the like) or UserError
    (not allowed).
    """
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
    """A file's name for JSON, pages and terminals: bytes that are not UTF-8 as escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def nearest(path: Path) -> Path:
    """`path`, or the nearest thing above it that exists.

    Raises OSError for what can't be reached or is too long.
    """
    while True:
        try:
            os.stat(path)
            return path
        except (FileNotFoundError, NotADirectoryError):
            if path == path.parent:
                raise
            path = path.parent


def check_place(folder: Path, out: Path) -> Path:
    """The nearest existing folder to `folder`.

    Raises UserError, naming `out`, when nothing could be written there.
    """
    with writing(out):
        place = nearest(folder)
    if not place.is_dir():
        raise UserError(f"--out {out}: expected a folder, got the file {place}; choose another")
    if folder != place and folder.is_symlink():
        raise UserError(f"--out {out}: expected a folder, got a link to nothing; choose another")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(
            f"--out {out}: expected a folder that can be written, but {place} can't be; choose"
            " another"
        )
    return place


@contextlib.contextmanager
def written_whole(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write to in the block: after it `path` holds all of it, or what it held before,
    whatever happens meanwhile. Folders above `path` are made.

    `temporary` must lie on the same file system; left out, it is a hidden neighbour.

    Raises UserError or MachineError as `writing` does.
    """
    own = f".mame-sd.{os.getpid()}.{threading.get_ident()}.tmp"
    temporary = temporary or path.with_name(own)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(
            missing_ok=True
        )  # of a run that was killed, or a link that others put there
        try:
            with open_own(temporary, os.O_WRONLY | os.O_EXCL) as file:
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
