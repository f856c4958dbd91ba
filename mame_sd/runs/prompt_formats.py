"""The formats of prompt files: text in, one record of raw values a prompt out, each with its line
number.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError
from mame_sd.json_files import once_each

PROMPT_COLUMNS = ("prompt", "caption")  # compared without case; the first that is present is taken
KNOWN_COLUMNS = ("id", "seed", "negative_prompt", "width", "height")
# A line of other tools: it begins with an option, or one that they know stands in it.
_OPTIONS = re.compile(
    r"^--?[a-z][\w-]*(?=[\s=])|\s--(?:prompt|negative[-_]prompt|no|seed|steps|width|height|cfg[-_]scale"
    r"|guidance|sampler[\w-]*|batch[-_]\w+|n[-_]iter|ar|aspect|stylize|chaos|quality)(?=[\s=])",
    re.IGNORECASE,
)
Record = tuple[int, dict[str, Any]]  # line number, values by column


def read_text(path: Path) -> str:
    """The file's text: UTF-8 with or without a byte order mark.

    Raises UserError for anything else.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(
            f"{path}: expected a prompt file, found nothing there; check the path"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"{path}: the prompt file can't be read ({reason}); check the path and its permissions"
        ) from None
    zero = data.find(b"\0")
    if zero >= 0 and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        line = data[:zero].count(b"\n") + 1
        raise UserError(
            f"{path}:{line}: expected text, got a binary file (it holds a zero byte); give a text"
            " file"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(
            f"{path}:{line}: expected UTF-8, got the byte 0x{data[error.start]:02x}; save it as"
            " UTF-8"
        ) from None


def _text_records(path: Path, text: str) -> Iterator[Record]:
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip(" \t\r")
        if line and not line.startswith("#"):
            if found := _OPTIONS.search(line):
                raise UserError(
                    f"{path}:{number}: expected a prompt, got one with the option"
                    f" {found.group().strip()}, as other tools write it; write a .jsonl, .csv or"
                    f" .tsv file with columns prompt, {', '.join(KNOWN_COLUMNS)}"
                )
            yield number, {"prompt": line}


def _table_records(delimiter: str) -> Callable[[Path, str], Iterator[Record]]:
    def read(path: Path, text: str) -> Iterator[Record]:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        header: list[str] | None = None
        line = 1
        try:
            for row in rows:
                if not any(row):
                    pass
                elif header is None:
                    header = _header(path, line, row)
                elif len(row) != len(header):
                    raise UserError(
                        f"{path}:{line}: expected {len(header)} columns as in the header, got"
                        f" {len(row)}; quote a cell that holds the delimiter"
                    )
                else:
                    yield line, _table_row(header, row)
                line = rows.line_num + 1
        except csv.Error as error:
            raise UserError(
                f"{path}:{max(rows.line_num, 1)}: expected a table, but {error}; write a quote"
                " inside a cell twice"
            ) from None

    return read


def _header(path: Path, line: int, row: list[str]) -> list[str]:
    """Column names, known ones in lower case, the prompt's column named ``prompt``."""
    lower = [name.strip().lower() for name in row]
    chosen = next((name for name in PROMPT_COLUMNS if name in lower), None)
    if chosen is None:
        raise UserError(
            f"{path}:{line}: expected a column named prompt or caption, got {', '.join(row)}; name"
            " one so"
        )
    names = []
    for name, low in zip(row, lower, strict=True):
        names.append("prompt" if low == chosen else low if low in KNOWN_COLUMNS else name.strip())
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"{path}:{line}: expected columns that differ, got {name!r} twice; rename one"
            )
    return names


def _table_row(header: list[str], row: list[str]) -> dict[str, Any]:
    """Values by column; an empty cell of a known column counts as not given, numbers are read as
    such.
    """
    values: dict[str, Any] = dict(zip(header, row, strict=True))
    for name in KNOWN_COLUMNS:
        if values.get(name) == "":
            del values[name]
        elif name in values and name in ("seed", "width", "height"):
            with contextlib.suppress(ValueError):  # what is no number is refused as other values
                values[name] = int(values[name])
    return values


def _jsonl_records(path: Path, text: str) -> Iterator[Record]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip(" \t\r"):
            continue
        try:
            values = json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=once_each)
        except (ValueError, RecursionError) as error:
            reason = str(error)
            if isinstance(error, json.JSONDecodeError):
                reason = f"{error.msg} at column {error.colno}"
            raise UserError(
                f"{path}:{number}: expected a JSON object, but {reason}; write one object a line"
            ) from None
        if not isinstance(values, dict) or not any(name in values for name in PROMPT_COLUMNS):
            raise UserError(
                f'{path}:{number}: expected an object such as {{"prompt": "..."}}, got'
                f" {line.strip()[:60]!r}; write one object a line"
            )
        prompt = values.pop(next(name for name in PROMPT_COLUMNS if name in values))
        yield number, {**values, "prompt": prompt}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


READERS: dict[str, Callable[[Path, str], Iterator[Record]]] = {
    ".txt": _text_records,
    ".csv": _table_records(","),
    ".tsv": _table_records("\t"),
    ".jsonl": _jsonl_records,
}
