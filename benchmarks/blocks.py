"""CPU seconds of transformer blocks as wide as published models', with and without restoring.

    python -m benchmarks.blocks                # all cases, some minutes
    python -m benchmarks.blocks "SD 3.5" --rounds 3

Weights are random: the time doesn't depend on them, and no quality is reported. Rows are timed in
turns on one thread. The table shows the median of the rounds' ratios to the unmerged row, with the
lowest and highest.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import diffusers
import torch
from torch import nn

from benchmarks import gpu
from mame_sd import apply_mame
from mame_sd.eval.timing import in_turns, seconds_of, times_as_fast

ROWS: dict[str, dict[str, Any]] = {
    "keys a quarter": {"keep": 0.25},
    "MLP an eighth": {"keep": 1, "mlp_keep": 0.125},
    "MLP an eighth, keys a quarter": {"keep": 0.25, "mlp_keep": 0.125},
    "block a quarter": {"keep": 1, "block_keep": 0.25},
    "block a quarter, keys a quarter": {"keep": 0.25, "block_keep": 0.25},
    "block an eighth": {"keep": 1, "block_keep": 0.125},
}


def of_unet(channels: int, side: int) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return a level of SDXL with one block, and its arguments."""
    model = diffusers.Transformer2DModel(
        num_attention_heads=channels // 64, attention_head_dim=64, in_channels=channels,
        num_layers=1, cross_attention_dim=2048, use_linear_projection=True,
    )  # fmt: skip
    states = torch.randn(2, 77, 2048)
    return model, {
        "hidden_states": torch.randn(2, channels, side, side),
        "encoder_hidden_states": states,
    }


def of_case(make: Callable[..., gpu.Case], **how: Any) -> tuple[nn.Module, Any]:
    """Return a transformer and its arguments: random numbers, as zeros may multiply faster."""
    case = make(dtype=torch.float32, **how)
    model = case.build(torch.device("cpu"))
    named, _ = case.inputs(model)
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and "ids" not in name and "timestep" not in name:
            named[name] = torch.randn_like(value)
    return model, named


CASES: dict[str, Callable[[], tuple[nn.Module, Mapping[str, Any]]]] = {
    "SD 3.5 medium (1,536 wide), 1,024 tokens": partial(
        of_case, gpu.sd3, size=(32, 32), heads=24, text=154, layers=2
    ),
    "SDXL (1,280 wide), 1,024 tokens": partial(of_unet, 1280, 32),
    "SDXL (640 wide), 4,096 tokens": partial(of_unet, 640, 64),
    "FLUX.1 double block (3,072 wide), 1,024 tokens": partial(
        of_case, gpu.flux, size=(32, 32), text=128, layers=(1, 0)
    ),
    "FLUX.1 single block (3,072 wide), 1,024 tokens": partial(
        of_case, gpu.flux, size=(32, 32), text=128, layers=(0, 1)
    ),
    "Wan (1,536 wide), 4,680 tokens": partial(
        of_case, gpu.wan, size=(3, 30, 52), heads=12, ffn_dim=8960, layers=1
    ),
}


@torch.no_grad()
def measured(name: str, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each row of a case, round by round.

    Rows that the model can't run because it has no MLP of its own are left out.
    """
    torch.manual_seed(0)
    model, call = CASES[name]()
    model.eval().requires_grad_(False)
    rows = ["unmerged"]
    for row, settings in ROWS.items():
        with suppress(ValueError), apply_mame(model, min_tokens=16, **settings):
            rows.append(row)

    def seconds(row: str) -> float:
        on = apply_mame(model, min_tokens=16, **ROWS[row]) if row in ROWS else nullcontext()
        with on:
            return seconds_of(lambda: model(**call), torch.device("cpu"))[1]

    return in_turns(rows, rounds, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="cases whose names contain one of these")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"| times as fast | {' | '.join(ROWS)} |")
    print("|---" * (len(ROWS) + 1) + "|")
    for name in CASES:
        if args.only and not any(part in name for part in args.only):
            continue
        seconds = measured(name, args.rounds)
        cells = []
        for row in ROWS:
            times = times_as_fast(seconds, "unmerged", row) if row in seconds else []
            middle = f"{statistics.median(times):.2f}" if times else "none"
            cells.append(f"{middle} ({min(times):.2f} to {max(times):.2f})" if times else middle)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
