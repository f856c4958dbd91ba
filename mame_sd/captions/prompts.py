"""Remove image tokens from prompts, and pad rows of unequal lengths.

A processor writes one image token for each patch. If patches have merged, the surplus image tokens
are removed. Padding is removed with them and added again on the same side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Image:
    """The features of one image that the language model reads.

    Attributes:
        features: [k, C], in the order of their places.
        places: LongTensor [k], their indices among the image tokens of an unmerged prompt.
        unmerged: number of image tokens that the unmerged prompt has for this image.
    """

    features: Tensor
    places: Tensor
    unmerged: int


@dataclass(frozen=True)
class Shortened:
    """The tokens of a batch of prompts [B, L] that stay.

    Attributes:
        rows: LongTensor [B, L'], their indices in order; 0 at padding.
        real: bool [B, L'], False at padding.
    """

    rows: Tensor
    real: Tensor

    def of(self, values: Tensor, padding: int = 0) -> Tensor:
        """Select the values [..., B, L'] that stay, of [..., B, L] or [..., 1, L]."""
        rows = self.rows.expand(*values.shape[:-2], -1, -1)
        values = values.expand(*values.shape[:-2], len(self.rows), -1)
        return values.gather(-1, rows).masked_fill(~self.real, padding)


def shortened(ids: Tensor, mask: Tensor | None, token: int, images: list[Image]) -> Shortened:
    """Find the tokens of prompts that stay.

    Args:
        ids: prompts as the processor wrote them, [B, L].
        mask: [B, L], 0 at padding, or None if there is none.
        token: the id of image tokens.
        images: the images in the order of the prompts.
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
    return Shortened(rows, real)


def check_count(count: int, images: list[Image]) -> None:
    """Raise ValueError if prompts have another number of image tokens than their images."""
    unmerged = sum(image.unmerged for image in images)
    if count != unmerged:
        raise ValueError(
            f"expected {unmerged} image tokens in the prompts for {len(images)} images, got"
            f" {count}; give the processor's own expansion of <image>, of the same images"
        )


def images_by_prompt(ids: Tensor, token: int, images: list[Image]) -> list[list[Image]]:
    """Assign images to prompts by the number of image tokens in each.

    Args:
        ids: prompts as the processor wrote them, [B, L].
        token: the id of image tokens.
        images: the images in the order of the prompts.
    """
    counts = (ids == token).sum(1).tolist()
    check_count(sum(counts), images)
    left, rows = iter(images), []
    for count in counts:
        row: list[Image] = []
        while sum(image.unmerged for image in row) < count:
            row.append(next(left))
        check_count(count, row)
        rows.append(row)
    return rows
