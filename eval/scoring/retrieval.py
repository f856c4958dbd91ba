"""The embedded models' ground truth: what each of their prompts should look like, and how near an
image comes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mame_sd.embedded import model as subjects
from mame_sd.embedded.scenes import color_of, nearest_subject, scenes_by_caption
from mame_sd.errors import UserError
from mame_sd.runs.prompt_files import Prompt

Pixels = NDArray[np.uint8]
Captions = Mapping[str, tuple[str, str]]


@cache
def subjects_by_caption() -> dict[str, tuple[str, str]]:
    """(glyph, background) of every prompt that the embedded UNet was made for."""
    pairs = (
        (name, background) for name in subjects.glyph_names() for background in subjects.BACKGROUNDS
    )
    return {subjects.caption(*pair): pair for pair in pairs}


@dataclass(frozen=True)
class Truth:
    """What one embedded model was taught.

    Attributes:
        captions: (subject, background) of every prompt that it was made for.
        nearest: name of the subject that an image shows on the background of that name.
    """

    captions: Callable[[], Captions]
    nearest: Callable[[Image.Image, str], str]

    def of(self, prompt: str) -> tuple[str, str]:
        """(subject, background) that `prompt` asks for.

        Raises UserError for a prompt of another kind.
        """
        found = self.captions().get(prompt)
        if found is None:
            raise UserError(
                "retrieval, background: expected prompts of the embedded model, such as "
                f"'{next(iter(self.captions()))}', got {prompt[:80]!r}; leave these metrics out"
            )
        return found

    def retrieved(self, image: Pixels, prompt: str) -> float:
        """1.0 when the subject nearest to `image` [H, W, 3], of all on the prompted background, is
        the prompted one.
        """
        name, background = self.of(prompt)
        return float(self.nearest(Image.fromarray(image), background) == name)

    def background_right(self, image: Pixels, prompt: str) -> float:
        """1.0 when the frame of `image` [H, W, 3] is nearest to the prompted colour."""
        return float(
            subjects.nearest_background(Image.fromarray(image)) == color_of(self.of(prompt)[1])
        )

    def draw(self, count: int, seed: int = 0, without: Collection[str] = ()) -> list[Prompt]:
        """`count` prompts other than those of `without`, half of them pairs that training never
        saw.

        Raises UserError for more than there are: twice as many as it was not trained on.
        """
        rng = random.Random(seed)
        left = {
            caption: pair for caption, pair in self.captions().items() if caption not in without
        }
        held = [caption for caption, pair in left.items() if subjects.is_held_out(*pair)]
        seen = [caption for caption, pair in left.items() if not subjects.is_held_out(*pair)]
        if count // 2 > len(held):
            raise UserError(
                f"--num: expected at most {2 * len(held) + 1} drawn prompts, got {count}; lower it,"
                " or give --prompts"
            )
        chosen = rng.sample(held, count // 2) + rng.sample(seen, count - count // 2)
        return [
            Prompt(
                id=f"{number:03}",
                text=text,
                extra={
                    "glyph": left[text][0],
                    "background": left[text][1],
                    "held_out": number < count // 2,
                },
            )
            for number, text in enumerate(chosen)
        ]


TRUTHS = {
    "unet": Truth(subjects_by_caption, subjects.nearest_glyph),
    "transformer": Truth(scenes_by_caption, nearest_subject),
}  # by the embedded model's name


def truth_of(identity: Mapping[str, object]) -> Truth:
    """The truth for images of the model that a run's settings name: the transformer's, or else the
    UNet's.
    """
    return TRUTHS["transformer" if identity.get("name") == "embedded-transformer" else "unet"]


def rendered(index: int) -> Pixels:
    """The `index`-th of the UNet's true pictures, [256, 256, 3]: every glyph on every
    background.
    """
    name, background = list(subjects_by_caption().values())[index]
    return np.asarray(subjects.render(name, background))
