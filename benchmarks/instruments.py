"""What methods are judged on: a model that comes along, the prompts it was made for, and who tells whether it drew them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image

from benchmarks import methods
from benchmarks.methods import Method
from mame_sd.embedded.scenes import nearest_subject, scenes_by_caption
from mame_sd.eval.scoring.retrieval import draw_captions, retrieved, subjects_by_caption


@dataclass(frozen=True)
class Instrument:
    """One of them.

    Attributes:
        model: as ``--model`` takes it.
        captions: (subject, ground) of every prompt that it was made for.
        retrieved: 1.0 when the subject of an image uint8 [H, W, 3] is that of its prompt.
        methods, rivals, short: what is measured on it, by name: all, those of ``--rivals``, those of ``--short``.
        tomesd: the row that sensitivity is asked of.
    """

    model: str
    captions: Callable[[], Mapping[str, tuple[str, str]]]
    retrieved: Callable[[np.ndarray, str], float]
    methods: Mapping[str, Method]
    rivals: Mapping[str, Method]
    short: Mapping[str, Method]
    tomesd: str

    def prompts(self, num: int, held_out: bool = False) -> list[str]:
        """`num` drawn prompts, half of them pairs that training never saw; with `held_out` others than the search has."""
        searched = draw_captions(self.captions(), num, 0)
        return draw_captions(self.captions(), num, 1, without=searched) if held_out else searched


def _found(image: np.ndarray, prompt: str) -> float:
    subject, ground = scenes_by_caption()[prompt]
    return float(nearest_subject(Image.fromarray(image), ground) == subject)


INSTRUMENTS = {
    "unet": Instrument(
        "embedded-unet", subjects_by_caption, retrieved, methods.FULL, methods.AGAINST_RIVALS, methods.SHORT, "tomesd 0.5"
    ),
    "transformer": Instrument(
        "embedded-transformer", scenes_by_caption, _found, methods.JOINT, methods.JOINT_RIVALS, methods.JOINT_SHORT,
        "tomesd's form 0.5",
    ),
}  # fmt: skip
