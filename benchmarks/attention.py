"""Time attention over merged keys in one layer, compared with attention over all keys.

    OMP_NUM_THREADS=1 python -m benchmarks.attention

Queries, keys and values are given, as a layer's projections return them. Each cell says how many
times as fast as `scaled_dot_product_attention` over all keys; both are timed in turns, in CPU
seconds, and the cell is the median of the rounds' ratios.
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

SHAPES = ((1024, 8), (4096, 20))  # tokens, heads of 64
CPU = torch.device("cpu")
KEEPS = (0.5, 0.25, 0.125, 0.0625)


def without_bias(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Compute attention by a kernel that takes no bias, as FlashAttention and SageAttention do."""
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def inputs(tokens: int, heads: int) -> list[Tensor]:
    """Return queries, keys and values [1, H, N, 64] as views of projections [1, N, H * 64]."""
    generator = torch.Generator().manual_seed(tokens)
    made = (torch.randn(1, tokens, heads, 64, generator=generator) for _ in range(3))
    return [t.transpose(1, 2) for t in made]


@torch.no_grad()
def row(tokens: int, heads: int, rounds: int) -> tuple[float, list[float]]:
    """Time one layer.

    Args:
        tokens: Number of tokens N.
        heads: Number of heads H.
        rounds: Number of rounds.

    Returns:
        Its unmerged seconds, and how many times as fast each share of keys is.
    """
    q, k, v = inputs(tokens, heads)
    side = int(tokens**0.5)
    every: dict[str, Any] = {"all": partial(F.scaled_dot_product_attention, q, k, v)}
    for keep in KEEPS:
        every[str(keep)] = partial(attention, q, k, v, (side, side), keep=keep)
    taken = in_turns(list(every), rounds, lambda name: seconds_of(every[name], CPU)[1])
    times = [quartiles(times_as_fast(taken, "all", str(keep)))[1] for keep in KEEPS]
    return quartiles(taken["all"])[1], times


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="timed in turns (default 3)")
    args = parser.parse_args()
    cells = []
    for tokens, heads in SHAPES:
        seconds, times = row(tokens, heads, args.rounds)
        shown = (f"{one:.2f}" for one in times)
        cells.append([f"{tokens:,}", str(heads), f"{seconds:.3f}", *shown])
    names = ["tokens", "heads", "all keys, s", *(f"keep {keep}" for keep in KEEPS)]
    print(markdown_table(names, cells))


if __name__ == "__main__":
    main()
