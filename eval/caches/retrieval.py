"""Tasks that a model answers from its prompt: one of a few codes in filler, and one of many pairs.

A prompt is a conversation. Questions about other codes are asked and answered first. The cache is
cut there, and the question that counts comes after: no method sees it. The answer is
teacher-forced: right is a whole answer, token by token.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from mame_sd.errors import UserError

from .measure import Case

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


def questions(task: str, tokens: Callable[[str], list[int]], num: int, length: int) -> list[Case]:
    """`num` questions of a task, whose prompts have at most `length` tokens.

    Raises UserError where so many do not hold one.
    """
    return [_question(task, tokens, number, length) for number in range(num)]


def _question(task: str, tokens: Callable[[str], list[int]], number: int, length: int) -> Case:
    name = f"{task}-{number}"
    for size in range(_MOST[task], 0, -1):
        context, question, answer = _asked(task, random.Random(name), size)
        ids, wanted = tokens(context), tokens(answer)
        if len(ids) <= length:
            return Case(name, task, ids, [*tokens(question), *wanted], len(wanted))
    raise UserError(f"--length: expected room for the task {task}, got {length} tokens")


def _asked(task: str, rng: random.Random, size: int) -> tuple[str, str, str]:
    """The context, the question, and the answer."""
    count = _NEEDLES if task == "needles" else max(size, _SHOWN[task] + 1)
    names = rng.sample(_WORDS.split(), count)
    codes = [str(rng.randrange(1000, 9999)) for _ in names]
    facts = [_FACTS[task].format(name, code) for name, code in zip(names, codes, strict=True)]
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
