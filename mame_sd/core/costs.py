"""What a layer costs on a graphics card with and without merging: reckoned before anything is computed.

The layer's products, and its attention over all tokens or over those that stay, are known from its sizes. What merging
adds, choosing tokens and giving back what they lose, is `ADDED`: read off the library's own kernels, and a test holds the
two together.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from mame_sd.core.cards import SMALLEST, Card, Work

WORTHWHILE = 1.03  # times as fast: merging that gains less is left out


class Call(NamedTuple):
    """The call of a self-attention layer.

    Attributes:
        batch: samples.
        tokens: those that may merge.
        beside: others that attention sees too.
        channels: of a token.
        inner: channels of all heads together.
        heads: how many there are.
        dtype: of the tokens.
    """

    batch: int
    tokens: int
    beside: int
    channels: int
    inner: int
    heads: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes of one number."""
        return self.dtype.itemsize


class Form(NamedTuple):
    """How a layer merges.

    Attributes:
        whole: queries merge too and are restored; else keys and values alone.
        early: keys and values are made of merged tokens; else they merge when they are made.
        weights: "best" or "pick", as in the settings.
        correct: what merged keys lack is given back, or whole tokens are counted.
        detail: restored tokens differ as their inputs do.
    """

    whole: bool
    early: bool
    weights: str = "best"
    correct: bool = True
    detail: bool = True


class Added(NamedTuple):
    """What merging adds to a layer.

    Attributes:
        small: kernels that take as long as the smallest.
        moved: bytes of all others, in those of the layer's tokens [B, L, C].
    """

    small: int
    moved: float


ADDED: dict[Form, Added] = {}


def work_of(call: Call, share: float = 1.0, form: Form | None = None) -> list[Work]:
    """The kernels of a layer that attends over all of its tokens, or over a `share` of them, without what merging adds."""
    kept = round(share * call.tokens)
    queries = kept if form and form.whole else call.tokens
    keys = kept if form else call.tokens
    made = keys if form and form.early else queries
    masked = form is not None and form.whole and form.correct and call.beside > 0
    others = call.beside
    return [
        _linear(call, queries + others, call.channels, call.inner),
        *[_linear(call, made + others, call.channels, call.inner)] * 2,
        _attention(call, queries + others, keys + others, masked),
        _linear(call, queries + others, call.inner, call.channels),
    ]


@lru_cache(maxsize=4096)
def times_as_fast(card: Card, call: Call, share: float, form: Form) -> float | None:
    """How many times as fast the layer is that merges to a `share` of its tokens; None: it is not known what that adds."""
    added = ADDED.get(form)
    if added is None:
        return None
    moved = added.moved * call.batch * call.tokens * call.channels * call.size
    overhead = added.small * SMALLEST + card.seconds(Work("added", "other", call.dtype, moved, 0))
    return card.busy(work_of(call)) / (card.busy(work_of(call, share, form)) + overhead)


def _linear(call: Call, tokens: int, given: int, made: int) -> Work:
    rows = call.batch * tokens
    moved = (rows * (given + made) + given * made) * call.size
    return Work("linear", "product", call.dtype, moved, 2.0 * rows * given * made)


def _attention(call: Call, queries: int, keys: int, masked: bool) -> Work:
    moved = call.batch * call.inner * 2 * (queries + keys) * call.size
    flops = 4.0 * call.batch * call.inner * queries * keys
    kind = "masked attention" if masked else "attention"
    return Work("attention", kind, call.dtype, moved, flops, width=call.inner // call.heads)
