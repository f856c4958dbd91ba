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

    def of_positions(self, whole: Tensor) -> Tensor:
        """Take the positions of what stays, [.., B, L'], of whole [.., 1 or B, L]."""
        rows = self.rows.expand(*whole.shape[:-2], -1, -1)
        found = whole.expand(*whole.shape[:-2], len(self.rows), -1).gather(-1, rows)
        return found.masked_fill(~self.real, 0)


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
    check_count(int(slots.sum()), images)
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


def check_count(found: int, images: list[Image]) -> None:
    """Raise ValueError where prompts have another number of image tokens than their images."""
    unmerged = sum(image.unmerged for image in images)
    if found != unmerged:
        raise ValueError(
            f"expected {unmerged} image tokens in the prompts for {len(images)} images, got"
            f" {found}; give the processor's own expansion of <image>, of the same images"
        )


def of_prompts(ids: Tensor, token: int, images: list[Image]) -> list[list[Image]]:
    """Deal out images to prompts ids [B, L], by how many image tokens each has.

    Raises:
        ValueError: the prompts have another number of image tokens than the images.
    """
    counts = (ids == token).sum(1).tolist()
    check_count(sum(counts), images)
    left, found = iter(images), []
    for count in counts:
        own: list[Image] = []
        while sum(image.unmerged for image in own) < count:
            own.append(next(left))
        check_count(count, own)
        found.append(own)
    return found
