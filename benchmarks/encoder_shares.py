"""Calibrated shares of a vision transformer's blocks beside equal and decreasing ones and ToMe's,
at equal FLOPs, on pictures that nothing was calibrated on.

    python -m benchmarks.photographs --out out/photographs
    python -m benchmarks.encoder_shares --data out/photographs
    python -m scripts.training.train_clip --work out/clip --draw out/clip/crowded --each 2
    python -m benchmarks.encoder_shares --model embedded-clip --data out/clip/crowded --size 256

The first half of the shuffled pictures calibrates (`--calibrate` of them), the second is measured,
each picture by itself, as `mame-sd-eval features` does. Writes a file of settings for each share,
`blocks-SHARE.json`, into --out; the measurements there make it resumable.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mame_sd.cli.errors import exit_status
from mame_sd.eval.images import load_image
from mame_sd.eval.networks.pretrained import SALIENCY, load_dinov2_saliency
from mame_sd.eval.perception import features_run as run
from mame_sd.eval.perception.data import open_images
from mame_sd.eval.perception.features import ROWS, Row
from mame_sd.eval.perception.methods import Merged
from mame_sd.perception.apply_encoder import apply_encoder, encoder_restored
from mame_sd.perception.calibration import SHARES, Measured
from mame_sd.runs.encoders import load_encoder
from mame_sd.runs.model_files import ModelChoice

NAME = "calibrated"
DEFAULT_ROWS = (NAME, "default", "constant", "tome", "tome-decreasing", "smaller")


def calibrated(source: Any, pictures: list[torch.Tensor], flops: float) -> Measured:
    """What calibration finds on pictures [1, 3, H, W] of one size."""
    with encoder_restored(source.model):
        return apply_encoder(source.model).calibrate(torch.cat(pictures), flops=flops)


def row_of(found: Measured) -> Row:
    """A row whose knob is the share of the FLOPs that calibration chooses for."""

    def method(flops: float, depth: int) -> Merged:
        return Merged(None, found.config(flops).to_dict(given_only=True))

    return Row("MaMe, calibrated", method, least=0.2, most=0.999)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=SALIENCY, help="encoder (default dinov2-saliency)")
    parser.add_argument("--data", type=Path, required=True, help="folder of pictures")
    parser.add_argument("--size", default="224", help="of the pictures in pixels (default 224)")
    parser.add_argument("--num", type=int, default=40, help="pictures measured (default 40)")
    parser.add_argument(
        "--calibrate", type=int, default=16, help="pictures that calibrate (default 16)"
    )
    parser.add_argument("--shares", default="0.6,0.45,0.37", help="of the unmerged model's FLOPs")
    parser.add_argument("--rows", help=f"default {','.join(DEFAULT_ROWS)}")
    parser.add_argument("--out", type=Path, help="default out/encoder-shares-MODEL")
    args = parser.parse_args()
    out = args.out or Path(f"out/encoder-shares-{args.model}")
    torch.set_num_threads(1)
    images = open_images(args.data)
    if args.model == SALIENCY:
        source: Any = run.SaliencySource(load_dinov2_saliency())
        identity: dict[str, Any] = {"name": SALIENCY}
    else:
        encoder = load_encoder(ModelChoice(model=args.model))
        source, identity = run.EncoderSource(encoder), encoder.identity
    size = run.parse_size(args.size)
    pictures = [
        run.cropped(load_image(images.folder / name), size, source.mean, source.deviation)
        for name in run.half_of(images, 1)[: args.calibrate]
    ]
    shares = run.parse_shares(args.shares)
    start = time.process_time()
    found = calibrated(source, pictures, shares[0])
    print(f"calibrated on {len(pictures)} pictures in {time.process_time() - start:.0f} s")
    print("| block |", " | ".join(f"{share:g}" for share in SHARES), "|")
    for name, errors in zip(found.names, found.errors, strict=True):
        print(f"| {name} |", " | ".join(f"{error:.4f}" for error in errors), "|")
    out.mkdir(parents=True, exist_ok=True)
    for share in shares:
        found.save(out / f"blocks-{share:g}.json", share)
        print(found.table(share))
    ROWS[NAME] = row_of(found)
    results = run.FeaturesRun(
        source=source,
        identity={**identity, "calibrated": np.round(found.errors, 9).tolist()},
        images=images,
        files=run.half_of(images, 2)[: args.num],
        size=size,
        shares=shares,
        rows=run.parse_rows(args.rows, DEFAULT_ROWS),
        out=out,
        on_note=print,
    ).run()
    print(run.table(results))
    about = [
        {name: row[name] for name in ("row", "share", "flops", "means")} for row in results["rows"]
    ]
    print(json.dumps({"benchmark": "encoder_shares", "model": args.model, "rows": about}))


if __name__ == "__main__":
    sys.exit(exit_status(main))
