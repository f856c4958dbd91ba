"""Store one compressed layer of a transformers cache: it counts all tokens but stores fewer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicLayer

_PARTS = ("keys", "values", "slots", "bias", "real")


@dataclass(frozen=True)
class Kept:
    """The keys and values that one attention layer holds.

    Samples, and heads with a method of your own, may keep different numbers of keys. They are
    padded to the largest number, and `real` marks the slots that hold a key.
    """

    keys: Tensor  # [B, H, K, D], rotated, H heads of keys
    values: Tensor  # [B, H, K, D]
    slots: Tensor  # LongTensor [B, H, K]: index in the sequence of each key's token
    bias: Tensor | None = None  # [B, H, K], added to every query's logits; None is 0
    real: Tensor | None = None  # bool [B, H, K]: False at padding; None: all are real

    def real_keys(self) -> Tensor:
        """Return the slots that hold a key, bool [B, H, K]."""
        return torch.ones_like(self.slots, dtype=torch.bool) if self.real is None else self.real

    def head(self, index: int) -> Self:
        """Return one head of keys, [B, 1, K]."""
        parts = {name: getattr(self, name) for name in _PARTS}
        head: Any = {n: t if t is None else t[:, index, None] for n, t in parts.items()}
        return replace(self, **head)


class CompressedLayer(DynamicLayer):
    """A `DynamicLayer` whose first keys are those that a method kept; all later tokens follow.

    `get_seq_length` counts the tokens seen, so that later ones take the positions of the full
    sequence. The model makes masks as if no key were missing; `mask` selects the remaining keys
    from them.

    Args:
        kept: what stays of the first `seen` tokens.
        seen: number of tokens that `kept` stands for.
    """

    def __init__(self, kept: Kept, seen: int) -> None:
        super().__init__()
        self.lazy_initialization(kept.keys, kept.values)
        self.keys, self.values = kept.keys, kept.values
        self.slots = kept.slots.to(torch.int32)  # half the bytes
        self.bias, self.real = kept.bias, kept.real
        self.compressed = self.seen = seen
        self.masked = False  # True once `mask` has made the mask of the next tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, H, n, D], and return all that the layer holds.

        Raise ValueError outside of compress_cache, where nothing masks the removed keys.
        """
        new = key_states.shape[-2]
        if self.compressed:
            if not self.masked:
                raise ValueError(
                    "cache: this cache was compressed by compress_cache; use it inside"
                )
            self.masked = False
            self.slots, self.bias, self.real = self._longer(new)
        self.seen += new
        return super().update(key_states, value_states, *args, **kwargs)

    def _longer(self, new: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return slots, biases and real keys, extended by `new` tokens."""
        coming = torch.arange(self.seen, self.seen + new, device=self.slots.device)
        slots = torch.cat(
            [self.slots, coming.to(torch.int32).expand(*self.slots.shape[:2], -1)], -1
        )
        bias = None if self.bias is None else F.pad(self.bias, (0, new))
        return slots, bias, None if self.real is None else F.pad(self.real, (0, new), value=True)

    def get_seq_length(self, *args: Any) -> int:
        """Return the number of tokens seen, not of those stored."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return the size and offset of a mask over every token seen.

        transformers 5.0 passes positions instead of their number.
        """
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.seen + new, 0

    def mask(self, full: Tensor | None, new: int, heads: int, dtype: torch.dtype) -> Tensor | None:
        """Make the additive mask of tokens that are about to come.

        Args:
            full: the model's own mask over all tokens, bool or additive, [B, 1, new, seen + new].
                If None, causal.
            new: number of coming tokens.
            heads: number of heads of queries.
            dtype: dtype of the result.

        Returns:
            The mask [B, heads, new, K + new], or None if none is needed.
        """
        self.masked = True
        if full is None and new == 1 and self.bias is None and self.real is None:
            return None
        slots, bias, real = self._longer(new)
        slots = slots.long().unsqueeze(2)
        if full is None:
            mask = _additive(slots <= slots[:, :, :, -new:].transpose(2, 3), dtype)
        else:
            full = _additive(full, dtype).expand(*slots.shape[:2], -1, -1)
            mask = full.gather(3, slots.expand(-1, -1, new, -1))
        if bias is not None:
            mask = (mask + bias.unsqueeze(2).to(dtype)).clamp(min=torch.finfo(dtype).min)
        if real is not None:
            mask = mask.masked_fill(~real.unsqueeze(2), torch.finfo(dtype).min)
        return mask.repeat_interleave(heads // slots.shape[1], 1)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors that the layer holds."""
        parts = (getattr(self, name) for name in _PARTS)
        return sum(p.untyped_storage().nbytes() for p in parts if p is not None)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens, which must have come after the compression.

        `tokens_to_remove` is minus their number. If it is positive, as older versions of
        transformers pass it, it is the number of tokens of the sequence that stay.
        """
        count = -tokens_to_remove if tokens_to_remove <= 0 else self.seen - tokens_to_remove
        later = self.seen - self.compressed
        if count > later:
            raise ValueError(
                f"crop: expected at most the {later} tokens that came after the compression, got"
                f" {count}; generate without assistant_model and prompt_lookup_num_tokens"
            )
        if count > 0:
            self._each(lambda t: t[:, :, :-count])
            self.seen -= count

    def reset(self) -> None:
        """Empty the layer, which is compressed again after the next prompt."""
        self.keys = self.values = self.slots = None  # type: ignore[assignment]
        self.bias = self.real = None
        self.is_initialized = False
        self.compressed = self.seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each beam continue from the cache of the beam that it grew from."""
        self._each(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sample `repeats` times."""
        self._each(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the samples at these indices."""
        self._each(lambda t: t[indices])

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in _PARTS:
            part = getattr(self, name)
            if part is not None:
                setattr(self, name, change(part))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as numbers that are added to logits, and a mask of numbers unchanged."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
