"""What a method makes of one layer's cache: keys and values that stay, where they stand, and what
each one weighs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kept:
    """A shorter cache of one attention layer.

    Samples, and heads of a method of one's own, may keep different numbers of keys: they are padded
    to the largest one, and `real` says which slots hold a key.
    """

    keys: Tensor  # [B, H, K, D], rotated, H heads of keys
    values: Tensor  # [B, H, K, D]
    slots: Tensor  # LongTensor [B, H, K]: the token of the sequence at which each key stands
    bias: Tensor | None = (
        None  # [B, H, K], added to the logits of every query (log of a count or a mass); None: 0
    )
    real: Tensor | None = None  # bool [B, H, K]; None: every slot holds a key

    def __post_init__(self) -> None:
        shape = self.keys.shape[:3]
        parts = {"values": self.values, "slots": self.slots, "bias": self.bias, "real": self.real}
        for name, part in parts.items():
            if part is not None and part.shape[:3] != shape:
                raise ValueError(
                    f"{name}: expected [B, H, K] = {list(shape)} as keys have, got"
                    f" {list(part.shape[:3])}"
                )

    def real_keys(self) -> Tensor:
        """Bool [B, H, K]: which slots hold a key."""
        return torch.ones_like(self.slots, dtype=torch.bool) if self.real is None else self.real
