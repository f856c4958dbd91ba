"""What each form of merging costs the embedded UNet's output: the table behind the defaults, in a
minute or two.

    python -m benchmarks.merge_error

Noised latents of true pictures at four noise levels, conditional half only. Error is |with -
without| / |without| of the UNet's output, averaged. Kept is the share of the first level's tokens
(of its keys, for kv) that attention sees. Work is the share of that level's query-key pairs. Ratio
is the time of a forward without merging over one with it. Both are medians of interleaved runs on
this machine.
"""

import argparse
import json
from functools import partial

import numpy as np
import torch
from diffusers import StableDiffusionPipeline

from mame_sd import MaMeConfig, embedded_model_path, remove_mame
from mame_sd.diffusion.apply_denoiser import apply_mame
from mame_sd.embedded import model as subjects
from mame_sd.eval.timing import quartiles, timed

GRID: dict[str, object] = {
    "preset": "plain",
    "partition": "grid",
}  # the first token of each 2 x 2 cell, compared with all
SETTINGS: dict[str, dict[str, object]] = {
    "default": {},
    "kv keep .5": {"keep": 0.5},
    "kv keep .375": {"keep": 0.375},
    "kv keep .375, 2x2 cells": {"keep": 0.375, "stride": (2, 2)},
    "kv keep .125": {"keep": 0.125},
    "kv keep .25, averaged": {"keep": 0.25, "weights": "average"},
    "kv keep .25, tiles 4": {"keep": 0.25, "tiles": 4},
    "kv keep .25, tiles 8": {"keep": 0.25, "tiles": 8},
    "kv keep .25, global": {"keep": 0.25, "tiles": 0},
    "kv keep .25, not corrected": {"correct": False},
    "kv tau .8": {"tau": 0.8},
    "kv tau .6": {"tau": 0.6},
    "qkv keep .5, tiles 16": {"keep": 0.5, "merge": "qkv"},
    "qkv keep .5, alternating, global": {"keep": 0.5, "preset": "plain"},
    "qkv tau .6, grid": {"tau": 0.6, **GRID},
    "qkv tau .7, grid": {"tau": 0.7, **GRID},
    "qkv tau .8, grid": {"tau": 0.8, **GRID},
    "qkv tau .9, grid": {"tau": 0.9, **GRID},
    "plain: tau .7, alternating": {"tau": 0.7, "preset": "plain"},
    "plain: tau .8, alternating": {"tau": 0.8, "preset": "plain"},
    "plain: tau .8, not refined": {"tau": 0.8, "preset": "plain", "refine": False},
    "the printed equations, tau .8": {"tau": 0.8, "preset": "plain", "variant": "paper"},
}
TIMESTEPS = (900, 600, 300, 100)


def noised_inputs(
    pipe: StableDiffusionPipeline, images: int
) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
    """(latents [images, 4, 64, 64], timestep, text states) for each noise level."""
    names, backgrounds = (
        subjects.glyph_names()[:: len(subjects.glyph_names()) // images],
        list(subjects.BACKGROUNDS),
    )
    pairs = [(n, backgrounds[i % len(backgrounds)]) for i, n in enumerate(names[:images])]
    pixels = torch.stack(
        [torch.from_numpy(np.asarray(subjects.render(*p)).copy()) for p in pairs]
    ).permute(0, 3, 1, 2)
    latents = pipe.vae.encode(pixels.float() / 127.5 - 1).latents * pipe.vae.config.scaling_factor
    text, _ = pipe.encode_prompt([subjects.caption(*p) for p in pairs], "cpu", 1, False)
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
    return [
        (pipe.scheduler.add_noise(latents, noise, torch.tensor([t])), t, text) for t in TIMESTEPS
    ]


def run(pipe: StableDiffusionPipeline, inputs: list) -> tuple[list[torch.Tensor], list[float]]:
    outputs, seconds = [], []
    for latents, t, text in inputs:
        output, taken = timed(partial(pipe.unet, latents, t, text), pipe.device)
        outputs.append(output.sample)
        seconds.append(taken)
    return outputs, seconds


def measure(
    pipe: StableDiffusionPipeline, inputs: list, fields: dict[str, object]
) -> dict[str, float]:
    """One row of the table; the unmerged forward is timed again beside each merged one."""
    plain, before = run(pipe, inputs)
    config = MaMeConfig.from_dict(fields)
    handle = apply_mame(pipe, config)
    merged, after = run(pipe, inputs)
    level = handle.report().levels()[0]
    remove_mame(pipe)
    kept = level.tokens_kept / level.tokens_in
    error = float(
        np.mean([((m - p).norm() / p.norm()).item() for m, p in zip(merged, plain, strict=True)])
    )
    return {
        "kept": kept,
        "work": kept if config.merge == "kv" else kept**2,
        "error": error,
        "ratio": quartiles(before)[1] / quartiles(after)[1],
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=4)
    args = parser.parse_args()
    pipe = StableDiffusionPipeline.from_pretrained(embedded_model_path())
    inputs = noised_inputs(pipe, args.images)
    run(pipe, inputs[:1])
    results = {}
    print(
        "| method | kept | attention work | error | forward, times faster |\n|---|---|---|---|---|"
    )
    for name, fields in SETTINGS.items():
        row = results[name] = measure(pipe, inputs, fields)
        print(
            f"| {name} | {row['kept']:.2f} | {row['work']:.2f} | {row['error']:.3f} |"
            f" {row['ratio']:.2f} |",
            flush=True,
        )
    print(
        json.dumps(
            {
                "images": args.images,
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
