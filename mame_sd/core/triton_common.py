"""What the Triton kernels share: how they become operators of PyTorch, and how they read a
partition.

Each operator is one launch. It has a fake implementation, so that torch.compile takes it as it is
and a count on tensors without values sees it. The kernels run on CUDA, and on the CPU in Triton's
interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mame_sd.core.partition import DRAWS, SPREAD, Positions

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LAUNCHES: dict[str, Callable[..., Any]] = {}  # what each operator runs, by name
LIBRARY = torch.library.Library("mame_sd", "FRAGMENT")
_DRAWS, _SPREAD = tl.constexpr(DRAWS), tl.constexpr(SPREAD)
TINY = tl.constexpr(1.1754943508222875e-38)  # the least normal number of fp32


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Makes the decorated function the operator of `schema`, and gives it back; `fake` makes its
    results without values.

    Not `torch.library.custom_op`, which costs tens of microseconds in each call for gradients that
    are never asked for.
    """

    def register(launch: Callable[..., Any]) -> Any:
        name = schema.partition("(")[0]

        def guarded(*args: Any) -> Any:
            with torch.cuda.device_of(args[0]):  # Triton launches on the current device
                return launch(*args)

        LAUNCHES[name] = launch
        LIBRARY.define(schema)
        LIBRARY.impl(name, guarded, "CPU" if INTERPRETED else "CUDA")
        torch.library.register_fake(f"mame_sd::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.mame_sd, name).default

    return register


class Table(NamedTuple):
    """A partition as kernels read it, for operators take numbers and tensors alone.

    Attributes:
        table: [draws, K], the index tensors of each draw side by side, as `Positions.table` has
            them.
        draw: LongTensor [1], which draw; None: the first.
        sizes: [m, n, tiles, M, N, L].
    """

    table: Tensor
    draw: Tensor | None
    sizes: list[int]


def table_of(pos: Positions) -> Table:
    """The table of a partition."""
    return Table(pos.table, pos.draw, [pos.m, pos.n, pos.blocks, pos.M, pos.N, pos.L])


def read_by(table: Tensor, draw: Tensor | None, sizes: list[int]) -> dict[str, Any]:
    """The arguments by which a kernel reads a table."""
    return {
        "table": table,
        "draw": table if draw is None else draw,
        "row_length": table.shape[1],
        "draws": table.shape[0],
        **dict(zip(("m", "n", "tiles", "M", "N", "L"), sizes, strict=True)),
        "DRAWN": draw is not None,
    }


def precision_of(t: Tensor) -> str:
    """How tl.dot multiplies factors in fp32: in three products of TF32 where the device has them,
    which is as exact as needed.
    """
    return (
        "ieee" if INTERPRETED or torch.cuda.get_device_capability(t.device) < (8, 0) else "tf32x3"
    )


def rounded_precision_of(t: Tensor) -> str:
    """The same for factors that come from `t`: TF32 has all bits of a half."""
    exact = precision_of(t)
    return exact if t.dtype == torch.float32 or exact == "ieee" else "tf32"


def widened(t: Tensor) -> bool:
    """Whether tl.dot is to be given fp32 instead of the tensor's dtype: the interpreter can't
    multiply bf16.
    """
    return INTERPRETED and t.dtype == torch.bfloat16


def power_of_2(n: int, least: int, most: int) -> int:
    """The power of two that holds `n`, from `least` to `most`."""
    return int(min(most, max(least, triton.next_power_of_2(n))))


@triton.jit
def row_of(
    table: tl.tensor, draw: tl.tensor, row_length: tl.tensor, draws: tl.tensor, DRAWN: tl.constexpr
) -> tl.tensor:
    """Where the row of this draw begins, as `mame_sd.core.partition` tells it."""
    if DRAWN:
        d = tl.load(draw)
        every = d % _DRAWS
        fewer = d * _SPREAD % _DRAWS * draws // _DRAWS
        table += tl.where(draws == _DRAWS, every, fewer).to(tl.int64) * row_length
    return table


@triton.jit
def destinations(
    slots: tl.tensor, m: tl.tensor, BLOCK_M: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Positions of the tile's destinations, and which are real: padding repeats the first."""
    i = tl.arange(0, BLOCK_M)
    position = tl.load(slots + i, mask=i < m, other=0).to(tl.int64)
    return position, (i < m) & ((i == 0) | (position != tl.load(slots)))


@triton.jit
def sources(
    slots: tl.tensor, m: tl.tensor, n: tl.tensor, first: tl.tensor, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Positions of the tile's sources from the `first` on, and which are real: padding repeats the
    first destination.
    """
    j = first + tl.arange(0, BLOCK_N)
    position = tl.load(slots + m + j, mask=j < n, other=0).to(tl.int64)
    return position, (j < n) & (position != tl.load(slots))


@triton.jit
def block(
    t: tl.tensor,
    rows: tl.tensor,
    real: tl.tensor,
    start: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Columns `start` to start + BLOCK of what lies at the offsets `rows`, 0 where there is
    nothing.
    """
    column = start + tl.arange(0, BLOCK)
    return tl.load(
        t + rows[:, None] + column[None, :],
        mask=real[:, None] & (column < width)[None, :],
        other=0.0,
    )


@triton.jit
def placed(position: tl.tensor, times: tl.tensor, height: tl.tensor, width: tl.tensor) -> tl.tensor:
    """Where tokens at positions of the plane are in their sequence: a video's frames, interleaved
    on the plane, follow one another.
    """
    row = position // width
    return (row % times * height + row // times) * width + position % width
