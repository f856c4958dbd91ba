"""How the tokens of one call lie: in rows and columns, in frames, behind text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Call = Mapping[str, Any]  # the arguments of a forward, by name


@dataclass(frozen=True)
class Tokens:
    """How the tokens of one call lie.

    Attributes:
        size: (h, w) of an image's tokens, or (t, h, w) of a video's, in row-major order; (n,) where
            rows and columns are unknown.
        before: tokens of something else, such as text, that stand before them in layers where both
            share a sequence; None: any number, another in each layer, and `after` behind them.
        after: the same, behind them (in every layer, such as a reference image's); None: any
            number, another in each layer.
        unknown: why they can't be told in this call, in which then nothing merges.
        references: the sizes of reference images that stand right behind them, in their order; the
            first of what `after` counts.
        count: how many tokens the image or video has.
        plane: the (rows, columns) on which tokens are compared; None where they are unknown. A
            video's plane is (h * t, w): the rows of all frames interleaved, so that a tile of the
            plane spans neighbours in time as well as in space.
    """

    size: tuple[int, ...]
    before: int | None = 0
    after: int | None = 0
    unknown: str = ""
    references: tuple[tuple[int, ...], ...] = ()
    count: int = field(init=False, compare=False, repr=False)
    plane: tuple[int, int] | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        count = math.prod(self.size)
        object.__setattr__(self, "count", count)
        object.__setattr__(
            self, "plane", None if len(self.size) == 1 else (count // self.size[-1], self.size[-1])
        )

    def start(self, length: int) -> int | None:
        """Where they begin in a sequence of `length`; None if they can't be in it."""
        if self.before is None:
            start = length - self.count - (self.after or 0)
            return 0 if length == self.count else start if start >= 0 else None
        if self.after is None:
            return (
                self.before
                if length >= self.before + self.count
                else 0
                if length == self.count
                else None
            )
        if length in (self.count, self.count + self.after):
            return 0
        return self.before if length == self.before + self.count + self.after else None

    def to_plane(self, image: Tensor) -> Tensor:
        """These tokens [B, n, C] in the plane's order."""
        return (
            image.unflatten(1, self.size).transpose(1, 2).flatten(1, 3)
            if len(self.size) == 3
            else image
        )

    def from_plane(self, image: Tensor) -> Tensor:
        """Tokens [B, n, C] in the plane's order in their own again."""
        if len(self.size) < 3:
            return image
        t, h, w = self.size
        return image.unflatten(1, (h, t, w)).transpose(1, 2).flatten(1, 3)

    def places(self, on_plane: Tensor) -> Tensor:
        """Where tokens at these places of the plane are among all of them, in their own order."""
        if len(self.size) < 3:
            return on_plane
        t, h, w = self.size
        row, column = on_plane // w, on_plane % w
        return (row % t * h + row // t) * w + column
