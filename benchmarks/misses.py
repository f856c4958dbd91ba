"""Where merging falls behind a smaller image: on which pictures, and in which blocks.

    mame-sd-eval features --model dinov2-saliency --data FOLDER --rows smaller,default --out OUT
    python -m benchmarks.misses --data FOLDER --features OUT

Pictures: those of OUT in thirds by how much their neighbouring patches differ. Then the gain of the
default over the smaller image in patches, and in how many pictures it is one. Blocks: every block
alone merges half of its tokens, `--num` pictures; what is lost in patches.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from mame_sd.cli.errors import exit_status
from mame_sd.errors import UserError
from mame_sd.eval.images import load_image
from mame_sd.eval.networks.pretrained import load_dinov2_saliency
from mame_sd.eval.perception.features import nearness, patch_of, view
from mame_sd.eval.perception.features_run import SaliencySource, cropped
from mame_sd.eval.perception.methods import Merged, Unmerged


def detail_of(pixels: torch.Tensor, patch: int) -> float:
    """How much neighbouring patches of pixels [1, 3, h, w] differ: the mean absolute difference of
    their means, in deviations of the pixels.
    """
    means = F.avg_pool2d(pixels, patch)
    steps = [
        (means[..., 1:, :] - means[..., :-1, :]).abs(),
        (means[..., 1:] - means[..., :-1]).abs(),
    ]
    return float(torch.cat([step.flatten() for step in steps]).mean())


def by_picture(rows: list[dict[str, Any]], details: np.ndarray) -> str:
    """A line for each share and third of the pictures."""
    lines = ["| FLOPs | pictures | default over smaller, patches | pictures where it is nearer |"]
    lines.append("|---|---|---|---|")
    order, names = details.argsort(), ("least detail", "between", "most detail")
    for share in sorted({row["share"] for row in rows}, reverse=True):
        own, other = (
            np.array(
                next(r for r in rows if (r["row"], r["share"]) == (name, share))["values"][
                    "patches"
                ]
            )
            for name in ("default", "smaller")
        )
        for name, part in zip(names, np.array_split(order, 3), strict=True):
            gain = (own - other)[part]
            lines.append(
                f"| {share:.0%} | {name} | {gain.mean():+.3f} | {(gain > 0).sum()} of {len(part)} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of pictures")
    add("--features", type=Path, required=True, help="folder of mame-sd-eval features")
    add("--num", type=int, default=8, help="pictures for the blocks")
    arguments = parser.parse_args()
    file = arguments.features / "features.json"
    if not file.is_file():
        raise UserError(
            f"--features: expected a folder that mame-sd-eval features made, found no {file}; give"
            " its --out"
        )
    results = json.loads(file.read_text())
    source = SaliencySource(load_dinov2_saliency())
    size, patch = tuple(results["about"]["size"]), patch_of(source.model)
    pictures = [
        cropped(load_image(arguments.data / name), size, source.mean, source.deviation)
        for name in results["files"]
    ]
    print(by_picture(results["rows"], np.array([detail_of(one, patch) for one in pictures])))
    some = pictures[: arguments.num]
    whole = [view(source, Unmerged(), one) for one in some]
    print("\n| block | tokens | class token lost | patches lost |\n|---|---|---|---|")
    for block in range(len(source.model.encoder.layer)):
        method = Merged((block,), {"keep": 0.5})
        near = [
            nearness(view(source, method, one), other)
            for one, other in zip(some, whole, strict=True)
        ]
        lost = {name: 1 - float(np.mean([one[name] for one in near])) for name in near[0]}
        print(f"| {block} | 50 % | {lost['class']:.3f} | {lost['patches']:.3f} |", flush=True)


if __name__ == "__main__":
    sys.exit(exit_status(main))
