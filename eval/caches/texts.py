"""Passages of text that a model goes on with: from a folder of HTML, Python and plain text.

Files are dealt to two halves by their names: "development", on which a method may be tuned, and
"report".
"""

from __future__ import annotations

import hashlib
import html
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from mame_sd.errors import UserError

from .measure import TEXT, Case
from .settings import HALVES

SUFFIXES = (".html", ".htm", ".py", ".txt", ".md", ".rst")
_SHORTEST = 6_000  # characters of a file that is looked at


def read_text(path: Path) -> str:
    """A file's text without markup. Raises UserError when it can't be read."""
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise UserError(
            f"--texts: expected readable text in {path}, got: {error}; remove the file"
        ) from error
    if path.suffix not in (".html", ".htm"):
        return text
    text = re.sub(r"(?s)<(script|style|head).*?</\1>", "", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    return re.sub(r"\n\s*\n+", "\n\n", re.sub(r"[ \t]+", " ", text))


def text_files(folder: Path | None) -> dict[str, list[Path]]:
    """Files by where they come from (the first folder below `folder`); None: Python's own library.

    Raises:
        UserError: no folder, or no text in it.
    """
    if folder is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        return {"python": sorted(library.glob("*.py"))}
    if not folder.is_dir():
        raise UserError(f"--texts: expected a folder, found none at {folder}; give one")
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink():
            found.setdefault(path.relative_to(folder).parts[0], []).append(path)
    if not found:
        raise UserError(f"--texts: expected {', '.join(SUFFIXES)}, found none in {folder}")
    return found


def half_of(path: Path) -> str:
    """Which half a file belongs to: by the sha256 of its name."""
    return HALVES[hashlib.sha256(path.name.encode()).digest()[0] % 2]


def passages(
    tokens: Callable[[str], list[int]],
    files: dict[str, list[Path]],
    half: str,
    num: int,
    length: int,
    rest: int,
) -> list[Case]:
    """`num` passages of one half, sources in turn, one of each file.

    Args:
        tokens: a text's token ids.
        files: from `text_files`.
        length, rest: tokens of the prompt and of what follows.

    Raises:
        UserError: fewer texts than that.
    """
    sources = [_of_source(tokens, name, own, half, length, rest) for name, own in files.items()]
    found: list[Case] = []
    while sources and len(found) < num:
        for source in list(sources):
            passage = next(source, None)
            if passage is None:
                sources.remove(source)
            elif len(found) < num:
                found.append(passage)
    if len(found) < num:
        raise UserError(
            f"--num: expected at most {len(found)} passages of {length + rest} tokens, got {num}"
        )
    return found


def _of_source(
    tokens: Callable[[str], list[int]],
    name: str,
    files: list[Path],
    half: str,
    length: int,
    rest: int,
) -> Iterator[Case]:
    files = [path for path in files if half_of(path) == half]
    random.Random(0).shuffle(files)
    for path in files:
        text = "" if path.name.startswith("index") else read_text(path)  # a table of contents
        ids = tokens(text) if len(text) >= _SHORTEST else []
        spare = len(ids) - length - rest
        if spare >= 50:
            start = random.Random(path.name).randrange(spare)
            end = start + length
            yield Case(f"{name}/{path.name}", TEXT, ids[start:end], ids[end : end + rest])
