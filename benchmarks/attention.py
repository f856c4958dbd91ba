"""Time attention over merged keys in one layer, compared with attention over all keys.

    python -m benchmarks.attention                     # 1,024 to 36,864 tokens on the CPU
    python -m benchmarks.attention --device cuda --dtype float16

Queries, keys and values are given, as a layer's projections return them. Each cell says how many
times as fast as `scaled_dot_product_attention` over all keys; both are timed in turns, in CPU
seconds on a CPU, and the cell is the median of the rounds' ratios. Before a row is timed its output
is compared with float64: if the fast path computes something else, there is no row.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import parser_of
from mame_sd import attention
from mame_sd.eval.tables import markdown_table
from mame_sd.eval.timing import in_turns, quartiles, seconds_of, times_as_fast

SHAPES = ((1024, 8), (4096, 20), (9216, 10), (36864, 2))  # tokens, heads of 64
KEEPS = (0.5, 0.25, 0.125, 0.0625)


def without_bias(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Compute attention by a kernel that takes no bias, as FlashAttention and SageAttention do."""
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def inputs(tokens: int, heads: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys and values [1, H, N, 64] as views of projections [1, N, H * 64]."""
    generator = torch.Generator().manual_seed(tokens)
    made = (torch.randn(1, tokens, heads, 64, generator=generator) for _ in range(3))
    return [t.to(device, dtype).transpose(1, 2) for t in made]


@torch.no_grad()
def row(
    tokens: int, heads: int, device: torch.device, dtype: torch.dtype, rounds: int
) -> tuple[float, list[float]]:
    """Time one layer.

    Args:
        tokens: Number of tokens N.
        heads: Number of heads H.
        device: Where it computes.
        dtype: Of all tensors.
        rounds: Number of rounds.

    Returns:
        Its unmerged seconds, and how many times as fast each share of keys is.

    Raises:
        SystemExit: If the merged layer computes something else than in float64.
    """
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

    taken = in_turns(list(every), rounds, lambda name: seconds_of(every[name], device)[1])
    times = [quartiles(times_as_fast(taken, "all", str(keep)))[1] for keep in KEEPS]
    return quartiles(taken["all"])[1], times


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of tensors"
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed in turns (default 3)")
    parser.add_argument("--short", action="store_true", help="1,024 and 4,096 tokens alone")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    cells = []
    for tokens, heads in SHAPES[: 2 if args.short else None]:
        seconds, times = row(tokens, heads, device, dtype, args.rounds)
        shown = (f"{one:.2f}" for one in times)
        cells.append([f"{tokens:,}", str(heads), f"{seconds:.3f}", *shown])
    names = ["tokens", "heads", "all keys, s", *(f"keep {keep}" for keep in KEEPS)]
    print(markdown_table(names, cells))


if __name__ == "__main__":
    main()
