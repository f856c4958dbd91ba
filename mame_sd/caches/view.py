"""What a method sees of one attention layer: its cache, the newest queries, and how attention
weighs keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheView:
    """One attention layer's cache when it is compressed.

    B samples, H heads of queries, h heads of keys, L keys, Q queries, D features of a head. Nothing
    here may be written to. Tokens count from the start of the sequence, padding included ("slots");
    rotary positions don't count left padding.
    """

    keys: Tensor  # [B, h, L, D], rotated
    values: Tensor  # [B, h, L, D]
    queries: Tensor  # [B, H, Q, D] of the newest Q tokens, rotated
    plain_queries: Tensor  # [B, H, Q, D], the same before the rotation
    hidden_states: Tensor  # [B, Q, C], what they were made from
    slots: Tensor  # LongTensor [B, h, L]: the token at which each key stands
    seen: int  # tokens of the sequence so far, padding included
    scale: float  # of the logits
    pads: Tensor  # LongTensor [B]: tokens of left padding
    rotate: Callable[
        [Tensor, Tensor], Tensor
    ]  # (x [B, H, N, D], positions [B, N]): x rotated to them
    bias: Tensor | None = None  # [B, h, L], of keys that were merged before
    real: Tensor | None = None  # bool [B, h, L]: False at padding
    softcap: float | None = None
    layer: int = 0
    layers: int = 1

    @property
    def groups(self) -> int:
        """Heads of queries that share a head of keys."""
        return self.queries.shape[1] // self.keys.shape[1]

    @property
    def query_slots(self) -> Tensor:
        """LongTensor [Q]: the token of each query."""
        return torch.arange(self.seen - self.queries.shape[2], self.seen, device=self.keys.device)

    @property
    def real_keys(self) -> Tensor:
        """Bool [B, h, L]: which keys are of tokens and not of padding."""
        return torch.ones_like(self.slots, dtype=torch.bool) if self.real is None else self.real

    def counts(self) -> Tensor:
        """LongTensor [B]: tokens seen without padding."""
        return self.seen - self.pads

    def grouped(self, queries: Tensor) -> Tensor:
        """Queries [B, H, Q, D] by the head of keys that they read: [B, h, G, Q, D]."""
        b, heads, n, d = queries.shape
        return queries.reshape(b, heads // self.groups, self.groups, n, d)

    def logits(self, queries: Tensor, slots: Tensor | None = None) -> Tensor:
        """Attention logits in fp32 [B, h, G, Q, L] of rotated queries [B, H, Q, D]; -inf where a
        key isn't seen.

        Args:
            slots: LongTensor [Q], the token of each query, which sees no later key; None: queries
                to come, which see all.
        """
        keys = self.keys.to(_wide(self.keys)).unsqueeze(2)
        x = self.grouped(queries).to(keys.dtype) @ keys.transpose(-1, -2) * self.scale
        if self.softcap is not None:
            x = torch.tanh(x / self.softcap) * self.softcap
        if self.bias is not None:
            x = x + self.bias[:, :, None, None].to(x.dtype)
        if self.real is not None:
            x = x.masked_fill(~self.real[:, :, None, None], -torch.inf)
        if slots is not None:
            later = self.slots[:, :, None, None] > slots.view(-1, 1)
            x = x.masked_fill(later, -torch.inf)
        return x

    def attention(self, queries: Tensor, slots: Tensor | None = None) -> Tensor:
        """Attention in fp32 [B, h, G, Q, L]; a query that sees no key (of padding) gives zeros."""
        found = self.logits(queries, slots).softmax(-1)
        return found if self.real is None else torch.nan_to_num(found)

    @property
    def block(self) -> int:
        """Queries whose attention is looked at at once, for memory: 64 MiB of fp32."""
        return max(1, 2**24 // (self.slots.shape[0] * self.slots.shape[2] * self.queries.shape[1]))

    def received(self, count: int | None = None) -> Tensor:
        """Attention that each key received from the newest `count` queries (None: all), summed: [B,
        h, G, L].
        """
        n = self.queries.shape[2] if count is None else min(count, self.queries.shape[2])
        queries, slots = self.queries[:, :, -n:], self.query_slots[-n:]
        total = self.keys.new_zeros(
            *self.keys.shape[:2], self.groups, self.keys.shape[2], dtype=_wide(self.keys)
        )
        for i in range(0, n, self.block):
            at = slice(i, i + self.block)
            total += self.attention(queries[:, :, at], slots[at]).sum(3)
        return total

    def to_come(self, count: int, ahead: int) -> tuple[Tensor, Tensor]:
        """The prompt's queries as if they stood at positions to come.

        Args:
            count: how many of them at most, evenly spaced over all at hand.
            ahead: they are spread evenly over so many positions.

        Returns:
            rotated queries [B, H, N, D], and bool [B, N], False where one is of padding.
        """
        most, device = self.plain_queries.shape[2], self.keys.device
        at_hand = (self.counts()).clamp(max=most).unsqueeze(1)  # [B, 1], without padding
        n = at_hand.clamp(max=count)
        each = torch.arange(min(count, most), device=device)
        taken = most - at_hand + (each * at_hand + at_hand - 1) // n  # the newest is among them
        taken = taken.clamp(max=most - 1)
        index = taken[:, None, :, None].expand(
            -1, self.plain_queries.shape[1], -1, self.plain_queries.shape[3]
        )
        places = self.counts().unsqueeze(1) + each * ahead // n
        return self.rotate(self.plain_queries.gather(2, index), places), each < n


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)
