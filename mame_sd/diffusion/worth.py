"""Whether merging pays in a layer on the card that it runs on: reckoned from sizes alone, so nothing waits for the card.

By default a layer is left whole where merging would not gain 3 %. Settings that were given are obeyed, and the report says
what was reckoned. On other devices, and on cards of which nothing is known, layers merge as they are told to.
"""

from __future__ import annotations

import math
from operator import index
from typing import TYPE_CHECKING, Any

import torch

from mame_sd.config import MaMeConfig
from mame_sd.core import fused
from mame_sd.core.cards import Card, card_of
from mame_sd.core.costs import WORTHWHILE, Call, Form, times_as_fast

if TYPE_CHECKING:
    from mame_sd.diffusion.layer import Route

# Settings that say what merges. With one of them given, merging is asked for and done.
_GIVEN = ("tau", "keep", "merge", "weights", "variant", "preset", "layers")
LEFT_WHOLE = "left whole: {}"
NO_GAIN = "no gain reckoned on {}"


def leaves_open(config: MaMeConfig) -> bool:
    """Whether the settings leave it to us what merges."""
    return config.given.keys().isdisjoint(_GIVEN)


def no_gain(route: Route, early: bool) -> str:
    """Why merging wins nothing in this call; "" where it does, or nothing is known of it.

    Args:
        route: the call, on a CUDA device.
        early: keys are made of merged tokens, where they merge alone.
    """
    config, feature, module = route.config, route.feature, route.call.module
    heads, keep = getattr(module, "heads", 0), config.keep
    if keep is None or not heads:
        return ""
    destinations = 1 / math.prod(config.stride)
    beside = index(route.before) + index(route.after)
    masked = keep > destinations + 1e-6 or (beside > 0 and not early)
    whole = config.merge == "qkv"
    kernels = fused.on(feature)
    form = whole, early, config.weights, config.correct, kernels, masked and (config.correct or not whole)
    batch, tokens, channels = map(index, feature.shape)
    inner = int(getattr(module, "inner_dim", channels))
    sizes = batch, tokens, beside, channels, inner, int(heads)
    question = sizes, feature.dtype, max(keep, destinations), form, launched_from_python()
    return _reckoned(str(feature.device), *question)


def launched_from_python() -> bool:
    """Whether PyTorch launches kernel after kernel; else a compiled graph does, or a recorded one."""
    return not torch.compiler.is_compiling()


@torch.compiler.assume_constant_result
def _reckoned(
    device: str, sizes: tuple[int, ...], dtype: torch.dtype, share: float, form: tuple[Any, ...], eager: bool
) -> str:
    """`no_gain` of a call; a compiled graph holds what it says and traces nothing of it."""
    card = card_of(device)
    return "" if card is None or gains(card, sizes, dtype, share, form, eager) else NO_GAIN.format(card.name)


def gains(
    card: Card, sizes: tuple[int, ...], dtype: torch.dtype, share: float, form: tuple[Any, ...], eager: bool
) -> bool:
    """Whether merging gains enough on a card, or nothing is known of this form."""
    batch, tokens, beside, channels, inner, heads = sizes
    call = Call(batch, tokens, beside, channels, inner, heads, dtype)
    gain = times_as_fast(card, call, share, Form(*form), eager)
    return gain is None or gain >= WORTHWHILE
