"""How the tokens of one call lie: in rows and columns, in frames, behind text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Call = Mapping[str, Any]  # the arguments of a forward, by name


@dataclass(frozen=True)
class Tokens:
    """How the tokens of one call lie.

    Attributes:
        size: (h, w) of an image's tokens, or (t, h, w) of a video's, in row-major order; (n,) where rows and columns are
            unknown.
        before: tokens of something else, such as text, that stand before them in layers where both share a sequence; None: any
            number, another in each layer, and `after` behind them.
        after: the same, behind them (in every layer, such as a reference image's); None: any number, another in each layer.
        unknown: why they can't be told in this call, in which then nothing merges.
    """

    size: tuple[int, ...]
    before: int | None = 0
    after: int | None = 0
    unknown: str = ""

    @property
    def count(self) -> int:
        return math.prod(self.size)

    @property
    def plane(self) -> tuple[int, int] | None:
        """The (rows, columns) on which tokens are compared; None where they are unknown.

        A video's plane is (h * t, w): the rows of all frames interleaved, so that a tile of the plane spans neighbours
        in time as well as in space.
        """
        if len(self.size) == 1:
            return None
        *times, h, w = self.size
        return h * math.prod(times), w
