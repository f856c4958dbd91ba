"""apply_encoder: merging in the blocks of a vision transformer, until `remove_encoder`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn

from mame_sd.config import MaMeConfig
from mame_sd.perception.handle import EncoderHandle
from mame_sd.perception.hooks import Placed, ours_on, put, take_all


def apply_encoder(
    target: nn.Module,
    config: MaMeConfig | None = None,
    *,
    blocks: int | Iterable[int] | None = None,
    restore: bool | None = None,
    prop_attn: bool | None = None,
    **fields: Any,
) -> EncoderHandle:
    """Merges tokens between attention and MLP in blocks of a vision transformer, until
    `remove_encoder`. Later blocks see fewer (arXiv 2604.13432, "Integration for Visual
    Perception").

    Merging that is on it already is replaced. With neither `tau` nor `keep` given, the last block
    that merges leaves a quarter of the patches (where 3 or more merge), and about half of the FLOPs
    are left.

    Args:
        target: a model that holds one vision transformer that is known
            (`mame_sd.perception.known_encoders`).
        config: the settings; of its fields only those that were given count. It does not hold
            `blocks`.
        blocks: how many blocks merge, from the first; or which ones, counted from 0 (-1 is the
            last). None: every second one from 0 on, but all by `tau`.
        restore: give the model's output all of its tokens again, so that means and pooling count
            what each stands for; and hidden states that dense heads read. None: where a head is
            known to take a mean or to be dense.
        prop_attn: add the log of how many tokens each one stands for to its attention logits
            (ToMe's proportional attention). This holds in all blocks after the first merging. Those
            that merge again take means over all of these tokens. Attention implementations eager
            and sdpa only. None: where the model's attention can take it (`handle.prop_attn` says),
            but not by `tau`.
        fields: fields of MaMeConfig over those of `config`. One `keep` is the mean over the blocks
            that merge, of which the first ones merge most; `tau` and `keep` may be one number for
            each block.

    Raises:
        TypeError: `config` is no MaMeConfig.
        ValueError: no vision transformer that can merge, more than one, or bad settings.
    """
    handle = EncoderHandle(target, config, blocks, fields, restore, prop_attn)
    handle.install()
    return handle


def remove_encoder(target: nn.Module) -> None:
    """Takes all merging off the vision transformers in `target`. Does nothing if there is none."""
    take_all(target)


def has_encoder_hooks(target: nn.Module) -> bool:
    """Tell whether any merging is on a vision transformer in `target`, active or not."""
    return any(ours_on(module) for module in target.modules())


# What each block of `encoder_restored` that is open found on each module; the innermost last.
_OPENED: list[dict[nn.Module, list[Placed]]] = []


@contextmanager
def encoder_restored(target: nn.Module) -> Iterator[None]:
    """Put back after the block what merged on `target` before it, whatever the block applied or
    removed.

    Blocks may be left in any order: what one applied goes when it is left, or stays in force where
    one that was opened later has replaced it.
    """
    before = {module: ours_on(module) for module in target.modules()}
    _OPENED.append(before)
    try:
        yield
    finally:
        place = next(place for place, one in enumerate(_OPENED) if one is before)
        del _OPENED[place]
        later = (one for one in _OPENED[place:] if one.keys() & before.keys())
        if (inner := next(later, None)) is not None:  # theirs is in force until it is left
            inner.update({module: before.get(module, []) for module in target.modules()} | before)
        else:
            take_all(target, "mame")
            for placed in chain.from_iterable(before.values()):
                put(*placed)
