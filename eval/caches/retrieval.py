"""Tasks that a model answers from its prompt: a pass key in filler, one of many pairs, and a line
to copy.

A prompt shows two answered questions first and asks a third, which comes after the cache was cut:
no method sees it. The model goes on greedily, teacher-forced on the answer: right is a whole
answer, token by token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .measure import Meter, kept_by, left, whole
from .rows import Row

TASKS = ("needles", "pairs", "copy")
_NAMES = [
    *[
        "apple",
        "bread",
        "chair",
        "cloud",
        "crown",
        "dance",
        "eagle",
        "field",
        "flame",
        "ghost",
        "grape",
        "heart",
    ],
    *[
        "horse",
        "house",
        "juice",
        "knife",
        "lemon",
        "light",
        "money",
        "mouse",
        "music",
        "night",
        "ocean",
        "paint",
    ],
    *[
        "paper",
        "piano",
        "plant",
        "queen",
        "river",
        "robot",
        "salad",
        "sheep",
        "smoke",
        "snake",
        "spoon",
        "stone",
    ],
    *["storm", "sugar", "table", "tiger", "tower", "train", "water", "whale", "wheel", "world"],
]
_FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    "A long road leads over the hill. People walk on it every day. They carry what they need.",
    "The market opens at eight. Bakers bring their bread. Children look at the windows.",
    "In winter the lake is frozen. In summer boats cross it. The ferry costs very little.",
    "An old clock stands in the hall. It strikes every hour. Nobody knows who built it.",
)


@dataclass(frozen=True)
class Prompt:
    """A context, the question that is asked after it was cut, and the answer, as token ids."""

    name: str
    task: str
    context: list[int]
    question: list[int]
    answer: list[int]


def prompts(task: str, tokenizer: Any, num: int, length: int) -> list[Prompt]:
    """`num` prompts of a task, whose contexts have at most `length` tokens."""
    return [_prompt(task, tokenizer, i, length) for i in range(num)]


def _prompt(task: str, tokenizer: Any, number: int, length: int) -> Prompt:
    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    size = 64
    best = None
    # As many facts or sentences as fit.
    while True:
        text, question, answer = _MAKERS[task](random.Random(f"{task}-{number}"), size)
        head = f"<|im_start|>user\n{text}"
        ids = tokens(head)
        if len(ids) <= length:
            best = (ids, tokens(question), tokens(answer))
            break
        size -= 1
    assert best is not None
    return Prompt(f"{task}-{number}", task, *best)


def _fact(name: str, code: str) -> str:
    return f"The secret code of the {name} is {code}."


def _code(rng: random.Random) -> str:
    return str(rng.randrange(1000, 9999))


def _needles(rng: random.Random, size: int) -> tuple[str, str, str]:
    names = rng.sample(_NAMES, 5)
    codes = [_code(rng) for _ in names]
    lines = [rng.choice(_FILLER) for _ in range(size)]
    places = sorted(rng.sample(range(len(lines)), len(names)))
    for place, name, code in zip(reversed(places), names, codes, strict=True):
        lines.insert(place, _fact(name, code))
    return _asked(rng, "\n".join(lines), names, codes)


def _pairs(rng: random.Random, size: int) -> tuple[str, str, str]:
    names = rng.sample(_NAMES, min(size, len(_NAMES)))
    codes = [_code(rng) for _ in names]
    return _asked(rng, "\n".join(map(_fact, names, codes)), names, codes)


def _asked(
    rng: random.Random, text: str, names: list[str], codes: list[str]
) -> tuple[str, str, str]:
    at = rng.randrange(len(names))
    question = f"\n\nWhat is the secret code of the {names[at]}?<|im_end|>\n<|im_start|>assistant\n"
    return (
        f"Remember these codes.\n\n{text}",
        question + f"The secret code of the {names[at]} is",
        f" {codes[at]}",
    )


def _copy(rng: random.Random, size: int) -> tuple[str, str, str]:
    words = rng.sample(_NAMES, 40)
    notes = [words[i : i + 5] for i in range(0, 40, 5)]
    lines = [rng.choice(_FILLER) for _ in range(size)]
    for place, note in zip(sorted(rng.sample(range(size), 8), reverse=True), notes, strict=True):
        lines.insert(place, f"Note: {' '.join(note)}.")
    first, *rest = notes[rng.randrange(8)]
    text = "Remember these notes.\n\n" + "\n".join(lines)
    question = (
        f"\n\nWhich note begins with {first}?<|im_end|>\n<|im_start|>assistant\nNote: {first}"
    )
    return text, question, " " + " ".join(rest)


_MAKERS: dict[str, Callable[[random.Random, int], tuple[str, str, str]]] = {
    "needles": _needles,
    "pairs": _pairs,
    "copy": _copy,
}


@torch.no_grad()
def measure_prompt(
    meter: Meter,
    prompt: Prompt,
    rows: Sequence[Row],
    shares: Sequence[float] | None,
    done: Callable[[str, float], bool],
) -> Iterator[dict[str, Any]]:
    """Whether each row and share that isn't `done` answers right, the full cache first.

    Yields:
        row, share, right.
    """
    todo = left(rows, shares, done)
    if not todo and done("full", 1.0):
        return
    start = meter.prefill(prompt.context)
    seen = start.views[0].seen
    asked = [*prompt.question, *prompt.answer[:-1]]

    def right(kept: Any) -> bool:
        got, _ = meter.rest(kept, seen, asked)
        return got[-len(prompt.answer) :].argmax(-1).tolist() == prompt.answer

    if not done("full", 1.0):
        yield {"row": "full", "share": 1.0, "right": right(whole(start.views))}
    for row, share in todo:
        yield {
            "row": row.name,
            "share": share,
            "right": right(kept_by(meter, row, share, start, prompt.context)),
        }
