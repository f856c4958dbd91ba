"""Count tokens per block and derive multiply-adds from them.

A block's linear layers cost the size of their weights for each token, and its attention costs two
products of all tokens by all tokens. Merging costs one product of destinations by sources and one
for the means, as on a GPU; a CPU adds tokens by index instead. Token counts and their squares are
summed as tokens pass, so that totals over calls are exact.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from mame_sd.perception.encoder_registry import Encoder
from mame_sd.report import Sums

CONVOLUTIONS = nn.Conv2d, nn.Conv3d


class BlockCounts(Sums):
    """Sums over the calls of one merging block since the last `reset`.

    They are calls, tokens in, their squares, tokens kept, their squares, and multiply-adds of
    merging itself for one image. Token counts include prefix tokens.

    Attributes:
        note: how the latest call merged differently from the settings, if it did.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(6, device)

    def reset(self, device: torch.device | None = None) -> None:
        """Set all sums to zero; compiled regions will count on `device`."""
        super().reset(device)
        self.note = ""

    def count_call(self, tokens: int, kept: int, merging: int, note: str = "") -> None:
        """Count one call.

        Args:
            tokens: tokens in.
            kept: tokens kept.
            merging: multiply-adds of merging itself for one image.
            note: how the call merged differently from the settings.
        """
        self.note = note
        self.add(1, tokens, tokens * tokens, kept, kept * kept, merging)


def flops_of(block: nn.Module, spec: Encoder, tokens: int, squares: int, kept: int) -> int:
    """Return the multiply-adds of calls of a block, with its modules as they are now.

    Args:
        block: the block.
        spec: the description of its modules.
        tokens: sum of tokens over calls.
        squares: sum of their squares.
        kept: sum of the tokens that reach the MLP.
    """
    attention = sum(weights_of(block.get_submodule(part)) for part in spec.attention)
    mlp = sum(weights_of(block.get_submodule(part)) for part in spec.mlp)
    return attention * tokens + 2 * width_of(block, spec) * squares + mlp * kept


def width_of(block: nn.Module, spec: Encoder) -> int:
    """Return the number of channels of all heads of a block's attention together."""
    if spec.keys in dict(block.named_modules()):
        keys = cast(Any, block.get_submodule(spec.keys or ""))
        return int(keys.out_features) // (3 if spec.joined else 1)
    linear = linear_layers(block.get_submodule(spec.attention[1]))
    return int(linear[-1].in_features) if linear else 0


def around_blocks(
    model: nn.Module,
    blocks: list[nn.Module],
    patches: int,
    before: float,
    after: float,
) -> float:
    """Return the multiply-adds of a model for one image outside of its blocks.

    These are the patch embedding, pooling, and the model's own head.

    Args:
        model: the vision transformer.
        blocks: its blocks.
        patches: number of patches that its convolution makes.
        before: tokens before the first block.
        after: tokens after the last block.
    """
    inside = {part for block in blocks for part in block.modules()}
    linear = set(linear_layers(model))
    total = 0.0
    for name, part in model.named_modules():
        if part in inside:
            continue
        if isinstance(part, CONVOLUTIONS):
            total += part.weight.numel() * patches
        elif isinstance(part, nn.MultiheadAttention):  # one query
            total += part.in_proj_weight.numel() / 3 * (1 + 2 * after) + 2 * part.embed_dim * after
        elif part in linear:
            tokens = {"patch_embedding": before, "kv": after}.get(name.rpartition(".")[2], 1)
            total += weights_of(part) * tokens
            if name.endswith(".kv"):
                total += part.out_features * after  # its products: timm's pooling by attention
        resize = getattr(part, "resize_positional_embeddings", None)
        if resize is not None and "interpolate" not in resize.__code__.co_names:
            total += part.position_embedding.weight.numel() * before  # a product from 5.24 on
    return total


def linear_layers(module: nn.Module) -> list[Any]:
    """List the linear layers in `module`, including quantised ones and those inside of adapters."""
    like = [part for part in module.modules() if hasattr(part, "in_features")]
    # Adapters name the sizes of what they wrap, convolutions too.
    wrapped = {*like, *(part for part in module.modules() if isinstance(part, CONVOLUTIONS))}
    wrappers = {part for part in like if not wrapped.isdisjoint([*part.modules()][1:])}
    return [part for part in like if part not in wrappers and hasattr(part, "out_features")]


def weights_of(module: nn.Module) -> int:
    """Return the number of weights of the linear layers in `module`: multiply-adds per token."""
    return sum(int(part.in_features) * int(part.out_features) for part in linear_layers(module))
