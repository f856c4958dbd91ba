"""Count the tokens of every block of a merged vision transformer, and report its multiply-adds.

A block's linear layers cost the size of their weights for each token, and its attention costs two
products of all tokens by all tokens. Merging costs one product of destinations by sources and one
for the means, as on a GPU; a CPU adds tokens by index instead. Token counts and their squares are
summed as tokens pass, so that totals over calls are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import nn

from mame_sd.perception.encoder_registry import Encoder
from mame_sd.report import LayerTokens, Report, Sums

CONVOLUTIONS = nn.Conv2d, nn.Conv3d
_MEANS = ("tokens_in", "tokens_kept", "flops_before", "flops", "merging")


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


@dataclass(frozen=True, kw_only=True)
class BlockReport(LayerTokens):
    """One block: means over its calls since the last reset, for one image.

    Token counts include special tokens.

    Attributes:
        flops_before: multiply-adds without merging.
        flops: multiply-adds with merging.
        merging: the part of `flops` that merging itself takes.
        merged: True if the settings merge here.
        note: how the block merged differently from its settings, if it did.
    """

    flops_before: float
    flops: float
    merging: float
    merged: bool
    note: str = ""


@dataclass(frozen=True)
class EncoderReport(Report):
    """Report of every block of a vision transformer; `str(report)` is a table.

    FLOPs are multiply-adds of matrix products and convolutions for one image, as papers count them.
    They include the patch embedding, the blocks, and the model's own pooling and head.

    Attributes:
        layers: one report per block.
        calls: forwards since the last reset.
        flops_before: multiply-adds without merging.
        flops: multiply-adds with merging.
        prop_attn: True if attention adds the log of token sizes to its logits.
    """

    layers: tuple[BlockReport, ...]
    calls: int
    flops_before: float
    flops: float
    prop_attn: bool = False

    @property
    def share(self) -> float:
        """Return FLOPs with merging / FLOPs without, 1 before the first call."""
        return self.flops / self.flops_before if self.flops_before else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "share": self.share, **super().to_dict()}

    def __str__(self) -> str:
        width = max(len(block.name) for block in self.layers)
        lines = [f"{'block':<{width}}  tokens    kept   share  GFLOPs before  GFLOPs after  note"]
        for block in self.layers:
            lines.append(
                f"{block.name:<{width}}  {block.tokens_in:>6.0f}  {block.tokens_kept:>6.0f} "
                f" {block.share:>5.0%}  {block.flops_before / 1e9:>13.3f} "
                f" {block.flops / 1e9:>12.3f}  {block.note}".rstrip()
            )
        lines.append(
            f"{self.flops_before / 1e9:.2f} -> {self.flops / 1e9:.2f} GFLOPs (multiply-adds) an"
            f" image ({self.share:.0%}); attention"
            f" {'counts' if self.prop_attn else 'does not count'} how many tokens each one"
            " stands for"
        )
        return "\n".join(lines)


def block_reports(
    blocks: Mapping[str, nn.Module], spec: Encoder, counts: Mapping[int, BlockCounts]
) -> tuple[tuple[BlockReport, ...], int]:
    """Report every block.

    Args:
        blocks: the blocks by path, in order.
        spec: the description of their modules.
        counts: counters of the merging blocks by index.

    Returns:
        The reports, and the number of forwards that they average.
    """
    calls, tokens, squares, *_ = counts[min(counts)].totals()
    whole, rows = (tokens, squares, tokens), []
    for number, (name, block) in enumerate(blocks.items()):
        count = counts.get(number)
        *_, kept, kept_squares, merging = (tokens, squares, 0) if count is None else count.totals()
        flops = _flops_of(block, spec, tokens, squares, kept) + merging
        totals = (tokens, kept, _flops_of(block, spec, *whole), flops, merging)
        means = dict(zip(_MEANS, (total / max(calls, 1) for total in totals), strict=True))
        note = "" if count is None else count.note
        rows.append(BlockReport(name=name, **means, merged=count is not None, note=note))
        tokens, squares = kept, kept_squares
    return tuple(rows), calls


def _flops_of(block: nn.Module, spec: Encoder, tokens: int, squares: int, kept: int) -> int:
    """Return the multiply-adds of calls of a block, of which `kept` tokens reach the MLP."""
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
