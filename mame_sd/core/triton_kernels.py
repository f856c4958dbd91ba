"""The Triton kernel of `triton_plan.py`, as an operator that torch.compile takes as it is.

Every program works on one tile of one sample, on all of its destinations and some of its sources. Blocks are padded to powers of two and masked, so that any width of tokens and any tile of at most
16 x 16 tokens will do, cut at an image's border too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@torch.library.custom_op("mame_sd::best_destination", mutates_args=())
def best_destination(x: Tensor, slots: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Of every source slot: its largest cosine [B, T, n] fp32, and the destination of its tile (int32) that has it."""
    (b, length, d), (blocks, width) = x.shape, slots.shape
    n = width - m
    best = x.new_empty((b, blocks, n), dtype=torch.float32)
    row = x.new_empty((b, blocks, n), dtype=torch.int32)
    with torch.cuda.device_of(x):
        launch = launch_sizes(m, n)
        grid = blocks, max(1, triton.cdiv(n, launch["BLOCK_N"])), b
        best_kernel[grid](x, slots, best, row, length, d, m, n, **launch)
    return best, row


@best_destination.register_fake
def _(x: Tensor, slots: Tensor, m: int) -> tuple[Tensor, Tensor]:
    shape = x.shape[0], slots.shape[0], slots.shape[1] - m
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)


def launch_sizes(m: int, n: int) -> dict[str, int]:
    """Sides of the blocks that programs work on (powers of two, at least the 16 of tl.dot), and warps for them."""
    side = max(16, triton.next_power_of_2(m))
    return {
        "BLOCK_M": side,
        "BLOCK_N": min(64, max(16, triton.next_power_of_2(n))),
        "BLOCK_D": 32,
        "num_warps": 4 if side == 16 else 8,
    }


@triton.jit
def _destinations(slots: tl.tensor, m: tl.tensor, BLOCK_M: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Positions of the tile's destinations, and which are real: padding repeats the first."""
    i = tl.arange(0, BLOCK_M)
    position = tl.load(slots + i, mask=i < m, other=0)
    return position, (i < m) & ((i == 0) | (position != tl.load(slots)))


@triton.jit
def _sources(
    slots: tl.tensor, m: tl.tensor, n: tl.tensor, first: tl.tensor, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Positions of the tile's sources from the `first` on, and which are real: padding repeats the first destination."""
    j = first + tl.arange(0, BLOCK_N)
    position = tl.load(slots + m + j, mask=j < n, other=0)
    return position, (j < n) & (position != tl.load(slots))


@triton.jit
def _chunk(
    x: tl.tensor, rows: tl.tensor, real: tl.tensor, start: tl.tensor, width: tl.tensor, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """Columns `start` to start + BLOCK_D of the rows in fp32, 0 where there are none."""
    column = start + tl.arange(0, BLOCK_D)
    mask = real[:, None] & (column < width)[None, :]
    return tl.load(x + rows[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _in_range(largest: tl.tensor) -> tl.tensor:
    """2 ** -floor(log2(largest)), at most 2 ** 126 and at least 2 ** -126: with it, squares stay in range."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _inverse_norm(squares: tl.tensor) -> tl.tensor:
    return tl.where(squares == 0, 0.0, 1 / tl.sqrt(tl.where(squares == 0, 1.0, squares)))


@triton.jit
def best_kernel(
    x: tl.tensor,
    slots: tl.tensor,
    best: tl.tensor,
    row: tl.tensor,
    length: tl.tensor,
    d: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    tile = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_N
    sample = tl.program_id(2).to(tl.int64)
    slots += tile * (m + n)
    x += sample * length * d
    dst, dst_real = _destinations(slots, m, BLOCK_M)
    src, src_real = _sources(slots, m, n, first, BLOCK_N)
    dst_largest = tl.zeros([BLOCK_M], tl.float32)
    src_largest = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, d, BLOCK_D):
        dst_largest = tl.maximum(dst_largest, tl.max(tl.abs(_chunk(x, dst, dst_real, start, d, BLOCK_D)), 1))
        src_largest = tl.maximum(src_largest, tl.max(tl.abs(_chunk(x, src, src_real, start, d, BLOCK_D)), 1))
    dst_scale = _in_range(dst_largest)
    src_scale = _in_range(src_largest)
    dst_squares = tl.zeros([BLOCK_M], tl.float32)
    src_squares = tl.zeros([BLOCK_N], tl.float32)
    s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, d, BLOCK_D):
        a = _chunk(x, dst, dst_real, start, d, BLOCK_D) * dst_scale[:, None]
        b = _chunk(x, src, src_real, start, d, BLOCK_D) * src_scale[:, None]
        dst_squares += tl.sum(a * a, 1)
        src_squares += tl.sum(b * b, 1)
        s = tl.dot(a, tl.trans(b), s, input_precision="ieee")
    s *= _inverse_norm(dst_squares)[:, None] * _inverse_norm(src_squares)[None, :]
    s = tl.where(s != s, 2.0, tl.minimum(tl.maximum(s, -1.0), 1.0))  # NaN is the largest, as in torch.max
    s = tl.where(dst_real[:, None], s, -2.0)
    top = tl.max(s, 0)
    j = first + tl.arange(0, BLOCK_N)
    out = (sample * tl.num_programs(0) + tile) * n + j
    tl.store(best + out, tl.where(top > 1.5, float("nan"), top), mask=j < n)
    tl.store(row + out, tl.where(src_real, tl.argmax(s, 0), 0), mask=j < n)
