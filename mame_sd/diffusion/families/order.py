"""Where an image's tokens are in a sequence, and how they go to the plane on which they are compared."""

from __future__ import annotations

import torch
from torch import Tensor

from mame_sd.core.plan import Plan
from mame_sd.diffusion.families.family import Rows
from mame_sd.diffusion.tokens import Tokens


class Order:
    """Where the image's tokens are in a sequence of `length`, and how they go to their plane and back."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        self.tokens = tokens
        self.first = start_of(length, tokens) or 0
        self.stop = self.first + tokens.count
        self.times = tokens.size[0] if len(tokens.size) == 3 else 1

    def image(self, t: Tensor) -> Tensor:
        """The image's tokens [B, n, C] of t [B, L, C], in the plane's order."""
        return self.to_plane(t[:, self.first : self.stop])

    def to_plane(self, image: Tensor) -> Tensor:
        """The image's tokens [B, n, C] in the plane's order."""
        if self.times == 1:
            return image
        return image.unflatten(1, self.tokens.size).transpose(1, 2).flatten(1, 3)

    def put(self, t: Tensor, image: Tensor) -> Tensor:
        """`image` in place of t's image tokens, those before and after them as they are."""
        if self.first == 0 and self.stop == t.shape[1]:
            return image
        return torch.cat([t[:, : self.first], image, t[:, self.stop :]], 1)

    def restored(self, y: Tensor, plan: Plan) -> Tensor:
        """All tokens from an output [B, L', ...], in the call's order."""
        flat = y.flatten(2)
        end = self.first + plan.tokens_kept
        image = plan.restore(flat[:, self.first : end])
        if self.times > 1:
            _, h, w = self.tokens.size
            image = image.unflatten(1, (h, self.times, w)).transpose(1, 2).flatten(1, 3)
        if flat.shape[1] > plan.tokens_kept:
            image = torch.cat([flat[:, : self.first], image, flat[:, end:]], 1)
        return image.unflatten(2, y.shape[2:])

    def positions(self, places: Tensor) -> Tensor:
        """Where tokens at these places of the plane are among the image's."""
        if self.times == 1:
            return places
        _, h, w = self.tokens.size
        row, column = places // w, places % w
        return (row % self.times * h + row // self.times) * w + column

    def rows(self, kept: Tensor) -> Rows:
        """Picks the rows of merged tokens along a dimension that counts the image's, or the whole sequence's."""

        def pick(t: Tensor, dim: int) -> Tensor:
            start = start_of(t.shape[dim], self.tokens) or 0
            index = kept.to(t.device) + start
            every = torch.arange(t.shape[dim], device=t.device)
            return t.index_select(dim, torch.cat([every[:start], index, every[start + self.tokens.count :]]))

        return pick


def start_of(length: int, tokens: Tokens) -> int | None:
    """Where the image's tokens begin in a sequence of `length`; None if they can't be in it."""
    if tokens.before is None:
        start = length - tokens.count - (tokens.after or 0)
        return 0 if length == tokens.count else start if start >= 0 else None
    if tokens.after is None:
        return tokens.before if length >= tokens.before + tokens.count else 0 if length == tokens.count else None
    if length in (tokens.count, tokens.count + tokens.after):
        return 0
    if length == tokens.before + tokens.count + tokens.after:
        return tokens.before
    return None
