"""Read the formats of prompt files: text in, a record of cells for each prompt out."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from mame_sd.errors import UserError, unexpected

PROMPT_COLUMNS = ("prompt", "caption")  # in upper or lower case; the first one present counts
KNOWN_COLUMNS = ("id", "seed", "negative_prompt", "width", "height")
_OPTION = re.compile(r"(?:^--?|\s--)[a-z][\w-]*(?<!-)(?=[\s=])", re.IGNORECASE)
Record = tuple[int, dict[str, str]]  # line number, cells by column


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark, or raise UserError."""
    try:
        if path.is_fifo():  # whose writer might never come
            raise unexpected(str(path), "a prompt file", "a pipe", "save the prompts first")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"{path}: the prompt file can't be read ({reason}); check the path and its permissions"
        ) from None
    try:
        text, bad = data.decode("utf-8-sig"), data.find(b"\0")  # of UTF-16, or not text
    except UnicodeDecodeError as error:
        text, bad = "", error.start
    if bad >= 0:
        line = data[:bad].count(b"\n") + 1
        raise unexpected(
            f"{path}:{line}", "UTF-8", f"the byte 0x{data[bad]:02x}", "save it as UTF-8"
        )
    return text


def _text_records(path: Path, text: str) -> Iterator[Record]:
    if "\r" in text.strip("\r") and "\n" not in text:
        raise unexpected(
            str(path), "lines that end in \\n or \\r\\n", "\\r alone", "save it with \\n"
        )
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip(" \t\r")
        if not line or line.startswith("#"):
            continue
        if found := _OPTION.search(line):
            raise UserError(
                f"{path}:{number}: expected a prompt, got one with the option"
                f" {found.group().strip()}, as other tools write it; write a .csv or .tsv file"
                " with columns prompt, id, seed, negative_prompt"
            )
        yield number, {"prompt": line}


def _table_records(delimiter: str, path: Path, text: str) -> Iterator[Record]:
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for row in rows:
            if not any(row):
                pass
            elif header is None:
                header = _header(f"{path}:{line}", row)
            elif len(row) != len(header):
                allowed = f"{len(header)} columns as in the header"
                advice = "quote a cell that holds the delimiter"
                raise unexpected(f"{path}:{line}", allowed, len(row), advice)
            else:  # an empty cell of a known column is not given
                cells = zip(header, row, strict=True)
                yield line, {n: cell for n, cell in cells if cell or n not in KNOWN_COLUMNS}
            line = rows.line_num + 1
    except csv.Error as error:
        advice = "write a quote inside a cell twice"
        if "field limit" in str(error):
            advice = "end its quotes, or shorten it"
            error = csv.Error(f"a cell has more than {csv.field_size_limit():,} characters")
        raise UserError(
            f"{path}:{max(rows.line_num, 1)}: expected a table, but {error}; {advice}"
        ) from None


def _header(place: str, row: list[str]) -> list[str]:
    """Return column names: known ones in lower case, and "prompt" for the prompt's column."""
    lower = [name.strip().lower() for name in row]
    chosen = next((name for name in PROMPT_COLUMNS if name in lower), None)
    if chosen is None:
        raise unexpected(place, "a column named prompt or caption", ", ".join(row), "rename one")
    names = [
        "prompt" if low == chosen else low if low in KNOWN_COLUMNS else name.strip()
        for name, low in zip(row, lower, strict=True)
    ]
    if twice := [name for name in names if names.count(name) > 1]:
        raise unexpected(place, "different column names", f"{twice[0]!r} twice", "rename one")
    return names


READERS: dict[str, Callable[[Path, str], Iterator[Record]]] = {
    ".txt": _text_records,
    ".csv": partial(_table_records, ","),
    ".tsv": partial(_table_records, "\t"),
}
