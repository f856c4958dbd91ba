"""Merging by Triton kernels (`kernel="triton"`): no M x N matrix is ever written.

Each source of a tile goes to its most similar destination, so a plan is one row number for each source. One kernel finds
it, one program for each tile and sample: the tile's similarities stay on the chip. A second kernel sums and divides, and
writes the merged tokens to where they belong. Restoring takes rows. Products and sums are fp32 whatever the inputs.

Verified against the float64 loops in Triton's interpreter; not yet timed, nor run, on a GPU.

NaN and infinity go where PyTorch's operations put them in merging: a NaN similarity is the largest of its source, and
what is not finite spreads over its channel of the tile. Restoring spreads it no further.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.errors import MachineError
from mame_sd.merge import MergePlan
from mame_sd.partition import Positions
from mame_sd.rows import in_place, rows_of
from mame_sd.weights import by_keep, by_tau

try:
    import triton
    import triton.language as tl
except ImportError:
    raise MachineError(
        "expected the package triton for kernel='triton', found none: pip install triton, or leave kernel out"
    ) from None


TORCH_INSTEAD = "gradients or float64: PyTorch's operations in place of the kernel"


class RowPlan(MergePlan):
    """A plan that knows one destination for each source: `weights` are made when somebody looks at them."""

    def __init__(
        self, row: Tensor, stay: Tensor, kept_rows: Tensor, pos: Positions, special: int, lead: torch.Size
    ) -> None:
        # row [B, T, n] int32: the destination of its tile that a source goes to; -1: it stays, or is padding.
        self._row = row
        self._place(stay, kept_rows, pos, special, lead)

    @property
    def _weights(self) -> Tensor:  # type: ignore[override]
        every = torch.arange(self.positions.m, device=self._row.device)
        return (self._row.unsqueeze(-2) == every.unsqueeze(-1)).float()

    @property
    def _R(self) -> Tensor:  # type: ignore[override]
        return 1 + self._weights.sum(-1)

    def merge(self, t: Tensor) -> Tensor:
        """As `MergePlan.merge`; where `t` needs gradients, by PyTorch's operations."""
        if not _served(t):
            return super().merge(t)
        t = self._checked(t, self.tokens_in, "merge")
        body = t[:, self.special :].contiguous()
        y = _merged_tokens(body, self.positions.slots, self.positions.gather, self._row, self.positions.M)
        if self._kept.shape[-1]:
            y = torch.cat([y, rows_of(body, self._kept_positions())], 1)
        if self.special:
            y = torch.cat([t[:, : self.special], y], 1)
        return y.reshape(*self._lead, *y.shape[1:])

    def restore(self, y: Tensor) -> Tensor:
        """As `MergePlan.restore`, without a product: each position takes the row of `y` it went to."""
        y = self._checked(y, self.tokens_kept, "restore")
        x = rows_of(y, self._source_rows())
        return x.reshape(*self._lead, *x.shape[1:])

    def _source_rows(self) -> Tensor:
        """[B, L]: the row of `merge`'s result that every position went to, or is."""
        pos, b = self.positions, self._row.shape[0]
        device = self._row.device
        dst = pos.gather[pos.dst_slots]  # [T, m] rows of the destinations
        src = dst.expand(b, -1, -1).gather(2, self._row.long().clamp(min=0)).flatten(1)
        kept = self._kept.expand(b, -1)
        src = src.scatter(1, pos.src_real[kept], pos.M + torch.arange(kept.shape[1], device=device).expand(b, -1))
        rows = torch.cat([torch.arange(pos.M, device=device).expand(b, -1), src], 1)[:, pos.gather] + self.special
        return torch.cat([torch.arange(self.special, device=device).expand(b, -1), rows], 1)


def row_plan(x: Tensor, pos: Positions, config: MaMeConfig, special: int, lead: torch.Size) -> RowPlan | None:
    """The plan of feature x [B, L, d] without special tokens; None where PyTorch's operations have to do it.

    These are gradients and float64, for the kernels compute in fp32.

    Raises:
        MachineError: `x` is not on a GPU.
    """
    if not x.is_cuda and not _interpreted():
        raise MachineError(
            f"expected tokens on a CUDA device for kernel='triton', got {x.device}: move the model there, or leave "
            "kernel out"
        )
    if not _served(x):
        return None
    best, row = _best_destination(x.contiguous(), pos.slots, pos.m)
    if config.keep is None:
        leave, stay, kept = by_tau(best > config.tau, pos)
    else:
        leave, stay, kept = by_keep(best, pos, config.keep)
    return RowPlan(row.masked_fill(leave, -1), stay, kept, pos, special, lead)


def _served(t: Tensor) -> bool:
    return in_place(t) and t.dtype != torch.float64


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@torch.library.custom_op("mame_sd::best_destination", mutates_args=())
def _best_destination(x: Tensor, slots: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Of every source slot: its largest cosine [B, T, n] fp32, and the destination of its tile (int32) that has it."""
    (b, length, d), (blocks, width) = x.shape, slots.shape
    n = width - m
    best = x.new_empty((b, blocks, n), dtype=torch.float32)
    row = x.new_empty((b, blocks, n), dtype=torch.int32)
    with torch.cuda.device_of(x):
        _best_kernel[(blocks, b)](x, slots, best, row, length, d, m, n, **_sides(m, n))
    return best, row


@_best_destination.register_fake
def _(x: Tensor, slots: Tensor, m: int) -> tuple[Tensor, Tensor]:
    shape = x.shape[0], slots.shape[0], slots.shape[1] - m
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("mame_sd::merged_tokens", mutates_args=())
def _merged_tokens(t: Tensor, slots: Tensor, gather: Tensor, row: Tensor, kept: int) -> Tensor:
    """Merged destinations [B, M, C] of t [B, L, C], M = `kept`; `row` and `slots` as above, `gather` of Positions."""
    b, length, c = t.shape
    blocks, n = row.shape[1:]
    m = slots.shape[1] - n
    y = t.new_empty((b, kept, c))
    sides = _sides(m, n)
    with torch.cuda.device_of(t):
        grid = blocks, triton.cdiv(c, sides["BLOCK_D"]), b
        _merge_kernel[grid](t, slots, gather, row, y, length, c, kept, m, n, **sides)
    return y


@_merged_tokens.register_fake
def _(t: Tensor, slots: Tensor, gather: Tensor, row: Tensor, kept: int) -> Tensor:
    return t.new_empty((t.shape[0], kept, t.shape[2]))


def _sides(m: int, n: int) -> dict[str, int]:
    """Sides of the blocks that programs work on: powers of two, at least the 16 of tl.dot."""
    sources = max(16, triton.next_power_of_2(n))
    return {
        "BLOCK_M": max(16, triton.next_power_of_2(m)),
        "BLOCK_N": sources,
        "BLOCK_D": 64 if sources <= 64 else 32,
    }


@triton.jit
def _tile(slots: Any, m: Any, n: Any, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr) -> Any:
    """Positions of the tile's destinations and sources, and which are real: padding repeats the first destination."""
    slots += tl.program_id(0).to(tl.int64) * (m + n)
    i = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    first = tl.load(slots)
    dst = tl.load(slots + i, mask=i < m, other=0)
    src = tl.load(slots + m + j, mask=j < n, other=0)
    dst_real = (i < m) & ((i == 0) | (dst != first))
    src_real = (j < n) & (src != first)
    return dst, src, dst_real, src_real


@triton.jit
def _chunk(x: Any, rows: Any, real: Any, start: Any, width: Any, BLOCK_D: tl.constexpr) -> Any:
    """Columns `start` to start + BLOCK_D of the rows in fp32, 0 where there are none."""
    column = start + tl.arange(0, BLOCK_D)
    mask = real[:, None] & (column < width)[None, :]
    return tl.load(x + rows[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _in_range(largest: Any) -> Any:
    """2 ** -floor(log2(largest)), at most 2 ** 126 and at least 2 ** -126: with it, squares stay in range."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _inverse_norm(squares: Any) -> Any:
    return tl.where(squares == 0, 0.0, 1 / tl.sqrt(tl.where(squares == 0, 1.0, squares)))


@triton.jit
def _best_kernel(
    x: Any,
    slots: Any,
    best: Any,
    row: Any,
    length: Any,
    d: Any,
    m: Any,
    n: Any,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    dst, src, dst_real, src_real = _tile(slots, m, n, BLOCK_M, BLOCK_N)
    sample = tl.program_id(1).to(tl.int64)
    x += sample * length * d
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
    j = tl.arange(0, BLOCK_N)
    out = (sample * tl.num_programs(0) + tl.program_id(0)) * n + j
    tl.store(best + out, tl.where(top > 1.5, float("nan"), top), mask=j < n)
    tl.store(row + out, tl.where(src_real, tl.argmax(s, 0), -1), mask=j < n)


@triton.jit
def _merge_kernel(
    t: Any,
    slots: Any,
    gather: Any,
    row: Any,
    y: Any,
    length: Any,
    c: Any,
    kept: Any,
    m: Any,
    n: Any,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    dst, src, dst_real, src_real = _tile(slots, m, n, BLOCK_M, BLOCK_N)
    sample = tl.program_id(2).to(tl.int64)
    start = tl.program_id(1) * BLOCK_D
    t += sample * length * c
    y += sample * kept * c
    row += (sample * tl.num_programs(0) + tl.program_id(0)) * n
    i = tl.arange(0, BLOCK_M)
    goes = tl.load(row + tl.arange(0, BLOCK_N), mask=src_real, other=-1)
    weights = (i[:, None] == goes[None, :]).to(tl.float32)
    count = 1 + tl.sum(weights, 1)
    a = _chunk(t, dst, dst_real, start, c, BLOCK_D)
    b = _chunk(t, src, src_real, start, c, BLOCK_D)
    mean = tl.dot(weights, b, a, input_precision="ieee") / count[:, None]
    # A mean lies between what it is a mean of, and rounding may not take it out.
    inf = float("inf")
    low = tl.minimum(tl.min(tl.where(dst_real[:, None], a, inf), 0), tl.min(tl.where(src_real[:, None], b, inf), 0))
    high = tl.maximum(tl.max(tl.where(dst_real[:, None], a, -inf), 0), tl.max(tl.where(src_real[:, None], b, -inf), 0))
    held = tl.minimum(tl.maximum(mean, low[None, :]), high[None, :])
    nans = tl.sum((a != a).to(tl.int32), 0) + tl.sum((b != b).to(tl.int32), 0)
    held = tl.where((mean != mean) | (nans > 0)[None, :], float("nan"), held)
    out = tl.load(gather + dst, mask=dst_real, other=0)
    column = start + tl.arange(0, BLOCK_D)
    mask = dst_real[:, None] & (column < c)[None, :]
    tl.store(y + out[:, None] * c + column[None, :], held.to(y.dtype.element_ty), mask=mask)
