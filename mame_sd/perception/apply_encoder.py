"""Apply merging to the blocks of a vision transformer, and remove it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from mame_sd.config import MaMeConfig
from mame_sd.perception.handle import EncoderHandle
from mame_sd.perception.hooks import ours_on, take_all


def apply_encoder(
    target: nn.Module,
    config: MaMeConfig | None = None,
    *,
    blocks: int | Iterable[int] | None = None,
    restore: bool | None = None,
    prop_attn: bool | None = None,
    **fields: Any,
) -> EncoderHandle:
    """Merge tokens between attention and MLP in blocks of a vision transformer.

    Later blocks compute fewer tokens (arXiv 2604.13432, "Integration for Visual Perception").
    Merging that is already on the model is replaced; `remove_encoder` removes it.

    If neither `tau` nor `keep` is given, the last merging block leaves a quarter of the patches (if
    3 or more blocks merge), and about half of the FLOPs remain.

    Args:
        target: a model that contains one registered vision transformer
            (`mame_sd.perception.encoder_registry`).
        config: settings. Only the fields that were set explicitly count; `blocks` is not among
            them.
        blocks: number of blocks that merge, counted from the first, or their indices (-1 is the
            last). If None, all blocks but the first merge, and all blocks with `tau`.
        restore: if True, the model's output contains all tokens again, so that means and pooling
            weight each token by its size; dense heads always read all tokens. If None, True for
            models whose head takes a mean.
        prop_attn: if True, add the log of each token's size to its attention logits (ToMe's
            proportional attention) in all blocks after the first merging one, and weight later
            means by size. Needs the attention implementation eager or sdpa. If None, True where the
            model's attention supports it (see `handle.prop_attn`), but never with `tau`.
        fields: fields of MaMeConfig, which override those of `config`. A single `keep` is the mean
            over the merging blocks, of which the first merge most; `tau` and `keep` may also hold
            one number for each block.

    Returns:
        The handle that changes, reports and removes this merging.

    Raises:
        TypeError: `config` is not a MaMeConfig.
        ValueError: no vision transformer can merge, there is more than one, or a setting
            is invalid.
    """
    handle = EncoderHandle(target, config, blocks, fields, restore, prop_attn)
    handle.install()
    return handle


def remove_encoder(target: nn.Module) -> None:
    """Remove all merging from the vision transformers in `target`, if there is any."""
    take_all(target)


def has_encoder_hooks(target: nn.Module) -> bool:
    """Return True if a vision transformer in `target` has merging on it, active or not."""
    return any(ours_on(module) for module in target.modules())
