"""The one kind of file that a stopped measurement goes on from: JSON lines, a head that says what
they are of, then what was measured, each line as soon as it is there.

A file that is none of ours, or of another version, is refused: it is not ours to overwrite. A line
that was cut off where a run was stopped is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError
from mame_sd.runs.files import open_own, read_regular, write_atomically, writing

Lines = dict[tuple[Any, ...], dict[str, Any]]


def read_store(
    path: Path,
    form: str,
    what: str,
    about: Mapping[str, Any] | None,
    keys: tuple[str, ...],
    fresh: bool = False,
) -> Lines:
    """The lines of a file by their keys; none where there is no file.

    Args:
        form: which the head must name; `what` the lines are, for errors.
        about: all that lines depend on beside their keys, as JSON values; None: whatever it is.
        keys: the entries of a line that make it one of its own; a later one replaces an earlier.
        fresh: lines of other settings are left out, instead of an error.

    Raises:
        UserError: a file of another kind, or of other settings.
    """
    with writing(path):
        if not path.exists():
            return {}
        text = read_regular(path).decode("utf-8", "replace")
    lines: list[Any] = []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError, RecursionError):
            lines.append(json.loads(line))
    try:
        if lines[0]["format"] != form:
            raise ValueError(repr(lines[0]["format"]))
        found = {tuple(line[name] for name in keys): line for line in lines[1:]}
        same = about is None or lines[0]["about"] == json.loads(json.dumps(about))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise another_file(path, form, what, error) from None
    if not same and found and not fresh:
        raise UserError(
            f"--out {path.parent}: expected results of the same settings, found those of others;"
            " give another folder"
        )
    return found if same else {}


class Store:
    """A file of lines that is open for more.

    Attributes:
        found: every line by its keys.
    """

    def __init__(
        self,
        path: Path,
        form: str,
        what: str,
        about: Mapping[str, Any],
        keys: tuple[str, ...],
        fresh: bool = False,
    ) -> None:
        """Opens or begins a file. Arguments and errors as `read_store` has them."""
        self._path, self._keys, self._open = path, keys, False
        self._head = {"format": form, "about": dict(about)}
        self.found = read_store(path, form, what, about, keys, fresh)

    def key(self, line: Mapping[str, Any]) -> tuple[Any, ...]:
        """What makes a line one of its own."""
        return tuple(line[name] for name in self._keys)

    def add(self, line: dict[str, Any]) -> None:
        """Keep one more line, at once; the first one begins the file, or makes a torn one whole."""
        self.found[self.key(line)] = line
        if not self._open:
            lines = (json.dumps(line) + "\n" for line in (self._head, *self.found.values()))
            write_atomically(self._path, "".join(lines).encode())
            self._open = True
            return
        with writing(self._path), open_own(self._path, os.O_WRONLY | os.O_APPEND) as file:
            file.write(json.dumps(line).encode() + b"\n")


def another_file(path: Path, form: str, what: str, error: Exception) -> UserError:
    """What to say of a file that is not one of ours."""
    return UserError(
        f"{path}: expected {what} ({form!r}), got another file ({type(error).__name__}: {error});"
        " delete it, or choose another --out"
    )
