"""Measure rows on cases, and keep every result as a JSON line.

Every command that compares methods measures *rows* (methods) on *cases* (pictures, passages, draws
of noise, rounds of timing). `measure_cases` asks for the results that a `Store` lacks, and the
store writes each one at once. So a command that was stopped at any moment continues with the same
call:

    store = Store(out / "results.jsonl", FORMAT, "captions", about, ("row", "picture"))
    measure_cases(store, pictures, rows, caption, lambda picture, row: {"row": row, ...})
    store.lines["default", "cat.png"]

The first line of the file says what the results depend on. A file of another program or version is
refused, because it isn't ours to overwrite. A line that was cut off where a run was stopped is
ignored.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from mame_sd.errors import UserError
from mame_sd.runs.files import write_atomically, writing

from .timing import turned

# Opens a step of that name, and gives its progress callback.
Stage = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
Line = dict[str, Any]
Lines = dict[tuple[Any, ...], Line]
Case = TypeVar("Case")
RowName = TypeVar("RowName")


class Store:
    """A file of JSON lines that grows.

    Args:
        path: the file; it begins with the first line that is added.
        form: name and version of the format, which the first line must have.
        what: what the lines are, for errors.
        about: everything that the lines depend on besides their keys, as JSON values.
        keys: the entries that identify a line; a later line replaces an earlier one.
        fresh: if True, lines that depend on other values are dropped; otherwise they are an error.

    Attributes:
        lines: every line by its key.

    Raises:
        UserError: the file is of another kind, or its lines depend on other values.
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
        self._path, self._form, self._what, self._keys = path, form, what, keys
        self._head, self._begun = {"format": form, "about": about}, False
        self.lines: Lines = {}
        with writing(path):
            text = path.read_bytes().decode("utf-8", "replace") if path.exists() else None
        if text is None:
            return
        read: list[Any] = []
        for line in text.split("\n"):
            with contextlib.suppress(ValueError, RecursionError):
                read.append(json.loads(line))
        try:
            if read[0]["format"] != form:
                raise ValueError(repr(read[0]["format"]))
            lines = {self.key(line): line for line in read[1:]}
            same = read[0]["about"] == json.loads(json.dumps(about))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise self.refused(error) from None
        if lines and not same and not fresh:
            raise UserError(
                f"--out {path.parent}: expected results of the same settings, found those of"
                " others; give another folder"
            )
        self.lines = lines if same else {}

    def key(self, line: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the entries that identify a line."""
        return tuple(line[name] for name in self._keys)

    def add(self, line: Line) -> None:
        """Write one more line at once. The first one begins the file, or repairs a torn one."""
        self.lines[self.key(line)] = line
        if not self._begun:
            lines = (json.dumps(one) + "\n" for one in (self._head, *self.lines.values()))
            write_atomically(self._path, "".join(lines).encode())
            self._begun = True
            return
        with writing(self._path), open(self._path, "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")

    def refused(self, error: Exception) -> UserError:
        """Return the error that says that the file isn't one of ours."""
        return UserError(
            f"{self._path}: expected {self._what} ({self._form!r}), got another file"
            f" ({type(error).__name__}: {error}); delete it, or choose another --out"
        )


def measure_cases(
    store: Store,
    cases: Sequence[Case],
    rows: Sequence[RowName],
    measure: Callable[[Case, Sequence[RowName]], Iterable[tuple[RowName, Line]]],
    key: Callable[[Case, RowName], Line],
    *,
    together: bool = False,
    warm_up: Callable[[RowName], object] = lambda row: None,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> None:
    """Measure each row on each case that the store lacks.

    Args:
        store: holds the results.
        cases: the cases, in the order in which they are measured.
        rows: the rows.
        measure: measures some rows on a case, and yields each row with its result.
        key: returns the entries that identify the result of a row on a case.
        together: if True, rows are only comparable if they are measured one right after another,
            as seconds are. Then a case that lacks a row is measured whole, its rows are taken in
            turning order, and its results are added when all of them are there.
        warm_up: called with each row before the first case is measured.
        on_progress: called with the number of results done and of all results, before the first
            case and after each result.
    """
    lacking = {
        number: [row for row in rows if store.key(key(case, row)) not in store.lines]
        for number, case in enumerate(cases)
    }
    if together:
        lacking = {n: turned(rows, n) if missing else [] for n, missing in lacking.items()}
    done, total = len(cases) * len(rows) - sum(map(len, lacking.values())), len(cases) * len(rows)
    on_progress(done, total)
    if done < total:
        for row in rows:
            warm_up(row)
    for number, case in enumerate(cases):
        if not lacking[number]:
            continue
        results = []
        for row, result in measure(case, lacking[number]):
            if together:
                results.append((row, result))
            else:
                store.add({**key(case, row), **result})
            done += 1
            on_progress(done, total)
        for row, result in results:
            store.add({**key(case, row), **result})
