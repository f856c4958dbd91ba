"""Whether merging pays in a layer on the card that it runs on: reckoned from sizes alone, so
nothing waits for the card.

By default a layer is left whole where merging would not gain 3 %. Settings that were given are
obeyed, and the report says what was reckoned. On other devices, and on cards of which nothing is
known, layers merge as they are told to.
"""

from __future__ import annotations

import math
from operator import index
from typing import Any

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core import fused
from mame_sd.core.cards import Card, card_of
from mame_sd.core.costs import LEAST_GAIN, Call, Form, times_as_fast

# Settings that say what merges. With one of them given, merging is asked for and done.
_GIVEN = ("tau", "keep", "merge", "weights", "variant", "preset", "layers")
LEFT_UNMERGED = "left whole: {}"
NO_GAIN = "no gain reckoned on {}"


def leaves_open(config: MaMeConfig) -> bool:
    """Whether the settings leave it to us what merges."""
    return config.given.keys().isdisjoint(_GIVEN)


def no_gain(module: Any, config: MaMeConfig, feature: Tensor, context: int, early: bool) -> str:
    """Why merging wins nothing in a call; "" where it does, or nothing is known of it.

    Args:
        module: the attention.
        config: its settings.
        feature: its tokens that may merge [B, n, C], on a CUDA device.
        context: how many others attention sees too.
        early: keys are made of merged tokens, where they merge alone.
    """
    heads, keep = int(getattr(module, "heads", 0)), config.keep
    if keep is None or not heads:
        return ""
    batch, tokens, channels, context = map(index, (*feature.shape, context))
    destinations, queries = 1 / math.prod(config.stride), config.merge == "qkv"
    masked = keep > destinations + 1e-6 or (context > 0 and not early)
    form = (
        queries,
        early,
        config.weights,
        config.correct,
        fused.on(feature),
        masked and (config.correct or not queries),
    )
    sizes = batch, tokens, context, channels, int(getattr(module, "inner_dim", channels)), heads
    question = sizes, feature.dtype, max(keep, destinations), form, launched_from_python()
    return _reckoned(str(feature.device), *question)


def launched_from_python() -> bool:
    """Whether PyTorch launches kernel after kernel; else a compiled graph does, or a recorded
    one.
    """
    return not torch.compiler.is_compiling()


@torch.compiler.assume_constant_result
def _reckoned(
    device: str,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    share: float,
    form: tuple[Any, ...],
    eager: bool,
) -> str:
    """`no_gain` of a call; a compiled graph holds what it says and traces nothing of it."""
    card = card_of(device)
    return (
        ""
        if card is None or gains(card, sizes, dtype, share, form, eager)
        else NO_GAIN.format(card.name)
    )


def gains(
    card: Card,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    share: float,
    form: tuple[Any, ...],
    eager: bool,
) -> bool:
    """Whether merging gains enough on a card, or nothing is known of this form."""
    batch, tokens, context, channels, inner, heads = sizes
    call = Call(batch, tokens, context, channels, inner, heads, dtype)
    gain = times_as_fast(card, call, share, Form(*form), eager)
    return gain is None or gain >= LEAST_GAIN
