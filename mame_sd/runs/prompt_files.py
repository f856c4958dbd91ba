r"""Read prompt files: one prompt a line (.txt), or a table (.csv, .tsv).

Every prompt gets an id that is unique and can be a file's name. Because the starting noise is drawn
from (seed, id, repeat), ids are stable: without an id in the file, a prompt's id is its number, the
first one ``00001``. Lines end at ``\n`` (or ``\r\n``) alone; other control characters are data.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError, unexpected
from mame_sd.runs.files import shown

KNOWN_COLUMNS = ("prompt", "id", "seed", "negative_prompt")  # in upper or lower case
DELIMITERS = {".txt": "", ".csv": ",", ".tsv": "\t"}
MAX_LENGTH = 100_000  # characters of a prompt
MAX_ID_BYTES = 200  # file systems take 255 bytes; "_<repeat>.png" follows
_FORBIDDEN_IN_ID = set('/\\:*?"<>|')


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a run.

    Attributes:
        id: unique in its file; images are named ``<id>_<repeat>.png``.
        text: the prompt, unchanged.
        seed: seed of this prompt; if None, the run's.
        negative_prompt: negative prompt of this prompt; if None, the run's.
        extra: all other columns, for samples.jsonl.
    """

    id: str
    text: str
    seed: int | None = None
    negative_prompt: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def demo_file() -> Path:
    """Return the packaged prompt file that ``demo`` names."""
    package = Path(__file__).resolve().parents[1]
    places = (package / "prompts", package.parent / "prompts")  # in a wheel, in a checkout
    return next(file for place in places if (file := place / "demo.txt").is_file())


def load_prompts(source: str | Path) -> list[Prompt]:
    """Read the prompts of a .txt, .csv or .tsv file, or of ``"demo"``.

    Raises:
        UserError: the file is missing, empty, badly encoded or malformed.
    """
    path = demo_file() if str(source) == "demo" else Path(source)
    delimiter = DELIMITERS.get(path.suffix.lower())
    if delimiter is None:
        allowed = f"a prompt file ending in {', '.join(DELIMITERS)} (or 'demo')"
        raise unexpected(str(path), allowed, path.suffix or "no ending", "rename or convert it")
    text = _read(path)
    records = _rows(path, text, delimiter) if delimiter else _lines(text)
    prompts: list[Prompt] = []
    places: list[str] = []
    for line, values in records:
        places.append(f"{path}:{line}: ")
        prompts.append(_prompt(places[-1], len(places), values))
    if not prompts:
        raise UserError(
            f"{path}: expected at least one prompt, found none; write one prompt a line"
        )
    check_unique(prompts, places)
    return prompts


def prompts_from_texts(texts: Sequence[str]) -> list[Prompt]:
    """Return prompts with the ids ``p00001``, ``p00002``, ... (those of files are numbers)."""
    for text in texts:
        _check_text("", text)
    return [Prompt(id=f"p{number:05d}", text=text) for number, text in enumerate(texts, 1)]


def check_unique(prompts: Sequence[Prompt], places: Sequence[str] | None = None) -> None:
    """Raise UserError if two ids would name the same file, also where case is ignored.

    `places` are the beginnings of messages about the prompts.
    """
    seen: dict[str, str] = {}
    for index, prompt in enumerate(prompts):
        key = unicodedata.normalize("NFC", prompt.id).casefold()
        if key in seen:
            raise UserError(
                f"{places[index] if places else ''}expected unique ids (ignoring case), "
                f"got {prompt.id!r} after {seen[key]!r}; rename one"
            )
        seen[key] = prompt.id


def prompt_file_identity(source: str | Path) -> dict[str, str | None]:
    """Return the name and SHA-256 of a file that `load_prompts` takes, as JSON values."""
    path = demo_file() if str(source) == "demo" else Path(source)
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    return {"name": shown(path.name), "sha256": digest}


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Return a SHA-256 over all fields of prompts, which distinguishes lists of prompts."""
    digest = hashlib.sha256()
    for prompt in prompts:
        # None stands for width and height, which earlier versions had, so that old runs continue.
        row: list[Any] = [prompt.id, prompt.text, prompt.seed, prompt.negative_prompt, None, None]
        row.append(prompt.extra)
        digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _read(path: Path) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark."""
    try:
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
        place = f"{path}:{data[:bad].count(10) + 1}"
        raise unexpected(place, "UTF-8", f"the byte 0x{data[bad]:02x}", "save it as UTF-8")
    return text


def _lines(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line number and the prompt of each line of a text that has one."""
    for number, line in enumerate(text.split("\n"), 1):
        prompt = line.strip(" \t\r")
        if prompt and not prompt.startswith("#"):
            yield number, {"prompt": prompt}


def _rows(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the number of the first line and the cells by column of each row of a table."""
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
                optional = KNOWN_COLUMNS[1:]
                yield line, {name: cell for name, cell in cells if cell or name not in optional}
            line = rows.line_num + 1
    except csv.Error as error:
        place = f"{path}:{max(rows.line_num, 1)}"
        raise UserError(f"{place}: expected a table, but {error}; check its quotes") from None


def _header(place: str, row: list[str]) -> list[str]:
    """Return column names: known ones in lower case, and "prompt" for the prompt's column."""
    names = [name.strip() for name in row]
    names = [low if (low := name.lower()) in KNOWN_COLUMNS else name for name in names]
    if "prompt" not in names:
        names = ["prompt" if name.lower() == "caption" else name for name in names]
    if "prompt" not in names:
        raise unexpected(place, "a column named prompt or caption", ", ".join(row), "rename one")
    for name in names:
        if name.lower() in ("width", "height"):
            allowed = f"no column {name}, because all images of a run have one size"
            advice = f"rename the column, and give --{name.lower()}"
            raise unexpected(place, allowed, "one", advice)
    if twice := [name for name in names if names.count(name) > 1]:
        raise unexpected(place, "different column names", f"{twice[0]!r} twice", "rename one")
    return names


def _prompt(place: str, number: int, values: dict[str, str]) -> Prompt:
    """Return the `number`-th prompt of a file, from its cells."""
    _check_text(place, values["prompt"])
    seed = values.get("seed")
    seed = None if seed is None else seed.strip()
    if seed is not None and not (seed.isdecimal() and int(seed[:40]) < 2**63):
        allowed = "a whole number from 0 to 2^63 - 1"
        raise unexpected(f"{place}seed", allowed, repr(seed), "correct it")
    return Prompt(
        id=_checked_id(place, values["id"]) if "id" in values else f"{number:05d}",
        text=values["prompt"],
        seed=None if seed is None else int(seed),
        negative_prompt=values.get("negative_prompt"),
        extra={k: value for k, value in values.items() if k not in KNOWN_COLUMNS},
    )


def _check_text(place: str, text: str) -> None:
    if not text.strip():
        raise UserError(f"{place}expected a prompt, got an empty one; write some words")
    if len(text) > MAX_LENGTH:
        raise UserError(
            f"{place}expected a prompt of at most {MAX_LENGTH:,} characters, got {len(text):,};"
            " shorten it"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{place}expected text, got half of a surrogate pair in {text[:40]!r}; remove it"
        ) from None


def _checked_id(place: str, identity: str) -> str:
    """Return an id that can name a file of the run on any system, or raise UserError."""
    bad = any(char in _FORBIDDEN_IN_ID or not char.isprintable() for char in identity)
    if bad or not identity or identity != identity.strip() or identity.startswith("."):
        allowed = 'a plain file name (no slash, colon, * ? " < > | or leading dot)'
    elif len(identity.encode()) > MAX_ID_BYTES:
        allowed = f"at most {MAX_ID_BYTES} bytes"
    else:
        return identity
    raise unexpected(f"{place}id", allowed, repr(identity), "rename it")
