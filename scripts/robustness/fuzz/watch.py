"""Which file operations of this process change something outside of a folder."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Of each event the places of a path and of the descriptor of the folder that it starts in.
PATHS: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.mkdir": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.truncate": ((0, None),),
}


class Watch:
    """Notes every file operation of this process that would change something outside of
    `allowed`.
    """

    def __init__(self) -> None:
        self.allowed: Path | None = None
        self.found: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event == "open":
            path, _, flags = arguments
            changing = isinstance(flags, int) and flags & (
                os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
            )
            if changing and not isinstance(path, int):
                self._look(event, path, follow=not flags & os.O_NOFOLLOW)
        for place, folder in PATHS.get(event, ()):
            self._look(
                event, arguments[place], -1 if folder is None else arguments[folder], follow=False
            )

    def _look(self, event: str, path: Any, folder: int = -1, *, follow: bool) -> None:
        """`folder`: descriptor of the folder that `path` starts in.

        `follow`: opening follows a link at the path's end; renaming and removing take the link
        itself.
        """
        allowed, self.allowed = self.allowed, None
        try:
            text = os.path.join(
                "." if folder < 0 else os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path)
            )
            real = (
                os.path.realpath(text)
                if follow
                else os.path.join(
                    os.path.realpath(os.path.dirname(text) or "."), os.path.basename(text)
                )
            )
            inside = Path(real) == allowed or Path(real).is_relative_to(allowed)
            if not inside and real != os.devnull and "__pycache__" not in real:
                self.found.append(f"{event} {real}")
        finally:
            self.allowed = allowed

    @contextlib.contextmanager
    def only(self, folder: Path) -> Iterator[list[str]]:
        """In the block changes may be made below `folder` alone; gives the list of others."""
        self.found = []
        self.allowed = folder.resolve()
        try:
            yield self.found
        finally:
            self.allowed = None


def tree(folder: Path, without: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file below `folder`, that below `without` left out."""
    found = {}
    for place, folders, files in os.walk(folder):
        if Path(place) == without.parent:
            folders[:] = [name for name in folders if name != without.name]
        for name in files:
            info = os.lstat(os.path.join(place, name))
            found[os.path.join(place, name)] = info.st_size, info.st_mtime_ns
    return found
