"""Tasks that a model answers from its prompt: one of a few codes in filler, and one of many pairs.

A prompt is a conversation. Questions about other codes are asked and answered first. The cache is
cut there, and the question that counts comes after: no method sees it. The answer is
teacher-forced: right is a whole answer, token by token. Only prompts that the full cache answers
are asked of other rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mame_sd.errors import UserError

from ..tables import Row
from .measure import Meter, every_key, kept_by, left

_WORDS = (
    "apple bread chair cloud crown dance eagle field flame ghost grape heart horse house"
    " juice knife lemon light money mouse music night ocean paint paper piano plant queen"
    " river robot salad sheep smoke snake spoon stone storm sugar table tiger tower train"
    " water whale wheel world"
)
_NAMES = _WORDS.split()
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

    most = 64  # lines of filler, or pairs: as many as fit
    for size in range(most if task == "needles" else _PAIRS, 0, -1):
        context, question, answer = _asked(task, random.Random(f"{task}-{number}"), size)
        ids = tokens(context)
        if len(ids) <= length:
            return Prompt(f"{task}-{number}", task, ids, tokens(question), tokens(answer))
    raise UserError(f"--length: expected room for the task {task}, got {length} tokens")


_NEEDLES, _PAIRS = 3, 10  # SmolLM2-135M answers most of them with its full cache
_SHOWN = {"needles": 2, "pairs": 3}  # questions that the prompt asks and answers
_LONG = (
    "The people who live in the old house on the hill have agreed that from now on the secret code"
    " of the {} is {}. They wrote it down in a small book, which lies on the table beside the"
    " window."
)
_SHORT = "The secret code of the {} is {}."


def _asked(task: str, rng: random.Random, size: int) -> tuple[str, str, str]:
    """The context, the question, and the answer."""
    count = _NEEDLES if task == "needles" else max(size, _SHOWN[task] + 1)
    names = rng.sample(_NAMES, count)
    codes = [str(rng.randrange(1000, 9999)) for _ in names]
    fact = _SHORT if task == "needles" else _LONG
    facts = [fact.format(name, code) for name, code in zip(names, codes, strict=True)]
    lines = facts if task == "pairs" else _strewn(facts, rng, size)
    last, *shown = rng.sample(range(count), _SHOWN[task] + 1)

    def turn(at: int, answer: str) -> str:
        ask = f"<|im_start|>user\nWhat is the secret code of the {names[at]}?<|im_end|>\n"
        return f"{ask}<|im_start|>assistant\nThe secret code of the {names[at]} is{answer}"

    context = "<|im_start|>user\nRemember these codes.\n\n" + "\n".join(lines)
    context += "<|im_end|>\n<|im_start|>assistant\nI remember them.<|im_end|>\n"
    context += "".join(turn(at, f" {codes[at]}.<|im_end|>\n") for at in shown)
    return context, turn(last, ""), f" {codes[last]}"


def _strewn(facts: list[str], rng: random.Random, size: int) -> list[str]:
    """The facts at random places among `size` lines of filler."""
    lines = [rng.choice(_FILLER) for _ in range(size)]
    for fact in facts:
        lines.insert(rng.randrange(len(lines) + 1), fact)
    return lines


@torch.no_grad()
def measure_prompt(
    meter: Meter,
    prompt: Prompt,
    rows: Sequence[Row],
    shares: Sequence[float],
    done: Callable[[str, float], bool],
) -> Iterator[dict[str, Any]]:
    """Whether each row and share that isn't `done` answers right, the full cache first.

    A prompt that the full cache gets wrong says nothing about the others, which are left out.

    Yields:
        row, share, right.
    """
    todo = left(rows, shares, done)
    if not todo and done("full", 1.0):
        return
    start = meter.prefill(prompt.context)
    seen = start[0].seen
    asked = [*prompt.question, *prompt.answer[:-1]]

    def right(kept: Any) -> bool:
        got, _ = meter.rest(kept, seen, asked)
        return got[-len(prompt.answer) :].argmax(-1).tolist() == prompt.answer

    answered = right(every_key(start))
    if not done("full", 1.0):
        yield {"row": "full", "share": 1.0, "right": answered}
    for row, share in todo if answered else ():
        kept = kept_by(meter, row, share, start, prompt.context)
        yield {"row": row.name, "share": share, "right": right(kept)}
