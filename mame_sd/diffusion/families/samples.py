"""Attention that runs over one sample after another (Mochi).

Each sample has its own length of text. It merges by its own part of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mame_sd.core.detail import Detail
from mame_sd.core.plan import Plan
from mame_sd.diffusion.families.keys import Attending, MergedKeys, attended
from mame_sd.diffusion.layer import Tokens


class KeysBySample(Attending):
    """While entered, each call of one sample has the keys and values of the next sample's image
    merged.

    Args:
        plan, tokens, first, correct, drawn: as `MergedKeys`; behind the image any number of keys
            may stand.
        batch: samples in all.
    """

    def __init__(
        self,
        plan: Plan,
        tokens: Tokens,
        batch: int,
        first: int = 0,
        correct: bool = False,
        drawn: bool = False,
    ) -> None:
        super().__init__()
        self._plan, self._tokens, self._batch, self._first = plan, tokens, batch, first
        self._how = correct, drawn
        self._samples = 0  # whose attention has come

    @property
    def seen(self) -> bool:
        """Whether the attention of every sample came."""
        return self._samples == self._batch

    def attend(self, attention: Callable[..., Tensor], call: dict[str, Any]) -> Tensor:
        """See `Attending`."""
        key = call["key"]
        length = key.shape[-2]
        own = (
            key.shape[0] == 1
            and self._first + self._plan.tokens_in <= length == call["query"].shape[-2]
        )
        if not own or self.seen:
            return attended(attention, call)
        plan = (
            self._plan if self._batch == 1 else _SamplePlan(self._plan, self._samples, self._batch)
        )
        self._samples += 1
        return MergedKeys(plan, self._tokens, (1, length), self._first, *self._how).attend(
            attention, call
        )


class _SamplePlan(Plan):
    """One sample's part of a plan. Arguments: the plan, which sample, of how many."""

    def __init__(self, plan: Plan, sample: int, batch: int) -> None:
        super().__init__(plan.positions, plan._preserved, plan.special, torch.Size([1]))
        self._plan, self._sample, self._batch, self.uneven = plan, sample, batch, plan.uneven

    @property
    def weights(self) -> Tensor:
        """See `Plan`."""
        return self._own(self._plan.weights)

    @property
    def sizes(self) -> Tensor:
        """See `Plan`."""
        sizes = self._plan.sizes
        return sizes if sizes.dim() == 1 else self._own(sizes)

    @property
    def kept(self) -> Tensor:
        """See `Plan`."""
        kept = self._plan.kept
        return kept if kept.dim() == 1 else self._own(kept)

    @property
    def rows(self) -> Tensor:
        """See `Plan`."""
        return self._own(self._plan.rows)

    def merge(self, t: Tensor) -> Tensor:
        """See `Plan`; t [1, L, C]."""
        return self._own(self._plan.merge(t.expand(self._batch, -1, -1)))

    def restore(self, y: Tensor, detail: Detail | None = None) -> Tensor:
        """See `Plan`; y [1, L', C]."""
        return self._own(self._plan.restore(y.expand(self._batch, -1, -1), detail))

    def _own(self, t: Tensor) -> Tensor:
        return t.narrow(0, self._sample, 1) if t.shape[0] == self._batch else t
