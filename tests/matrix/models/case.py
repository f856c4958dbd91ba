"""What the sweep knows of one model class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tests.builders.transformers import model


@dataclass(frozen=True)
class Case:
    """One class of diffusers.

    Attributes:
        name: the class.
        build: a tiny model of it.
        inputs: gives the arguments of a call.
        image: the argument that holds the image or video, and its dimensions: "hidden_states BCHW".
            L are tokens, row after row (behind the text: 7L), N items of which the last is
            generated, F one frame. Empty: no probe, for the reason in `unprobed`.
        text: the argument that holds text tokens along its second dimension; empty: none, or not
            one that stays in its place.
        unprobed: why the probe can't tell.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    image: str = "hidden_states BCHW"
    text: str = ""
    unprobed: str = ""


def case(
    name: str, inputs: Callable[[], dict[str, Any]], image: str = "hidden_states BCHW", **more: Any
) -> Case:
    """A case of a class built from `more`, but for `text` and `unprobed`."""
    told = {key: more.pop(key) for key in ("text", "unprobed") if key in more}
    return Case(name, model(name, **more), inputs, image, **told)
