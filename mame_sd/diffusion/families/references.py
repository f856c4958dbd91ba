"""Reference images of an edit: each merges on its own grid, to its own share, beside the image that
is made.

They stand right behind the image in one sequence, so the plans of all of them are one plan of that
stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mame_sd.core.plan import Plan, RowPlan
from mame_sd.diffusion.layer import Tokens

NONE_HERE = (
    "references: expected a model whose reference images are tokens beside the image (Flux"
    " Kontext, Flux 2, Qwen-Image-Edit, LongCat-Image-Edit, JoyImage, ...), got {}; leave"
    " references out"
)


class JoinedPlan(Plan):
    """Plans of several images that stand one behind the other, as one plan of all their tokens in
    their own order.

    It merges keys and values; nothing is restored from it.

    Args:
        parts: of each image its plan and how its tokens tokens, in their order.
    """

    def __init__(self, parts: Sequence[tuple[Plan, Tokens]]) -> None:
        self.parts = tuple(plan for plan, _ in parts)
        self._tokens = tuple(tokens for _, tokens in parts)
        self.special, self.uneven = 0, True  # groups of images are not alike
        self.tokens_in = sum(plan.tokens_in for plan in self.parts)
        self.tokens_kept = sum(plan.tokens_kept for plan in self.parts)
        self.by_rows = all(isinstance(plan, RowPlan) for plan in self.parts)
        samples = [
            tokens.places(plan.positions.sample) + start
            for plan, tokens, start in self._from("tokens_in")
        ]
        # Two estimates are made of the halves of a sample, so each image is in both.
        halves = [sample.tensor_split([(len(sample) + 1) // 2]) for sample in samples]
        both = [half[at] for at in (0, 1) for half in halves]
        self.positions: Any = _Sampled(torch.cat(both))

    def _from(self, count: str) -> list[tuple[Plan, Tokens, int]]:
        """Each part, and how many tokens are before it: all, or those that are kept."""
        starts = [0]
        for plan in self.parts:
            starts.append(starts[-1] + getattr(plan, count))
        return list(zip(self.parts, self._tokens, starts, strict=False))

    @property
    def sizes(self) -> Tensor:
        """See `Plan`."""
        return _joined([plan.sizes for plan in self.parts])

    @property
    def kept(self) -> Tensor:
        """See `Plan`."""
        return _joined(
            [tokens.places(plan.kept) + start for plan, tokens, start in self._from("tokens_in")]
        )

    @property
    def rows(self) -> Tensor:
        """See `Plan`."""
        return torch.cat(
            [
                tokens.from_plane((plan.rows + start).unsqueeze(-1)).squeeze(-1)
                for plan, tokens, start in self._from("tokens_kept")
            ],
            1,
        )

    def merge(self, t: Tensor) -> Tensor:
        """See `Plan`; t [B, L, C]."""
        parts = t.split([plan.tokens_in for plan in self.parts], 1)
        return torch.cat(
            [
                plan.merge(tokens.to_plane(part))
                for plan, tokens, part in zip(self.parts, self._tokens, parts, strict=True)
            ],
            1,
        )


class _Sampled(NamedTuple):
    """Of `Positions` what a plan of keys and values is asked for."""

    sample: Tensor


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """[n] or [B, n] of each part's, [B, n] where one of them is."""
    for each in [part for part in parts if part.dim() == 2][:1]:
        parts = [part.expand(each.shape[0], -1) for part in parts]
    return torch.cat(list(parts), -1)
