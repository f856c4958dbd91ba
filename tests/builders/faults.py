"""Faults of the machine below a run: a small file system of its own, a folder that takes no more
files, a damaged file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class NotPermittedError(Exception):
    """This process may not do that here (mount, chattr)."""


def system(*command: str) -> None:
    """Run a command of the system. Raises NotPermittedError, with its words, where it fails."""
    if shutil.which(command[0]) is None:
        raise NotPermittedError(f"no {command[0]} here")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotPermittedError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A file system of `size` at `folder`; gives a function that mounts it again with other
    options.
    """
    folder.mkdir()
    system("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder))
    try:
        yield lambda options: system("mount", "-o", f"remount,{options}", str(folder))
    finally:
        system("umount", str(folder))


def at_image(number: int, images: Path, act: Callable[[], None]) -> None:
    """Do `act` once, just before the image `number` (from 1) gets its place in the folder
    `images`.
    """
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event == "os.rename" and Path(str(arguments[1])).parent == images:
            seen += 1
            if seen == number:
                act()

    sys.addaudithook(hook)


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Change one bit of the file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)
