"""The embedded model's ground truth: what each of its prompts should look like, and how near an image comes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mame_sd.embedded import model as subjects
from mame_sd.errors import UserError
from mame_sd.runs.prompt_files import Prompt

Pixels = NDArray[np.uint8]


@cache
def subjects_by_caption() -> dict[str, tuple[str, str]]:
    """(glyph, background) of every prompt that the embedded model was made for."""
    pairs = ((name, background) for name in subjects.glyph_names() for background in subjects.BACKGROUNDS)
    return {subjects.caption(*pair): pair for pair in pairs}


def subject_of(prompt: str) -> tuple[str, str]:
    """(glyph, background) that `prompt` asks for. Raises UserError for a prompt of another kind."""
    found = subjects_by_caption().get(prompt)
    if found is None:
        raise UserError(
            "retrieval, background: expected prompts of the embedded model, such as "
            f"'{next(iter(subjects_by_caption()))}', got {prompt[:80]!r}; leave these metrics out"
        )
    return found


def retrieved(image: Pixels, prompt: str) -> float:
    """1.0 when the glyph nearest to `image` [H, W, 3] by pixels, of all on the prompted background, is the prompted one."""
    name, background = subject_of(prompt)
    return float(subjects.nearest_glyph(Image.fromarray(image), background) == name)


def background_right(image: Pixels, prompt: str) -> float:
    """1.0 when the frame of `image` [H, W, 3] is nearest to the prompted colour."""
    return float(subjects.nearest_background(Image.fromarray(image)) == subject_of(prompt)[1])


def rendered(index: int) -> Pixels:
    """The `index`-th of all true pictures, [256, 256, 3]: every glyph on every background."""
    name, background = list(subjects_by_caption().values())[index]
    return np.asarray(subjects.render(name, background))


def draw_captions(
    captions: Mapping[str, tuple[str, str]], count: int, seed: int = 0, without: Sequence[str] = ()
) -> list[str]:
    """`count` of `captions`, which say (subject, background), but not those of `without`; half of them training never saw.

    Raises UserError for more than there are.
    """
    rng = random.Random(seed)
    left = [caption for caption in captions if caption not in without]
    held = [caption for caption in left if subjects.is_held_out(*captions[caption])]
    seen = [caption for caption in left if not subjects.is_held_out(*captions[caption])]
    if count // 2 > len(held):
        raise UserError(
            f"--num: expected at most {2 * len(held) + 1} drawn prompts, got {count}; lower it, or give --prompts"
        )
    return rng.sample(held, count // 2) + rng.sample(seen, count - count // 2)


def draw_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """`count` prompts of the embedded UNet, half of them pairs that training never saw.

    Raises UserError for more than there are: twice as many as it was not trained on.
    """
    chosen = draw_captions(subjects_by_caption(), count, seed)
    return [
        Prompt(
            id=f"{number:03}",
            text=text,
            extra={"glyph": name, "background": background, "held_out": subjects.is_held_out(name, background)},
        )
        for number, text in enumerate(chosen)
        for name, background in [subjects_by_caption()[text]]
    ]
