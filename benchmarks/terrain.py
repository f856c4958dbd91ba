"""Measure what attention over fewer keys costs a published model of others: PSNR per method.

    python -m benchmarks.terrain --draws 4
    python -m benchmarks.terrain --only fitted --maps 4 --draws 4

Nine layers of 1,024 tokens (of maps of 128 x 128) attend over fewer keys. Each draw has its own
maps and its own destinations; figures are means over draws, plus or minus their standard error.
PSNR is to the unmerged maps, of maps in -1..1; slope and roughness are relative errors. Whole
tokens don't merge in this class of models, so there is no row of the paper's method.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import decibels, parser_of
from benchmarks.attention import without_bias
from mame_sd import MaMeConfig, apply_mame
from mame_sd.eval.networks.terrain_unet import (
    Terrain,
    load_terrain,
    roughness,
    slope,
    terrain_noise,
)
from mame_sd.eval.rivals.method import Rival
from mame_sd.eval.rivals.plans import means, random_cells, random_keys, strided, todo

On = Callable[[Terrain, int], AbstractContextManager[object]]  # (model, seed of the draw)
SHARES = {"1/2": 1 / 2, "1/4": 1 / 4, "1/8": 1 / 8, "1/16": 1 / 16}


def ours(kernel: Any = None, **fields: object) -> On:
    """Return a row that merges as `apply_mame` does with these fields."""

    def on(model: Terrain, seed: int) -> AbstractContextManager[object]:
        config = MaMeConfig.from_dict({"seed": seed, "min_tokens": 1024, **fields})
        return apply_mame(model.unet, config, kernel=kernel)

    return on


def rival(make: Any, fit_queries: int = 0, **settings: Any) -> On:
    """Return a row of a rival of `mame_sd.eval.rivals`, made with `settings`."""
    method = Rival("", make, settings, fit_queries=fit_queries)
    return lambda model, seed: method.on(model.unet, seed)


def rows() -> dict[str, On]:
    """Return what is measured, by its name in the table."""
    every: dict[str, On] = {}
    for name, keep in SHARES.items():
        random = partial(rival, random_keys, share=keep)
        every |= {
            f"{name} merged and fitted": ours(keep=keep),
            f"{name} merged and fitted, kernel without bias": ours(without_bias, keep=keep),
            f"{name} merged, not fitted": ours(keep=keep, fit_queries=0),
            f"{name} random keys, fitted": random(fit_queries=64),
            f"{name} random keys": random(),
        }
    return {
        **every,
        "means of 2 x 2, fitted": rival(means, fit_queries=64, cell=(2, 2)),
        "means of 2 x 2": rival(means, cell=(2, 2)),
        "one of each 2 x 2 at random": rival(random_cells, cell=(2, 2)),
        "ToDo: the first of each 2 x 2": rival(todo, factor=2),
        "every second key": rival(strided, cell=(1, 2)),
    }


def compared(got: Tensor, want: Tensor) -> list[float]:
    """Return PSNR, and relative errors of slope and roughness in per cent, means over maps."""
    errors = [100 * (of(got) / of(want) - 1).abs().mean().item() for of in (slope, roughness)]
    return [decibels(got, want).mean().item(), *errors]


def said(values: Sequence[float]) -> str:
    """Format a mean with its standard error."""
    mean = statistics.fmean(values)
    if not math.isfinite(mean) or len(values) == 1:
        return f"{mean:.1f}"
    return f"{mean:.1f} +- {statistics.stdev(values) / len(values) ** 0.5:.1f}"


@torch.inference_mode()
def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", help="rows whose names have one of these in them")
    parser.add_argument("--maps", type=int, default=8, help="of each draw (default 8)")
    parser.add_argument("--draws", type=int, default=10, help="(default 10)")
    args = parser.parse_args()
    model = load_terrain()
    inputs = [terrain_noise(seed, args.maps) for seed in range(args.draws)]
    wanted = [model.denoise(noisy, 80, difficulty) for noisy, difficulty in inputs]
    print("| keys | PSNR, dB | lowest, highest draw | slope, % | roughness, % |")
    print("|---|---|---|---|---|")
    for name, on in rows().items():
        if args.only and not any(part in name for part in args.only):
            continue
        figures = []
        for seed, ((noisy, difficulty), want) in enumerate(zip(inputs, wanted, strict=True)):
            with on(model, seed):
                figures.append(compared(model.denoise(noisy, 80, difficulty), want))
        psnr, *errors = zip(*figures, strict=True)
        print(
            f"| {name} | {said(psnr)} | {min(psnr):.0f}, {max(psnr):.0f} |"
            f" {' | '.join(f'{statistics.fmean(part):.3f}' for part in errors)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
