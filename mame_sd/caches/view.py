"""Show a method its attention layer: the cache, the newest queries, attention weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mame_sd.caches.layer import Kept

BLOCK = 2**19  # logits that are computed together: 2 MiB of fp32, which fits CPU caches


@dataclass(frozen=True, kw_only=True)
class CacheView(Kept):
    """One attention layer's cache at the time of compression.

    B samples, H heads of queries, h heads of keys, L keys, Q queries, D features per head. Don't
    modify anything in place. Slots count the tokens of the sequence from its start, including
    padding; rotary positions may leave padding out. Keys [B, h, L, D], values, slots, biases of
    keys that were fitted before, and the mask of real keys are those of `Kept`.
    """

    hidden_states: Tensor  # [B, Q, C]: the layer's input at the newest Q tokens
    seen: int  # tokens of the sequence so far, padding included
    scale: float  # of the logits
    project: Callable[[Tensor], Tensor]  # inputs [B, N, C] to queries [B, H, N, D], not rotated
    rotate: Callable[[Tensor, Tensor], Tensor]  # x [B, H, N, D] to positions [B, N]
    tokens: Tensor  # bool [B, seen]: False at padding
    next: Tensor  # LongTensor [B]: the position of the next token
    softcap: float | None = None
    layer: int = 0  # its index in the model

    def counts(self) -> Tensor:
        """Return the number of tokens seen, without padding, LongTensor [B]."""
        return self.tokens.sum(1)

    def ranks(self) -> Tensor:
        """Return the number of tokens before each key, without padding, LongTensor [B, h, L]."""
        ranks = self.tokens.long().cumsum(1) - 1
        return ranks.unsqueeze(1).expand(-1, self.slots.shape[1], -1).gather(2, self.slots)

    def newest_queries(self, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the newest `count` queries, rotated, and their tokens.

        Args:
            count: if None, all queries at hand.

        Returns:
            Queries [B, H, N, D], and slots [N].
        """
        hidden = self.hidden_states if count is None else self.hidden_states[:, -count:]
        n = hidden.shape[1]
        later = self.tokens[:, -n:].long().flip(1).cumsum(1).flip(1)
        slots = torch.arange(self.seen - n, self.seen, device=self.keys.device)
        return self.rotate(self.project(hidden), self.next.unsqueeze(1) - later), slots

    def future_queries(self, count: int, ahead: int) -> tuple[Tensor, Tensor]:
        """Move the prompt's queries to future positions.

        Args:
            count: largest number of queries, evenly spaced over all at hand.
            ahead: number of positions over which they are spread evenly.

        Returns:
            Rotated queries [B, H, N, D], and bool [B, N], False at padding.
        """
        most, device = self.hidden_states.shape[1], self.keys.device
        real = self.tokens[:, -most:]
        at_hand = real.sum(1, keepdim=True)
        n = at_hand.clamp(min=1, max=count)
        each = torch.arange(min(count, most), device=device)
        # Evenly spaced over the tokens that aren't padding; the newest is among them.
        taken = ((each * at_hand + at_hand - 1) // n).clamp(min=0, max=most - 1)
        taken = (~real).to(torch.uint8).argsort(dim=1, stable=True).gather(1, taken)
        index = taken.unsqueeze(-1).expand(-1, -1, self.hidden_states.shape[-1])
        plain = self.project(self.hidden_states.gather(1, index))
        return self.rotate(plain, self.next.unsqueeze(1) + each * ahead // n), each < at_hand

    def logits(self, queries: Tensor, slots: Tensor | None = None) -> Tensor:
        """Compute attention logits in fp32.

        Args:
            queries: rotated queries, [B, H, Q, D].
            slots: LongTensor [Q], the token of each query, which attends to no later key. If None,
                the queries are future ones that attend to all keys.

        Returns:
            Logits [B, h, G, Q, L], -inf at keys that a query doesn't attend to.
        """
        keys = self.keys.to(wide(self.keys))
        b, h, _, d = keys.shape
        n = queries.shape[2]
        # Query heads that share a key head are adjacent.
        flat = queries.reshape(b, h, -1, d).to(keys.dtype) * self.scale
        x = (flat @ keys.transpose(-1, -2)).view(b, h, -1, n, keys.shape[2])
        if self.softcap is not None:
            x = torch.tanh(x / self.softcap) * self.softcap
        if self.bias is not None:
            x = x + self.bias[:, :, None, None].to(x.dtype)
        if self.real is not None:
            x = x.masked_fill(~self.real[:, :, None, None], -torch.inf)
        if slots is not None:
            x = x.masked_fill(self.slots[:, :, None, None] > slots.view(-1, 1), -torch.inf)
        return x

    def attention(self, queries: Tensor, slots: Tensor | None = None) -> Tensor:
        """Compute attention weights in fp32, [B, h, G, Q, L]; 0 for a query at padding."""
        weights = self.logits(queries, slots).softmax(-1)
        return weights if self.real is None else torch.nan_to_num(weights)

    def blocks(self, queries: Tensor) -> Iterator[slice]:
        """Yield slices of queries [B, H, Q, D] whose attention is computed together."""
        step = max(1, BLOCK // (queries.shape[0] * queries.shape[1] * self.slots.shape[2]))
        return (slice(i, i + step) for i in range(0, queries.shape[2], step))


def wide(t: Tensor) -> torch.dtype:
    """Return fp32, or the dtype of `t` if that is wider."""
    return torch.promote_types(t.dtype, torch.float32)
