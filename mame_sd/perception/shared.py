"""What the merged blocks of one model share in a forward."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from mame_sd.core.plan import Plan


class ForwardState:
    """What the blocks of one model share: whether they merge, and what the forward that runs knows.

    Attributes:
        special: tokens before the patches.
        restore: the blocks' output has every token again.
        prop_attn: the log of a token's size is added to its attention logits, and means count it;
            None: where that can be, which each forward finds out.
        sized: whether it is, in the forward that runs.
        again: blocks may be computed again, whole, after another forward's images (checkpoints
            around them).
        last: number of the model's last block.
        active: False makes every call bit-equal to a model without merging.
        capture: plans are kept after the forward.
        grid: (h, w) of the latest images' patches, of a video's frames one under the other; None
            where unknown.
        sizes: [B, L'] how many tokens each token stands for, in the forward that runs; None: 1
            each.
        plans: those of the latest forward by number of block, while it runs or with `capture`.
    """

    def __init__(self, special: int, restore: bool, prop_attn: bool | None, last: int) -> None:
        self.special = special
        self.restore = restore
        self.prop_attn = prop_attn
        self.sized = bool(prop_attn)
        self.again = False
        self.last = last
        self.active = True
        self.capture = False
        self.grid: tuple[int, int] | None = None
        self._calls = 0
        self._seen: list[tuple[int, weakref.ref[Tensor]]] = []
        self.begin()

    def begin(self) -> None:
        """A forward begins: what an earlier one knew is dropped."""
        self.sizes: Tensor | None = None
        self.plans: dict[int, Plan] = {}
        if self.capture:
            self._calls += 1

    def keep(self, number: int, plan: Plan) -> None:
        """Notes the plan of a block where it will be asked for."""
        if self.restore or (self.capture and not torch.compiler.is_compiling()):
            self.plans[number] = plan

    def restored(self, tokens: Tensor, before: int | None = None) -> Tensor:
        """All tokens [B, L, C] of [B, L', C], by the plans of the latest forward, last block first.

        Args:
            tokens: as the last block left them, or as they came to block number `before`.
        """
        for number in sorted(self.plans, reverse=True):
            if before is None or number < before:
                tokens = self.plans[number].restore(tokens)
        return tokens

    def note(self, output: Tensor) -> None:
        """Remembers an output of the forward that runs, so that one of an earlier forward is known
        again; with `capture` alone.
        """
        if self.capture and not torch.compiler.is_compiling():
            self._seen = [(call, seen) for call, seen in self._seen if seen() is not None]
            self._seen.append((self._calls, weakref.ref(output)))

    def is_earlier(self, features: Tensor) -> bool:
        """Whether these were given by a forward before the latest one, as they are or as a view."""
        where = features.untyped_storage().data_ptr()
        found = [
            call
            for call, seen in self._seen
            if (one := seen()) is not None and one.untyped_storage().data_ptr() == where
        ]
        return bool(found) and max(found) < self._calls

    def __getstate__(self) -> dict[str, Any]:
        """Copies start without a forward."""
        return {**self.__dict__, "sizes": None, "plans": {}, "_seen": []}
