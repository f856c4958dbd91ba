"""Prompts that lose image tokens: which of their tokens stay, and rows of unequal lengths padded.

A processor writes one image token for each patch. Where patches have merged, as many of them are
taken out as tokens are gone. With them goes the padding, which is put back on its side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Image:
    """What one image gives the language model.

    Attributes:
        features: [k, C], in the order of their places.
        places: LongTensor [k]: which of the image tokens of an unmerged prompt these are.
        unmerged: how many image tokens the unmerged prompt has for it.
    """

    features: Tensor
    places: Tensor
    unmerged: int


@dataclass(frozen=True)
class Kept:
    """Which tokens of a batch of prompts [B, L] stay.

    Attributes:
        rows: LongTensor [B, L'] their places, in order; 0 at padding.
        real: bool [B, L'], False at padding.
    """

    rows: Tensor
    real: Tensor

    def of(self, values: Tensor, padding: float) -> Tensor:
        """Take those of values [B, L, ...] that stay, [B, L', ...], with `padding` between."""
        shape = (*self.rows.shape, *[1] * (values.dim() - 2))
        rows, real = self.rows.view(shape), self.real.view(shape)
        found = values.gather(1, rows.expand(-1, -1, *values.shape[2:]))
        return torch.where(real, found, padding)


def kept_of(ids: Tensor, mask: Tensor | None, token: int, images: list[Image]) -> Kept:
    """Find the tokens of prompts ids [B, L] that stay.

    Args:
        ids: the prompts as the processor wrote them.
        mask: [B, L], 0 at padding; None: there is none.
        token: the id of image tokens.
        images: in the order of the prompts.

    Raises:
        ValueError: the prompts have another number of image tokens than the images.
    """
    slots, unmerged = ids == token, sum(image.unmerged for image in images)
    if int(slots.sum()) != unmerged:
        raise ValueError(
            f"expected {unmerged} image tokens in the prompts for {len(images)} images, got"
            f" {int(slots.sum())}; give the processor's own expansion of <image>, of the same"
            " images"
        )
    starts = torch.tensor([0] + [image.unmerged for image in images]).cumsum(0).tolist()
    stay = torch.zeros(unmerged, dtype=torch.bool, device=ids.device)
    for start, image in zip(starts, images, strict=False):
        stay[image.places.to(ids.device) + start] = True
    kept = torch.ones_like(slots) if mask is None else mask.bool()
    kept = kept.masked_scatter(slots, stay)
    lengths = kept.sum(1)
    longest = int(lengths.max())
    right = mask is not None and bool((mask[:, -1] == 0).any())
    column = torch.arange(longest, device=ids.device)
    real = column < lengths[:, None] if right else column >= longest - lengths[:, None]
    rows = torch.zeros(real.shape, dtype=torch.long, device=ids.device)
    rows[real] = kept.nonzero()[:, 1]
    return Kept(rows, real)


class Positions:
    """Positions of prompts that lost tokens, as they were before: the language model sees the same
    distances as without merging.

    Args:
        whole: positions of all tokens [B, L], or of three axes [3, B, L]: time, row and column.
        kept: those that stay.

    Attributes:
        own: of the tokens that stay [B, L'] or [3, B, L'], padding among them.
        after: [B] of the first token that follows.
    """

    def __init__(self, whole: Tensor, kept: Kept) -> None:
        whole = whole[-3:] if whole.dim() == 3 else whole  # a fourth, before them, counts words
        whole = whole.expand(*whole.shape[:-2], len(kept.rows), -1)
        flat = [kept.of(one, 0) for one in whole.reshape(-1, *whole.shape[-2:])]
        self.own = torch.stack(flat).reshape(*whole.shape[:-1], -1)
        self.after = whole.amax(-1).reshape(-1, len(kept.rows)).amax(0) + 1
        self._first = kept.real.int().argmax(1)  # [B] where padding on the left ends
        self._count = kept.real.sum(1)
        self._gone = self.after - self._count

    def of(self, counted: Tensor) -> Tensor:
        """Return positions [n B, T] or [3, n B, T] of tokens that were counted from 0, padding and
        what is gone left out.

        Each prompt may stand there n times in a row, for beams.
        """
        times = len(counted) // len(self._count)
        first, count, gone = (
            one.repeat_interleave(times, 0)[:, None]
            for one in (self._first, self._count, self._gone)
        )
        own = self.own.repeat_interleave(times, -2)
        inside = (first + counted).clamp(max=own.shape[-1] - 1)
        inside = own.gather(-1, inside.expand(*own.shape[:-1], -1))
        return torch.where(counted < count, inside, counted + gone)


def counted(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Count positions [B, L] of prompts without their padding, 0 there, as `generate` does."""
    if mask is None:
        return torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
    return (mask.long().cumsum(1) - 1).clamp(min=0)
