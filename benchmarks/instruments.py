"""What methods are judged on: the embedded models, each with its truth and the methods that apply
to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks import methods
from benchmarks.methods import Method
from mame_sd.eval.scoring.retrieval import TRUTHS, Truth


@dataclass(frozen=True)
class Instrument:
    """One of them.

    Attributes:
        model: as ``--model`` takes it.
        truth: what its prompts should look like.
        methods, short: what is measured on it, by name: all, and what ``--short`` takes.
        tomesd: the row that sensitivity is asked of.
    """

    model: str
    truth: Truth
    methods: Mapping[str, Method]
    short: Mapping[str, Method]
    tomesd: str

    def prompts(self, num: int, held_out: bool = False) -> list[str]:
        """`num` drawn prompts, half of them pairs that training never saw; with `held_out` others
        than the search has.
        """
        searched = [prompt.text for prompt in self.truth.draw(num)]
        return (
            [prompt.text for prompt in self.truth.draw(num, 1, without=searched)]
            if held_out
            else searched
        )


INSTRUMENTS = {
    "unet": Instrument(
        "embedded-unet",
        TRUTHS["unet"],
        {**methods.RIVALS, **methods.TOMESD},
        methods.SHORT,
        "tomesd 0.5",
    ),
    "transformer": Instrument(
        "embedded-transformer",
        TRUTHS["transformer"],
        methods.RIVALS,
        methods.SHORT,
        "tau 0.8",
    ),
}
