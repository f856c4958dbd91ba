"""Vision transformers at real size, random weights: what merging takes off their FLOPs.

    python -m benchmarks.encoders --flops        # the table of docs/perception.md; no weights, no images: on the meta device

FLOPs are multiply-adds for one image of 224 x 224, as `handle.report()` counts them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from mame_sd.perception.apply import apply_encoder
from mame_sd.perception.report import EncoderReport

HALVED = (3, 6, 9)  # the paper's layers, counted from 0


@dataclass(frozen=True)
class Architecture:
    """A ViT of the paper, with the GFLOPs that it prints: unmerged, and halved at layers 3, 6 and 9."""

    width: int
    depth: int
    heads: int
    patch: int
    printed: float
    printed_halved: float | None = None


ARCHITECTURES = {
    "ViT-Ti": Architecture(192, 12, 3, 16, 1.3, 0.6),
    "ViT-S": Architecture(384, 12, 6, 16, 4.6, 2.1),
    "ViT-B": Architecture(768, 12, 12, 16, 17.6, 8.4),
    "ViT-L": Architecture(1024, 24, 16, 16, 61.6),
    "ViT-H": Architecture(1280, 32, 16, 14, 167.4),
}


def vit(name: str, side: int = 224, **overrides: Any) -> nn.Module:
    """The architecture `name` for images of `side` pixels, of 1000 classes, on the default device."""
    one = ARCHITECTURES[name]
    config = ViTConfig(
        hidden_size=one.width,
        intermediate_size=4 * one.width,
        num_hidden_layers=one.depth,
        num_attention_heads=one.heads,
        patch_size=one.patch,
        image_size=side,
        num_labels=1000,
        **overrides,
    )
    return ViTForImageClassification(config).eval()


@torch.no_grad()
def counted(
    name: str, blocks: tuple[int, ...] = HALVED, keep: float | list[float] = 0.5, side: int = 224
) -> EncoderReport:
    """The report of one image through the architecture `name`, merged in `blocks`."""
    with torch.device("meta"):
        model = vit(name, side)
        handle = apply_encoder(model, keep=keep, blocks=blocks)
        model(torch.empty(1, 3, side, side))
    return handle.report()


def flops_table() -> str:
    """Markdown: the paper's FLOPs and ours, merged at layers that are counted from 0 and from 1."""
    lines = [
        "| GFLOPs | printed | counted | halved, printed | halved, counted | with merging's own | blocks counted from 1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in ARCHITECTURES.items():
        first, second = counted(name), counted(name, tuple(block - 1 for block in HALVED))
        own, own_second = (sum(block.merging for block in report.blocks) for report in (first, second))
        halved = "" if one.printed_halved is None else f"{one.printed_halved}"
        cells = (first.flops_before, first.flops - own, first.flops, second.flops - own_second)
        before, after, whole, other = (f"{flops / 1e9:.2f}" for flops in cells)
        lines.append(f"| {name} | {one.printed} | {before} | {halved} | {after} | {whole} | {other} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoders", description=__doc__)
    parser.add_argument("--flops", action="store_true", required=True, help="the table of FLOPs")
    parser.parse_args()
    print(flops_table())


if __name__ == "__main__":
    main()
