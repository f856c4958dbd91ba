"""How fast attention over merged keys is, one layer, beside attention over all keys.

    python -m benchmarks.attention                     # 1,024 to 36,864 tokens on the CPU
    python -m benchmarks.attention --device cuda --dtype float16

Queries, keys and values are given, as they come out of a layer's projections. Each cell says how
many times as fast as `scaled_dot_product_attention` over all keys; both are timed in turns, in CPU
seconds on a CPU, and the cell is the median of the rounds' ratios. Before a row is timed its
output is compared with float64: where the fast path computes something else, there is no row.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd import attention
from mame_sd.eval.tables import markdown_table
from mame_sd.eval.timing import interleaved, quartiles, seconds_of
from mame_sd.runs.generate import environment_on

SHAPES = ((1024, 8), (4096, 20), (9216, 10), (36864, 2))  # tokens, heads of 64
KEEPS = (0.5, 0.25, 0.125, 0.0625)


def without_bias(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attention by a kernel that takes no bias, as FlashAttention and SageAttention take none."""
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def inputs(tokens: int, heads: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values [1, H, N, 64] as views of projections [1, N, H * 64]."""
    generator = torch.Generator().manual_seed(tokens)
    made = (torch.randn(1, tokens, heads, 64, generator=generator) for _ in range(3))
    return [t.to(device, dtype).transpose(1, 2) for t in made]


@torch.no_grad()
def row(tokens: int, heads: int, device: torch.device, dtype: torch.dtype, rounds: int) -> Any:
    """Times as fast by share of keys, (first quartile, median, third), and the unmerged seconds."""
    q, k, v = inputs(tokens, heads, device, dtype)
    side = int(tokens**0.5)
    every: dict[str, Any] = {"all": partial(F.scaled_dot_product_attention, q, k, v)}
    for keep in KEEPS:
        every[str(keep)] = partial(attention, q, k, v, (side, side), keep=keep)
    if tokens <= 1024:
        exact = attention(q.double(), k.double(), v.double(), (side, side), keep=0.25)
        far = (every["0.25"]().double() - exact).abs().max() / exact.abs().max()
        if far > {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}[dtype]:
            raise SystemExit(f"error: expected float64's output to {dtype}, got {far:.1e} off")
    rounds_found = [
        found
        for _, found in interleaved(
            list(every),
            rounds,
            lambda name, number: seconds_of(every[name], device)[1],
            warm_up=lambda name: every[name](),
        )
    ]
    return {
        "tokens": tokens,
        "heads": heads,
        "seconds": quartiles([found["all"] for found in rounds_found])[1],
        **{
            name: quartiles([found["all"] / found[name] for found in rounds_found])
            for name in every
            if name != "all"
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of tensors"
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed in turns (default 3)")
    parser.add_argument("--short", action="store_true", help="1,024 and 4,096 tokens alone")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    rows = [
        row(tokens, heads, device, dtype, args.rounds)
        for tokens, heads in SHAPES[: 2 if args.short else None]
    ]
    cells = [
        [
            f"{one['tokens']:,}",
            str(one["heads"]),
            f"{one['seconds']:.3f}",
            *(f"{one[str(keep)][1]:.2f}" for keep in KEEPS),
        ]
        for one in rows
    ]
    heads = ["tokens", "heads", "seconds", *(f"keep {keep}" for keep in KEEPS)]
    print(markdown_table(heads, cells))
    print(json.dumps({"benchmark": "attention", "machine": environment_on(device), "rows": rows}))


if __name__ == "__main__":
    main()
