"""What a layer costs on a graphics card with and without merging: reckoned before anything is
computed.

The layer's products, and its attention over all tokens or over those that stay, are known from its
sizes. What merging adds, choosing tokens and giving back what they lose, is `ADDED`. It is read off
the library's own kernels. A test holds the two together.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from mame_sd.core.cards import LAUNCH, MEMORY, SMALLEST, Card, Work

LEAST_GAIN = 1.03  # times as fast: merging that gains less is left out


class Call(NamedTuple):
    """The call of a self-attention layer.

    Attributes:
        batch: samples.
        tokens: those that may merge.
        context: others that attention sees too.
        channels: of a token.
        inner: channels of all heads together.
        heads: how many there are.
        dtype: of the tokens.
    """

    batch: int
    tokens: int
    context: int
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
        queries: they merge too and are restored; else keys and values alone.
        early: keys and values are made of merged tokens; else they merge when they are made.
        weights: "best" or "pick", as in the settings.
        correct: what merged keys lack is given back, or whole tokens are counted.
        kernels: our own run (`mame_sd.core.fused`); else PyTorch's operations.
        masked: merged tokens count as often as they stand for tokens, which takes a mask. Text
            beside them needs that too, where keys merge late.
    """

    queries: bool
    early: bool
    weights: str = "best"
    correct: bool = True
    kernels: bool = True
    masked: bool = False


class Added(NamedTuple):
    """What merging adds to a layer.

    Attributes:
        small: kernels that take as long as the smallest.
        moved: bytes of all others, in those of the layer's tokens [B, L, C].
        launches: kernels in all.
    """

    small: int
    moved: float
    launches: int = 0


# Norms, rotary positions and copies in a layer that merges nothing, by whether keys merge early
# (UNets) or late.
UNMERGED: dict[bool, Added] = {True: Added(0, 1.9, launches=1), False: Added(0, 64.0, launches=32)}
# What merging adds. `python -m benchmarks.gpu_added` counts both.
ADDED: dict[Form, Added] = {
    Form(queries=False, early=True): Added(2, 6.2, launches=4),
    Form(queries=False, early=True, correct=False): Added(1, 1.9, launches=2),
    Form(queries=False, early=True, weights="pick", correct=False): Added(1, 0.2, launches=1),
    Form(queries=True, early=True): Added(5, 11.2, launches=9),
    Form(queries=False, early=False): Added(0, 6.6, launches=7),
    Form(queries=False, early=False, correct=False): Added(0, 1.9, launches=4),
    Form(queries=False, early=False, weights="pick", correct=False): Added(1, 0.0, launches=21),
    Form(queries=True, early=False): Added(6, 10.3, launches=33),
    Form(queries=False, early=True, kernels=False): Added(21, 20.7, launches=36),
    Form(queries=False, early=True, correct=False, kernels=False): Added(9, 7.9, launches=17),
    Form(queries=False, early=True, weights="pick", correct=False, kernels=False): Added(
        1, 0.2, launches=1
    ),
    Form(queries=True, early=True, kernels=False): Added(38, 54.6, launches=66),
    Form(queries=False, early=False, kernels=False): Added(8, 31.7, launches=55),
    Form(queries=False, early=False, correct=False, kernels=False): Added(4, 21.4, launches=35),
    Form(queries=False, early=False, weights="pick", correct=False, kernels=False): Added(
        1, 0.0, launches=21
    ),
    Form(queries=True, early=False, kernels=False): Added(44, 46.4, launches=95),
}


def work_of(call: Call, share: float = 1.0, form: Form | None = None) -> list[Work]:
    """The kernels of a layer that attends over all of its tokens, or over a `share` of them,
    without what merging adds.
    """
    kept, others = round(share * call.tokens), call.context
    queries = kept if form and form.queries else call.tokens
    keys = kept if form else call.tokens
    made = keys if form and form.early else queries
    return [
        _linear(call, queries + others, call.channels, call.inner),
        *[_linear(call, made + others, call.channels, call.inner)] * 2,
        _attention(call, queries + others, keys + others, form is not None and form.masked),
        _linear(call, queries + others, call.inner, call.channels),
    ]


@lru_cache(maxsize=4096)
def times_as_fast(
    card: Card, call: Call, share: float, form: Form, eager: bool = False
) -> float | None:
    """How many times as fast the layer is that merges to a `share` of its tokens; None: it is not
    known what that adds.

    Args:
        card: where it runs.
        call: the layer's call.
        share: tokens that stay, of all that may merge.
        form: how it merges.
        eager: kernels are launched from Python, and a layer takes no less than that takes.
    """
    added, unmerged = ADDED.get(form._replace(masked=False)), UNMERGED[form.early]
    if added is None:
        return None
    plain = card.busy(work_of(call)) + spent(card, call, unmerged)
    fewer = unmerged._replace(moved=share * unmerged.moved) if form.queries else unmerged
    merged = (
        card.busy(work_of(call, share, form)) + spent(card, call, fewer) + spent(card, call, added)
    )
    if eager:
        least = (len(work_of(call)) + unmerged.launches) * LAUNCH
        return max(plain, least) / max(merged, least + added.launches * LAUNCH)
    return plain / merged


def spent(card: Card, call: Call, added: Added) -> float:
    """Seconds of what is added to a layer."""
    moved = added.moved * call.batch * (call.tokens + call.context) * call.channels * call.size
    return added.small * SMALLEST + moved / (MEMORY * card.bandwidth)


def _linear(call: Call, tokens: int, given: int, made: int) -> Work:
    rows = call.batch * tokens
    moved = (rows * (given + made) + given * made) * call.size
    return Work("linear", "product", call.dtype, moved, 2.0 * rows * given * made)


def _attention(call: Call, queries: int, keys: int, masked: bool) -> Work:
    moved = call.batch * call.inner * 2 * (queries + keys) * call.size
    flops = 4.0 * call.batch * call.inner * queries * keys
    kind = "masked attention" if masked else "attention"
    return Work("attention", kind, call.dtype, moved, flops, width=call.inner // call.heads)
