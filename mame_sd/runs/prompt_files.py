"""Prompt files: one prompt a line (.txt) or a table (.csv, .tsv), and the errors they can have.

Every prompt ends up with an id that is unique and fit to be a file name. It is also stable, for the
starting latent is drawn from (seed, id, repeat). Where a file gives no id, the prompt's number
does: the first prompt is ``00001``. Control characters in a prompt are data: lines end at ``\\n``
(or ``\\r\\n``) and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError
from mame_sd.runs.files import shown
from mame_sd.runs.prompt_formats import KNOWN_COLUMNS, READERS, read_text

MAX_ID_BYTES = 200  # file systems take 255 bytes; "_<repeat>.png" follows
# Windows keeps these for devices, whatever follows after a dot.
_DEVICES = {"CON", "PRN", "AUX", "NUL", *(f"{d}{n}" for d in ("COM", "LPT") for n in range(10))}
_FORBIDDEN_IN_ID = set('/\\:*?"<>|')


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a run.

    Attributes:
        id: unique in its file; names the images, ``<id>_<repeat>.png``.
        text: the prompt, untouched.
        seed: takes the place of the run's seed for this prompt; None: the run's seed.
        negative_prompt: takes the place of the run's; None: the run's.
        extra: all other columns, kept for samples.jsonl.
    """

    id: str
    text: str
    seed: int | None = None
    negative_prompt: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def demo_file() -> Path:
    """The packaged prompt file that ``demo`` names."""
    package = Path(__file__).resolve().parents[1]
    places = (package / "prompts", package.parent / "prompts")  # in a wheel; in a checkout
    return next(file for place in places if (file := place / "demo.txt").is_file())


def load_prompts(source: str | Path) -> list[Prompt]:
    """Read the prompts of a .txt, .csv or .tsv file, or of ``"demo"``.

    Raises UserError for a file that is missing, empty, binary, badly encoded or malformed.
    """
    path = demo_file() if str(source) == "demo" else Path(source)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(
            f"{path}: expected a prompt file ending in {', '.join(READERS)} (or 'demo'), got "
            f"{path.suffix or 'no ending'}; rename or convert it"
        )
    prompts: list[Prompt] = []
    places: list[str] = []
    for line, values in reader(path, read_text(path)):
        places.append(f"{path}:{line}: ")
        prompts.append(_prompt(places[-1], len(places), values))
    if not prompts:
        raise UserError(
            f"{path}: expected at least one prompt, found none; write one prompt a line"
        )
    check_unique(prompts, places)
    return prompts


def prompts_from_texts(texts: Sequence[str]) -> list[Prompt]:
    """Prompts of the command line, with the ids ``p00001``, ``p00002``, ... (a file's ids are plain
    numbers).
    """
    for text in texts:
        _check_text("--prompt: ", text)
    return [Prompt(id=f"p{number:05d}", text=text) for number, text in enumerate(texts, 1)]


def check_unique(prompts: Sequence[Prompt], places: Sequence[str] | None = None) -> None:
    """Raise UserError when two ids would name the same file, on file systems that ignore case
    too.

    `places`, one for each prompt, say where it stands and open the message.
    """
    seen: dict[str, str] = {}
    for index, prompt in enumerate(prompts):
        key = unicodedata.normalize("NFC", prompt.id).casefold()
        if key in seen:
            place = places[index] if places else ""
            raise UserError(
                f"{place}expected ids that differ (also without case), "
                f"got {prompt.id!r} after {seen[key]!r}; rename one"
            )
        seen[key] = prompt.id


def prompt_file_identity(source: str | Path) -> dict[str, str | None]:
    """Name and SHA-256 of a file that `load_prompts` takes, as JSON values (None for what is no
    plain file).
    """
    path = demo_file() if str(source) == "demo" else Path(source)
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    return {"name": shown(path.name), "sha256": digest}


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """SHA-256 over all that the prompts say, for telling two prompt lists apart."""
    digest = hashlib.sha256()
    for prompt in prompts:
        # None for width and height, which prompts once had: folders that were begun then go on.
        row: list[Any] = [prompt.id, prompt.text, prompt.seed, prompt.negative_prompt, None, None]
        row.append(prompt.extra)
        digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _prompt(place: str, number: int, values: dict[str, str]) -> Prompt:
    """The `number`-th prompt of a file, from its cells, checked."""
    _check_text(place, values["prompt"])
    try:
        seed = int(values["seed"]) if "seed" in values else None
    except ValueError:
        seed = -1
    if seed is not None and not 0 <= seed < 2**63:
        raise UserError(
            f"{place}seed: expected a whole number from 0 to 2^63 - 1, got {values['seed']!r};"
            " correct it"
        )
    for name in ("width", "height"):
        if name in values:
            raise UserError(
                f"{place}{name}: expected none, for all images of a run have one size, got"
                f" {values[name]!r}; rename the column, and give --{name}"
            )
    identity = _check_id(place, values["id"]) if "id" in values else f"{number:05d}"
    return Prompt(
        id=identity,
        text=values["prompt"],
        seed=seed,
        negative_prompt=values.get("negative_prompt"),
        extra={k: value for k, value in values.items() if k not in ("prompt", *KNOWN_COLUMNS)},
    )


def _check_text(place: str, text: str) -> None:
    if not text:
        raise UserError(f"{place}expected a prompt, got an empty one; write some words")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{place}expected text, got half of a surrogate pair in {text[:40]!r}; remove it"
        ) from None


def _check_id(place: str, identity: str) -> str:
    """`identity`, when it can name a file inside the run's folder on any system."""
    bad = any(char in _FORBIDDEN_IN_ID or not char.isprintable() for char in identity)
    if bad or not identity or identity != identity.strip() or identity.startswith("."):
        raise UserError(
            f'{place}id: expected a plain file name (no slash, colon, * ? " < > | or leading dot),'
            f" got {identity!r}; rename it"
        )
    first, dot, _ = identity.partition(".")
    if dot and first.rstrip().upper() in _DEVICES:
        raise UserError(
            f"{place}id: expected a file name of any system, got {identity!r}, which Windows keeps"
            " for a device; rename it"
        )
    if len(identity.encode()) > MAX_ID_BYTES:
        raise UserError(
            f"{place}id: expected at most {MAX_ID_BYTES} bytes, got {len(identity.encode())};"
            " shorten it"
        )
    return identity
