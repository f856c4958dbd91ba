"""Do roundings change what merges, and would coarser similarities help?

Choices of a plan from tokens and from the same tokens, perturbed.

    python -m benchmarks.choice_stability

Takes random tokens, tokens of which each is there twice, and smooth ones (neighbours nearly alike).
They are perturbed by a relative 1e-6, as batching, attention slicing or another device do. The best
destination of each source is taken of S as it is and of S rounded to 2^-k, ties to the first
position. One JSON line for each kind: the share of the choices that differ.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from mame_sd import MaMeConfig
from mame_sd.core.partition import positions
from mame_sd.core.similarity import similarity_of

SIDE, CHANNELS, BATCH, NOISE = 32, 64, 16, 1e-6
BITS = (20, 16, 12, 8)


def kinds(generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens [B, SIDE * SIDE, CHANNELS] of each kind."""
    shape = (BATCH, CHANNELS, SIDE, SIDE)
    random = torch.randn(shape, generator=generator)
    coarse = torch.randn((BATCH, CHANNELS, SIDE // 8, SIDE // 8), generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bicubic")
    twice = random[..., ::2, ::2].repeat_interleave(2, -1).repeat_interleave(2, -2)
    return {
        name: t.flatten(2).mT
        for name, t in (("random", random), ("each there 4 times", twice), ("smooth", smooth))
    }


def main() -> int:
    generator = torch.Generator().manual_seed(0)
    config = MaMeConfig(keep=0.5, min_tokens=1)
    pos = positions(SIDE * SIDE, config, (SIDE, SIDE), torch.device("cpu"), None)
    for name, x in kinds(generator).items():
        near = x * (1 + NOISE * torch.randn(x.shape, generator=generator))
        pair = [similarity_of(t, pos, config.metric) for t in (x, near)]
        row: dict[str, object] = {"tokens": name, "as it is": differing(*pair)}
        for bits in BITS:
            row[f"rounded to 2^-{bits}"] = differing(*((s * 2**bits).round() for s in pair))
        print(json.dumps(row))
    return 0


def differing(s: Tensor, t: Tensor) -> float:
    return (s.argmax(-2) != t.argmax(-2)).float().mean().item()


if __name__ == "__main__":
    sys.exit(main())
