"""Cases for measuring caches: passages that a model continues, and questions that it answers.

Passages come from a folder of HTML, Python and plain text. Files are divided into two halves by
their names: "development", on which a method may be tuned, and "report".

There are two tasks of questions: a few codes in filler text, and many pairs. A prompt is a
conversation in which questions about other codes are asked and answered. The cache is shortened
after it, and the question that counts follows: no method sees it. The answer is teacher-forced and
right if every token is.
"""

from __future__ import annotations

import hashlib
import html
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

from mame_sd.errors import UserError

from .settings import HALVES

TEXT = "text"
SUFFIXES = (".html", ".htm", ".py", ".txt", ".md", ".rst")
_SHORTEST = 6_000  # characters of a file that is looked at
_WORDS = (
    "apple bread chair cloud crown dance eagle field flame ghost grape heart horse house"
    " juice knife lemon light money mouse music night ocean paint paper piano plant queen"
    " river robot salad sheep smoke snake spoon stone storm sugar table tiger tower train"
    " water whale wheel world"
)
_FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    "A long road leads over the hill. People walk on it every day. They carry what they need.",
    "The market opens at eight. Bakers bring their bread. Children look at the windows.",
    "In winter the lake is frozen. In summer boats cross it. The ferry costs very little.",
    "An old clock stands in the hall. It strikes every hour. Nobody knows who built it.",
)
_NEEDLES, _PAIRS = 3, 10  # SmolLM2-135M answers most of them with its full cache
_SHOWN = {"needles": 2, "pairs": 3}  # questions that the prompt asks and answers
_MOST = {"needles": 64, "pairs": _PAIRS}  # lines of filler, or pairs: as many as fit
_FACTS = {
    "needles": "The secret code of the {} is {}.",
    "pairs": "The people who live in the old house on the hill have agreed that from now on the"
    " secret code of the {} is {}. They wrote it down in a small book, which lies on the table"
    " beside the window.",
}


@dataclass(frozen=True)
class Case:
    """A prompt, and what is read after its cache was shortened, as token ids.

    Attributes:
        name: Name of the case.
        kind: TEXT for a passage, or the name of a task.
        prompt: The prompt.
        rest: What follows it.
        answer: Number of tokens at the end of `rest` that are the answer; 0 for a passage.
    """

    name: str
    kind: str
    prompt: list[int]
    rest: list[int]
    answer: int = 0


def read_text(path: Path) -> str:
    """Return a file's text without markup. Raise UserError if it can't be read."""
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
    """Return the text files of a folder by their first folder below it.

    If `folder` is None, the files of Python's standard library.

    Raises:
        UserError: If there is no such folder, or no text in it.
    """
    if folder is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        return {"python": sorted(library.glob("*.py"))}
    if not folder.is_dir():
        raise UserError(f"--texts: expected a folder, found none at {folder}; give one")
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink():
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
        tokens: Returns a text's token ids.
        files: What `text_files` returned.
        half: The half.
        num: Number of passages.
        length: Tokens of the prompt.
        rest: Tokens of what follows.

    Raises:
        UserError: If there are fewer texts.
    """
    sources = [_of_source(tokens, name, paths, half, length, rest) for name, paths in files.items()]
    turns = (one for turn in zip_longest(*sources) for one in turn if one is not None)
    cases = list(islice(turns, num))
    if len(cases) < num:
        raise UserError(
            f"--num: expected at most {len(cases)} passages of {length + rest} tokens, got {num}"
        )
    return cases


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


def questions(task: str, tokens: Callable[[str], list[int]], num: int, length: int) -> list[Case]:
    """Return the questions of a task.

    Args:
        task: "needles" or "pairs".
        tokens: Returns a text's token ids.
        num: Number of questions.
        length: Largest number of tokens of a prompt.

    Raises:
        UserError: If no prompt fits into that many tokens.
    """
    cases: list[Case] = []
    for name in (f"{task}-{number}" for number in range(num)):
        for size in range(_MOST[task], 0, -1):
            parts = _asked(task, random.Random(name), size)
            ids, question, answer = (tokens(part) for part in parts)
            if len(ids) <= length:
                cases.append(Case(name, task, ids, [*question, *answer], len(answer)))
                break
        else:
            raise UserError(f"--length: expected room for the task {task}, got {length} tokens")
    return cases


def _asked(task: str, rng: random.Random, size: int) -> tuple[str, str, str]:
    """Return the context, the question and the answer."""
    count = _NEEDLES if task == "needles" else max(size, _SHOWN[task] + 1)
    names = rng.sample(_WORDS.split(), count)
    codes = [str(rng.randrange(1000, 9999)) for _ in names]
    facts = [_FACTS[task].format(name, code) for name, code in zip(names, codes, strict=True)]
    lines = facts
    if task == "needles":  # at random places in the filler
        lines = [rng.choice(_FILLER) for _ in range(size)]
        for fact in facts:
            lines.insert(rng.randrange(len(lines) + 1), fact)
    last, *shown = rng.sample(range(count), _SHOWN[task] + 1)

    def turn(at: int, answer: str) -> str:
        ask = f"<|im_start|>user\nWhat is the secret code of the {names[at]}?<|im_end|>\n"
        return f"{ask}<|im_start|>assistant\nThe secret code of the {names[at]} is{answer}"

    context = "<|im_start|>user\nRemember these codes.\n\n" + "\n".join(lines)
    context += "<|im_end|>\n<|im_start|>assistant\nI remember them.<|im_end|>\n"
    context += "".join(turn(at, f" {codes[at]}.<|im_end|>\n") for at in shown)
    return context, turn(last, ""), f" {codes[last]}"
