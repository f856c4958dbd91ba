"""What attention over fewer keys costs a published diffusion model that nobody here trained: PSNR
to its unmerged maps, a row for each form.

    python -m benchmarks.terrain                    # every row, sigma 80
    python -m benchmarks.terrain --sigma 0.4        # the last bit of noise instead of all
    python -m benchmarks.terrain --only fit --maps 4 --draws 4
    python -m benchmarks.terrain --time --side 256  # CPU seconds too, on larger maps

Nine layers of 1,024 tokens (of maps of 128 x 128) attend over fewer keys. Each draw has its own
maps and its own destinations; figures are means over draws, plus or minus their standard error.
PSNR is of maps in -1..1; slope and roughness are relative errors. Below sigma 80 the noise stands
on the model's own maps. Times are those of the whole UNet, each beside the unmerged one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import forms
from benchmarks.forms import Attend, Draw, Fit, InDtype, Merged, Picked, Tomesd
from mame_sd import MaMeConfig, mame
from mame_sd.eval.networks.terrain import (
    Terrain,
    attending,
    load_terrain,
    roughness,
    slope,
)

On = Callable[[Terrain, int], AbstractContextManager[object]]  # (model, seed of the draw)
SHARES = {"1/2": 1 / 2, "1/4": 1 / 4, "1/8": 1 / 8, "1/16": 1 / 16}


@contextmanager
def attended(form: Attend, model: Terrain, seed: int) -> Iterator[None]:
    """`model` with `form` in its layers, which see their own input in the `Draw`."""
    draw = Draw.of(seed)

    def note(module: object, args: object, output: Tensor) -> None:
        draw.tokens = output.transpose(1, 2)

    noted = [layer.group_norm.register_forward_hook(note) for layer in model.attentions()]  # type: ignore[union-attr]
    try:
        with attending(model, lambda q, k, v, grid: form(q, k, v, grid, draw)):
            yield
    finally:
        for hook in noted:
            hook.remove()


def library(model: Terrain, seed: int, **fields: object) -> AbstractContextManager[object]:
    """What `apply_mame` does with these fields."""
    return mame(model.unet, MaMeConfig.from_dict({"seed": seed, "min_tokens": 1024, **fields}))


@contextmanager
def without_bias(model: Terrain, seed: int, **fields: object) -> Iterator[None]:
    """The library in front of a kernel that takes no bias, as FlashAttention and SageAttention."""
    own = F.scaled_dot_product_attention

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **more: Any
    ) -> Tensor:
        if attn_mask is not None:
            raise ValueError("attn_mask: expected None, got a tensor")
        return own(query, key, value, **more)

    F.scaled_dot_product_attention = kernel
    try:
        with library(model, seed, **fields):
            yield
    finally:
        F.scaled_dot_product_attention = own


def rows() -> dict[str, On]:
    found: dict[str, Attend] = {
        "unmerged": forms.exact,
        "unmerged, fp16": InDtype(forms.exact, torch.float16),
        "unmerged, bf16": InDtype(forms.exact, torch.bfloat16),
        "even attention": forms.even,
        "every second key": Picked(1 / 2, "second"),
        "ToDo: first of each 2 x 2": Picked(1 / 4, "first"),
        "tomesd's form .5": Tomesd(1 / 2),
    }
    for name, keep in SHARES.items():
        found |= {
            f"{name} random keys": Picked(keep),
            f"{name} random keys, fit 64": Picked(keep, fit=Fit(64)),
            f"{name} one of each cell": Picked(keep, "cells"),
            f"{name} means of cells": Merged(keep, by="means"),
            f"{name} means of cells, fit 64": Merged(keep, Fit(64), by="means"),
            f"{name} plan": Merged(keep),
            f"{name} plan, fit 64": Merged(keep, Fit(64)),
            f"{name} plan, fit 128": Merged(keep, Fit(128)),
            f"{name} plan, not counted": Merged(keep, counted=False),
            f"{name} plan, not counted, fit 64": Merged(keep, Fit(64), counted=False),
            f"{name} plan, none alone, fit 64": Merged(keep, Fit(64), alone=0),
            f"{name} plan, by cosine, none alone, fit 64": Merged(
                keep, Fit(64), near="cosine", alone=0
            ),
        }
    made: dict[str, On] = {name: partial(attended, form) for name, form in found.items()}
    for name, keep in SHARES.items():
        made[f"{name} keep= of the library"] = partial(library, keep=keep)
        made[f"{name} keep=, kernel without bias"] = partial(without_bias, keep=keep)
    made["the paper's form, tau 0.8"] = partial(library, tau=0.8)
    return made


def drawn_inputs(
    model: Terrain, seed: int, maps: int, side: int, sigma: float
) -> tuple[Tensor, Tensor]:
    """Noisy maps [maps, 1, side, side] and their difficulties [maps] of one draw."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(maps, 1, side, side, generator=generator)
    difficulty = torch.rand(maps, generator=generator)
    if sigma == 80:
        return 80 * noise, difficulty
    clean = model.denoise(80 * noise, 80, difficulty)
    return clean + sigma * torch.randn(noise.shape, generator=generator), difficulty


def compared(got: Tensor, want: Tensor) -> list[float]:
    """PSNR, and relative errors of slope and roughness, means over maps."""
    psnr = 10 * torch.log10(4 / (got - want).square().flatten(1).mean(1))
    errors = [(of(got) / of(want) - 1).abs().mean().item() for of in (slope, roughness)]
    return [psnr.mean().item(), *errors]


def row(
    model: Terrain, on: On, inputs: list[tuple[Tensor, Tensor]], wanted: list[Tensor], sigma: float
) -> list[list[float]]:
    """PSNR, slope and roughness of each draw."""
    found = []
    for seed, ((noisy, difficulty), want) in enumerate(zip(inputs, wanted, strict=True)):
        with on(model, seed):
            found.append(compared(model.denoise(noisy, sigma, difficulty), want))
    return found


def ratios(model: Terrain, on: On, inputs: tuple[Tensor, Tensor], rounds: int) -> list[float]:
    """Seconds of the unmerged model over those of the row, of interleaved rounds."""
    found = []
    for number in range(rounds + 1):
        taken = []
        for one in (partial(attended, forms.exact), on):
            with one(model, number):
                began = time.process_time()
                model.denoise(inputs[0], 80, inputs[1])
                taken.append(time.process_time() - began)
        found.append(taken[0] / taken[1])
    return found[1:]  # the first one warmed up


def said(values: list[float]) -> str:
    mean = statistics.fmean(values)
    if not math.isfinite(mean) or len(values) == 1:
        return f"{mean:.1f}"
    return f"{mean:.1f} +- {statistics.stdev(values) / len(values) ** 0.5:.1f}"


def percent(values: list[float]) -> str:
    return f"{100 * statistics.fmean(values):.3f}"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="rows whose names have one of these in them")
    parser.add_argument("--rows", nargs="+", help="rows of exactly these names")
    parser.add_argument("--maps", type=int, default=8, help="of each draw (default 8)")
    parser.add_argument("--draws", type=int, default=10, help="(default 10)")
    parser.add_argument("--side", type=int, default=128, help="of a map (default 128)")
    parser.add_argument("--sigma", type=float, default=80.0, help="(default 80)")
    parser.add_argument("--time", type=int, default=0, help="rounds of timing (default none)")
    args = parser.parse_args()
    model = load_terrain()
    inputs = [
        drawn_inputs(model, seed, args.maps, args.side, args.sigma) for seed in range(args.draws)
    ]
    wanted = [model.denoise(noisy, args.sigma, difficulty) for noisy, difficulty in inputs]
    results: dict[str, Mapping[str, object]] = {}
    print(
        "| keys | PSNR, dB | lowest, highest draw | slope, % | roughness, % | times as fast |\n"
        "|---|---|---|---|---|---|"
    )
    for name, on in rows().items():
        if args.rows and name not in args.rows:
            continue
        if args.only and not any(part in name for part in args.only):
            continue
        found = row(model, on, inputs, wanted, args.sigma)
        psnr, steep, rough = ([one[part] for one in found] for part in range(3))
        speed = ratios(model, on, inputs[0], args.time) if args.time else []
        fast = f"{statistics.median(speed):.2f}" if speed else ""
        print(
            f"| {name} | {said(psnr)} | {min(psnr):.0f}, {max(psnr):.0f} |"
            f" {percent(steep)} | {percent(rough)} | {fast} |",
            flush=True,
        )
        results[name] = {"psnr": psnr, "slope": steep, "roughness": rough, "speed": speed}
    print(json.dumps({"torch": torch.__version__, **vars(args), "results": results}))


if __name__ == "__main__":
    main()
