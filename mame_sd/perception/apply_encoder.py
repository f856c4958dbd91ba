"""apply_encoder: merging in the blocks of a vision transformer, until `remove_encoder`.

    handle = apply_encoder(model)  # in every second block, about half of the FLOPs
    handle = apply_encoder(model, keep=0.9)  # nine tenths of the patches stay, in the mean
    handle = apply_encoder(model, tau=0.8, blocks=8)  # the paper's method, in the first 8 blocks
    logits = model(pixel_values).logits
    print(handle.report())  # tokens of each block, FLOPs before and after
    remove_encoder(model)  # bit-equal to before

Merged tokens stay merged: later blocks see fewer, and so does pooling by attention at the end.
Heads that are known to take a mean, and dense heads (depth, segmentation, backbones), are given all
tokens again (MaRe over all blocks; `restore`). `handle.restore` does the same afterwards.

Weights, `state_dict` and `save_pretrained` are untouched by merging. A `copy.deepcopy` merges with
its own weights. `torch.compile` makes one graph of a model that merges by `keep`; by `tau` the
number of tokens depends on the images, and merging itself runs between graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from mame_sd.config import MaMeConfig
from mame_sd.perception.handle import EncoderHandle
from mame_sd.perception.hooks import ours_on, put, take_all


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
    `remove_encoder`.

    Merging that is on it already is replaced. With neither `tau` nor `keep` given, the last block
    that merges leaves a quarter of the patches (where 3 or more merge). That is about half of the
    FLOPs. By `tau` they merge as in arXiv 2604.13432, "Integration for Visual Perception".

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


class _Opened:
    """A `with` block that is open."""

    def __init__(self, target: nn.Module) -> None:
        self.modules = {*target.modules()}
        self.before = [(module, one) for module in self.modules for one in ours_on(module)]


_OPENED: list[_Opened] = []  # the innermost last


@contextmanager
def encoder_restored(target: nn.Module) -> Iterator[None]:
    """Put back after the block what merged on `target` before it, whatever the block applied or
    removed.

    Blocks may be left in any order: what one applied goes when it is left, or stays in force where
    one that was opened later has replaced it.
    """
    mine = _Opened(target)
    _OPENED.append(mine)
    try:
        yield
    finally:
        place = _OPENED.index(mine)
        later = [one for one in _OPENED[place + 1 :] if one.modules & mine.modules]
        del _OPENED[place]
        if later:  # theirs is in force; after the next one ours has no business any more
            later[0].before = mine.before
        else:
            take_all(target, "mame")
            for module, one in mine.before:
                put(module, one)
