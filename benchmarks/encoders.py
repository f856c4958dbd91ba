"""FLOPs of vision transformers of real size, next to those that the paper prints.

    python -m benchmarks.encoders  # no weights, no images: on the meta device

FLOPs are multiply-adds for one image of 224 x 224, as `handle.report()` counts them.
"""

from __future__ import annotations

import torch
from transformers import ViTConfig, ViTForImageClassification

from mame_sd.eval.tables import markdown_table
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.perception.report import EncoderReport

HALVED = (3, 6, 9)  # the paper's layers, counted from 0


# Width, blocks, heads and side of a patch; the paper's GFLOPs: unmerged, halved at layers 3, 6 and
# 9, and halved at the last layer.
ARCHITECTURES: dict[str, tuple[int, int, int, int, float, float | str, float | str]] = {
    "ViT-Ti": (192, 12, 3, 16, 1.3, 0.6, 1.2),
    "ViT-S": (384, 12, 6, 16, 4.6, 2.1, 4.1),
    "ViT-B": (768, 12, 12, 16, 17.6, 8.4, 16.0),
    "ViT-L": (1024, 24, 16, 16, 61.6, "", ""),
    "ViT-H": (1280, 32, 16, 14, 167.4, "", ""),
}


@torch.no_grad()
def counted(name: str, blocks: tuple[int, ...] | None = HALVED) -> EncoderReport:
    """Report one image of 224 x 224 through the architecture `name`, halved in `blocks`.

    If `blocks` is None, it merges by our default.
    """
    width, depth, heads, patch, *_ = ARCHITECTURES[name]
    config = ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        patch_size=patch,
        image_size=224,
        num_labels=1000,
    )
    with torch.device("meta"):
        model = ViTForImageClassification(config).eval()
        handle = apply_encoder(model, keep=blocks and [0.5] * len(blocks), blocks=blocks)
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
    for name, (*_, printed, halved, ended) in ARCHITECTURES.items():
        first = tuple(block - 1 for block in HALVED)
        reports = [counted(name, blocks) for blocks in (HALVED, first, (-1,))]
        alone = [report.flops - sum(block.merging for block in report.layers) for report in reports]
        ours = counted(name, None).flops
        cells = (reports[0].flops_before, alone[0], reports[0].flops, *alone[1:], ours)
        before, after, whole, other, last, default = (f"{flops / 1e9:.2f}" for flops in cells)
        line = (name, printed, before, halved, after, whole, other, ended, last, default)
        rows.append([str(cell) for cell in line])
    return markdown_table(heads.split(" | "), rows)


if __name__ == "__main__":
    print(flops_table())
