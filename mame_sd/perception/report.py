"""Report the tokens and multiply-adds of every block of a merged vision transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from mame_sd.perception.counts import BlockCounts, flops_of
from mame_sd.perception.encoder_registry import Encoder
from mame_sd.report import LayerTokens, Report

_MEANS = ("tokens_in", "tokens_kept", "flops_before", "flops", "merging")


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
        flops = flops_of(block, spec, tokens, squares, kept) + merging
        totals = (tokens, kept, flops_of(block, spec, *whole), flops, merging)
        means = dict(zip(_MEANS, (total / max(calls, 1) for total in totals), strict=True))
        note = "" if count is None else count.note
        rows.append(BlockReport(name=name, **means, merged=count is not None, note=note))
        tokens, squares = kept, kept_squares
    return tuple(rows), calls
