"""FLOPs of vision transformers of real size, next to those that the paper prints.

    python -m benchmarks.encoders  # no weights, no images: on the meta device

FLOPs are multiply-adds for one image of 224 x 224, as `handle.report()` counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import ViTConfig, ViTForImageClassification

from mame_sd.eval.tables import markdown_table
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.perception.report import EncoderReport

HALVED = (3, 6, 9)  # the paper's layers, counted from 0


@dataclass(frozen=True)
class Architecture:
    """A ViT of the paper.

    Attributes:
        width: Channels.
        depth: Blocks.
        heads: Heads.
        patch: Side of a patch in pixels.
        printed: The paper's GFLOPs, unmerged.
        printed_halved: The paper's GFLOPs, halved at layers 3, 6 and 9.
        printed_last: The paper's GFLOPs, halved at the last layer.
    """

    width: int
    depth: int
    heads: int
    patch: int
    printed: float | None = None
    printed_halved: float | None = None
    printed_last: float | None = None


ARCHITECTURES = {
    "ViT-Ti": Architecture(192, 12, 3, 16, 1.3, 0.6, 1.2),
    "ViT-S": Architecture(384, 12, 6, 16, 4.6, 2.1, 4.1),
    "ViT-B": Architecture(768, 12, 12, 16, 17.6, 8.4, 16.0),
    "ViT-L": Architecture(1024, 24, 16, 16, 61.6),
    "ViT-H": Architecture(1280, 32, 16, 14, 167.4),
}


@torch.no_grad()
def counted(
    name: str,
    blocks: tuple[int, ...] | None = HALVED,
    keep: float | list[float] | None = 0.5,
) -> EncoderReport:
    """Report one image of 224 x 224 through the architecture `name`, merged in `blocks`."""
    one = ARCHITECTURES[name]
    config = ViTConfig(
        hidden_size=one.width,
        intermediate_size=4 * one.width,
        num_hidden_layers=one.depth,
        num_attention_heads=one.heads,
        patch_size=one.patch,
        image_size=224,
        num_labels=1000,
    )
    with torch.device("meta"):
        model = ViTForImageClassification(config).eval()
        each = [keep] * len(blocks) if isinstance(keep, float) and blocks else keep
        handle = apply_encoder(model, keep=each, blocks=blocks)
        model(torch.empty(1, 3, 224, 224))
    return handle.report()


def flops_table() -> str:
    """Return the paper's FLOPs and ours as Markdown.

    Ours are merged at layers counted from 0 and from 1, and by our default.
    """
    heads = (
        "GFLOPs | printed | counted | halved: printed | counted | merging too | from 1"
        " | last: printed | counted | default"
    )
    rows = []
    for name, one in ARCHITECTURES.items():
        reports = [
            counted(name, blocks)
            for blocks in (HALVED, tuple(block - 1 for block in HALVED), (-1,))
        ]
        alone = [report.flops - sum(block.merging for block in report.layers) for report in reports]
        ours = counted(name, blocks=None, keep=None).flops
        cells = (reports[0].flops_before, alone[0], reports[0].flops, *alone[1:], ours)
        before, after, whole, other, last, default = (f"{flops / 1e9:.2f}" for flops in cells)
        halved, ended = (
            "" if value is None else f"{value}" for value in (one.printed_halved, one.printed_last)
        )
        rows.append(
            (name, f"{one.printed}", before, halved, after, whole, other, ended, last, default)
        )
    return markdown_table(heads.split(" | "), rows)


if __name__ == "__main__":
    print(flops_table())
