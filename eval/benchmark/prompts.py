"""Draw prompts from those that an embedded model was trained for."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping

from mame_sd.embedded import model as subjects
from mame_sd.embedded.scenes import scenes_by_caption
from mame_sd.errors import UserError
from mame_sd.runs.prompt_files import Prompt

TUNED_ON = 128  # Defaults were chosen on at most so many prompts of a first draw.
Captions = Mapping[str, tuple[str, str]]  # (subject, background) of each prompt


def subjects_by_caption() -> Captions:
    """Return every prompt that the embedded UNet was trained for."""
    pairs = (
        (name, background) for name in subjects.glyph_names() for background in subjects.BACKGROUNDS
    )
    return {subjects.caption(*pair): pair for pair in pairs}


CAPTIONS: dict[str, Callable[[], Captions]] = {
    "unet": subjects_by_caption,
    "transformer": scenes_by_caption,
}  # by the embedded model's name


def drawn(
    captions: Captions, count: int, seed: int = 0, without: Collection[str] = ()
) -> list[Prompt]:
    """Draw `count` prompts, half of them pairs that training never saw.

    If fewer such pairs are left, all of them are drawn.

    Args:
        captions: The prompts to draw from.
        count: Number of prompts.
        seed: Seed of the draw.
        without: Prompts that are not drawn.

    Raises:
        UserError: If there are not enough.
    """
    rng = random.Random(seed)
    left = {caption: pair for caption, pair in captions.items() if caption not in without}
    held = [caption for caption, pair in left.items() if subjects.is_held_out(*pair)]
    seen = [caption for caption, pair in left.items() if not subjects.is_held_out(*pair)]
    if count > len(left):
        raise UserError(
            f"--num: expected at most {len(left)} drawn prompts, got {count}; lower it, or give"
            " --prompts"
        )
    unseen = max(min(count // 2, len(held)), count - len(seen))
    chosen = rng.sample(held, unseen) + rng.sample(seen, count - unseen)
    return [
        Prompt(
            id=f"{number:03}",
            text=text,
            extra={
                "glyph": left[text][0],
                "background": left[text][1],
                "held_out": number < unseen,
            },
        )
        for number, text in enumerate(chosen)
    ]
