"""Files of JSON lines that a stopped run goes on from: a head that says what the lines are of, then
what was made.

A head of another version, or a file that is none of ours, is refused: it is not ours to overwrite.
Lines of other settings are left aside, and written over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError
from mame_sd.runs.files import write_atomically, writing


def read_lines(
    path: Path, form: str, what: str, about: Mapping[str, Any] | None
) -> tuple[list[dict[str, Any]], bool]:
    """The lines of a file, and whether they are of just `about`; none where there is no file.

    Args:
        form: which the head must name.
        what: that the lines are, for errors.

    Raises:
        UserError: a file of another kind.
    """
    try:
        text = path.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.split("\n") if line.strip()]
        if not lines or lines[0]["format"] != form:
            raise ValueError(repr(lines[0]["format"]) if lines else "an empty file")
        if not all(isinstance(line, dict) for line in lines):
            raise ValueError("lines that are no objects")
    except FileNotFoundError:
        return [], False
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise another_file(path, form, what, error) from None
    return lines[1:], about is not None and lines[0].get("about") == digest(about)


def write_lines(
    path: Path,
    form: str,
    about: Mapping[str, Any],
    lines: Iterable[Mapping[str, Any]],
    head: Mapping[str, Any] | None = None,
) -> None:
    """Write a head and the lines, whole or not at all; `head` is what it says beside `about`."""
    first = {"format": form, "about": digest(about), **(head or {})}
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in (first, *lines)).encode())


def another_file(path: Path, form: str, what: str, error: Exception) -> UserError:
    """What to say of a file that is not one of ours."""
    return UserError(
        f"{path}: expected {what} ({form!r}), got another file ({type(error).__name__}: {error});"
        " delete it, or choose another --out"
    )


def digest(about: Mapping[str, Any]) -> str:
    """Tells what was made of other settings apart."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


class Store:
    """What a command has measured, in a file of JSON lines that a stopped run goes on from.

    A line that was cut off where a run was stopped is left out.

    Attributes:
        found: every line by its key.
    """

    def __init__(
        self, path: Path, form: str, what: str, about: Mapping[str, Any], keys: tuple[str, ...]
    ) -> None:
        """Opens or begins the file `path`.

        Args:
            form, what: of `read_lines`.
            about: all that lines depend on beside their keys, as JSON values.
            keys: the entries of a line that make it one of its own.

        Raises:
            UserError: a file of another kind, or of other settings.
        """
        self._path, self._keys = path, keys
        head = {"format": form, "about": dict(about)}
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_bytes().decode("utf-8", "replace") if path.exists() else ""
        lines: list[Any] = []
        for line in text.split("\n"):
            with contextlib.suppress(ValueError, RecursionError):
                lines.append(json.loads(line))
        try:
            if text and lines[0]["format"] != form:
                raise ValueError(repr(lines[0]["format"]))
            if lines[1:] and lines[0]["about"] != json.loads(json.dumps(head["about"])):
                raise UserError(
                    f"--out {path.parent}: expected results of the same settings, found those of"
                    " others; give another folder"
                )
            self.found = {self.key(line): line for line in lines[1:]}
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise another_file(path, form, what, error) from None
        lines = [head, *self.found.values()]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def key(self, line: Mapping[str, Any]) -> tuple[Any, ...]:
        """What makes a line one of its own."""
        return tuple(line[name] for name in self._keys)

    def add(self, line: dict[str, Any]) -> None:
        """Keep one more line, at once."""
        self.found[self.key(line)] = line
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
