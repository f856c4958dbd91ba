"""Cut passages that a model continues after its cache was shortened.

They come from a folder of Python and plain text. Files are divided into two halves by their
names: "development", on which a method may be tuned, and "report".
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

from mame_sd.errors import UserError
from mame_sd.runs.files import files_below

from .settings import HALVES

SUFFIXES = (".py", ".txt", ".md", ".rst")
_SHORTEST = 6_000  # characters of a file that is looked at


@dataclass(frozen=True)
class Case:
    """A passage as token ids.

    Attributes:
        name: name of its file, after that of its source.
        rest: what follows, which is read after the cache was shortened.
    """

    name: str
    prompt: list[int]
    rest: list[int]


def read_text(path: Path) -> str:
    """Return a file's text. Raise UserError if it can't be read."""
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise UserError(
            f"--texts: expected readable text in {path}, got: {error}; remove the file"
        ) from error


def text_files(folder: Path | None) -> dict[str, list[Path]]:
    """Return the text files of a folder by their first folder below it.

    If `folder` is None, the files of Python's standard library.

    Raises:
        UserError: there is no such folder, or no text in it.
    """
    if folder is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        return {"python": sorted(library.glob("*.py"))}
    if not folder.is_dir():
        raise UserError(f"--texts: expected a folder, found none at {folder}; give one")
    files: dict[str, list[Path]] = {}
    for path in files_below(folder):
        if path.suffix in SUFFIXES and not path.is_symlink():
            files.setdefault(path.relative_to(folder).parts[0], []).append(path)
    if not files:
        raise UserError(f"--texts: expected {', '.join(SUFFIXES)}, found none in {folder}")
    return files


def half_of(path: Path) -> str:
    """Return the half that a file belongs to, by the sha256 of its name."""
    return HALVES[hashlib.sha256(path.name.encode()).digest()[0] % 2]


def passages(
    tokens: Callable[[str], list[int]],
    files: dict[str, list[Path]],
    half: str,
    num: int,
    length: int,
    rest: int,
) -> list[Case]:
    """Return passages of one half, one per file, from all sources in turn.

    Args:
        tokens: returns a text's token ids.
        files: what `text_files` returned.
        half: the half.
        num: number of passages.
        length: tokens of the prompt.
        rest: tokens of what follows.

    Raises:
        UserError: there are fewer texts.
    """

    def of_source(name: str, paths: list[Path]) -> Iterator[Case]:
        paths = [path for path in paths if half_of(path) == half]
        random.Random(0).shuffle(paths)
        for path in paths:
            text = read_text(path)
            ids = tokens(text) if len(text) >= _SHORTEST else []
            spare = len(ids) - length - rest
            if spare >= 50:
                start = random.Random(path.name).randrange(spare)
                end = start + length
                yield Case(f"{name}/{path.name}", ids[start:end], ids[end : end + rest])

    turns = zip_longest(*(of_source(name, paths) for name, paths in files.items()))
    cases = list(islice((one for turn in turns for one in turn if one is not None), num))
    if len(cases) < num:
        raise UserError(
            f"--num: expected at most {len(cases)} passages of {length + rest} tokens, got {num}"
        )
    return cases
