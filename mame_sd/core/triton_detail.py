"""Restoring with detail (`detail.py`) in Triton, in four launches beside the means of what is seen
of the inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mame_sd.core.detail import RIDGE
from mame_sd.core.triton_common import (
    TINY,
    block,
    destinations,
    operator,
    power_of_2,
    precision_of,
    read_by,
    rounded_precision_of,
    row_of,
    sources,
)

_RANK = 32  # directions, padded
_RIDGE = tl.constexpr(RIDGE)
_LEAST = tl.constexpr(1.0842021724855044e-19)  # the square root of TINY


def _fake_seen(feature: Tensor, directions: Tensor) -> Tensor:
    return feature.new_empty((*feature.shape[:2], directions.shape[1]), dtype=torch.float32)


@operator("seen(Tensor feature, Tensor directions) -> Tensor", _fake_seen)
def seen(feature: Tensor, directions: Tensor) -> Tensor:
    """Inputs [B, L, d] in the directions [d, r], fp32: [B, L, r] in fp32, whatever the inputs'
    dtype.
    """
    feature = feature if feature.stride(2) == 1 else feature.contiguous()
    out = _fake_seen(feature, directions)
    batch, length, width = feature.shape
    seen_kernel[(triton.cdiv(length, 64), batch)](
        feature,
        directions,
        out,
        *feature.stride()[:2],
        length,
        width,
        directions.shape[1],
        PRECISION=precision_of(feature),
        BLOCK=64,
        STEP=32,
        RANK=_RANK,
        num_warps=4,
    )
    return out


@triton.jit
def seen_kernel(
    feature: tl.tensor,
    directions: tl.tensor,
    out: tl.tensor,
    stride_b: tl.tensor,
    stride_l: tl.tensor,
    length: tl.tensor,
    width: tl.tensor,
    rank: tl.tensor,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    RANK: tl.constexpr,
) -> None:
    sample = tl.program_id(1).to(tl.int64)
    i = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    r = tl.arange(0, RANK)
    found = tl.zeros([BLOCK, RANK], tl.float32)
    for start in range(0, width, STEP):
        x = block(feature + sample * stride_b, i * stride_l, i < length, start, width, STEP).to(
            tl.float32
        )
        k = start + tl.arange(0, STEP)
        at = directions + k[:, None] * rank + r[None, :]
        towards = tl.load(at, mask=(k < width)[:, None] & (r < rank)[None, :], other=0.0)
        found = tl.dot(x, towards, found, input_precision=PRECISION)
    at = out + (sample * length + i)[:, None] * rank + r[None, :]
    tl.store(at, found, mask=(i < length)[:, None] & (r < rank)[None, :])


def _fake_unexplained(
    y: Tensor,
    merged: Tensor,
    rows: Tensor,
    counts: Tensor,
    table: Tensor,
    draw: Tensor | None,
    sizes: list[int],
    plane: list[int],
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), merged.new_empty(merged.shape)


@operator(
    "unexplained(Tensor y, Tensor merged, Tensor rows, Tensor counts, Tensor table, Tensor? draw,"
    " int[] sizes, int[] plane) -> (Tensor, Tensor)",
    _fake_unexplained,
)
def unexplained(
    y: Tensor,
    merged: Tensor,
    rows: Tensor,
    counts: Tensor,
    table: Tensor,
    draw: Tensor | None,
    sizes: list[int],
    plane: list[int],
) -> tuple[Tensor, Tensor]:
    """What of merged tokens is not the mean, over their group, of the blur of all tokens' copies.

    Args:
        y: merged tokens [B, L', C], without special ones.
        merged: what is seen of the merged inputs [B, L', r], fp32, contiguous.
        rows: the group of each token [B, L].
        counts: tokens of each group [B, L'], fp32.
        table, draw, sizes: see `Table`.
        plane: (h, w) of the tokens.

    Returns:
        That of `y` [B, L', C] and of `merged` [B, L', r].
    """
    y = y if y.stride(2) == 1 else y.contiguous()
    of_y, of_merged = _fake_unexplained(y, merged, rows, counts, table, draw, sizes, plane)
    m, n, tiles, *_ = sizes
    batch, groups, width = y.shape
    side = power_of_2(m, 16, 128)
    unexplained_kernel[(tiles, batch, triton.cdiv(width, _RANK) + 1)](
        y,
        merged,
        rows,
        counts,
        of_y,
        of_merged,
        *y.stride()[:2],
        groups,
        width,
        merged.shape[2],
        *plane,
        **read_by(table, draw, sizes),
        PRECISION=rounded_precision_of(y),
        EXACT=precision_of(y),
        BLOCK_M=side,
        BLOCK_N=power_of_2(n, 16, 64),
        BLOCK_D=_RANK,
        num_warps=4 if side <= 32 else 8,
    )
    return of_y, of_merged


@triton.jit
def _blur(
    y: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    position: tl.tensor,
    real: tl.tensor,
    start: tl.tensor,
    width: tl.tensor,
    plane_h: tl.tensor,
    plane_w: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """At the positions, the blur of all tokens' copies by [1, 2, 1] / 4 along rows and columns,
    whose border is repeated.
    """
    r, c = position // plane_w, position % plane_w
    found = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for k in range(9):
        down, right = k // 3 - 1, k % 3 - 1
        at_r = tl.minimum(tl.maximum(r + down, 0), plane_h - 1)
        at_c = tl.minimum(tl.maximum(c + right, 0), plane_w - 1)
        group = tl.load(rows + at_r * plane_w + at_c, mask=real, other=0)
        weight = (2 - tl.abs(down)) * (2 - tl.abs(right)) / 16
        found += weight * block(y, group * stride, real, start, width, BLOCK_D).to(tl.float32)
    return found


@triton.jit
def _unexplained(
    y: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    rows: tl.tensor,
    counts: tl.tensor,
    slots: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    M: tl.tensor,
    start: tl.tensor,
    width: tl.tensor,
    plane_h: tl.tensor,
    plane_w: tl.tensor,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    i = tl.arange(0, BLOCK_M)
    column = start + tl.arange(0, BLOCK_D)
    inside = (column < width)[None, :]
    dst, dst_real = destinations(slots, m, BLOCK_M)
    base = tl.load(rows + tl.load(slots).to(tl.int64))
    sums = _blur(y, stride, rows, dst, dst_real, start, width, plane_h, plane_w, BLOCK_M, BLOCK_D)
    for first in range(0, n, BLOCK_N):
        src, src_real = sources(slots, m, n, first, BLOCK_N)
        group = tl.load(rows + src, mask=src_real, other=0)
        alone = src_real & (group >= M)
        blur = _blur(
            y, stride, rows, src, src_real, start, width, plane_h, plane_w, BLOCK_N, BLOCK_D
        )
        its = (group[None, :] - base == i[:, None]) & (src_real & (group < M))[None, :]
        sums = tl.dot(its.to(tl.float32), blur, sums, input_precision=PRECISION)
        own = block(y, group * stride, alone, start, width, BLOCK_D).to(tl.float32)
        to = out + group[:, None] * out_stride + column[None, :]
        tl.store(to, (own - blur).to(out.dtype.element_ty), mask=alone[:, None] & inside)
    count = tl.load(counts + base + i, mask=dst_real, other=1.0)
    own = block(y, (base + i) * stride, dst_real, start, width, BLOCK_D).to(tl.float32)
    to = out + (base + i)[:, None] * out_stride + column[None, :]
    tl.store(
        to, (own - sums / count[:, None]).to(out.dtype.element_ty), mask=dst_real[:, None] & inside
    )


@triton.jit
def unexplained_kernel(
    y: tl.tensor,
    merged: tl.tensor,
    rows: tl.tensor,
    counts: tl.tensor,
    of_y: tl.tensor,
    of_merged: tl.tensor,
    stride_b: tl.tensor,
    stride_l: tl.tensor,
    groups: tl.tensor,
    width: tl.tensor,
    rank: tl.tensor,
    plane_h: tl.tensor,
    plane_w: tl.tensor,
    table: tl.tensor,
    draw: tl.tensor,
    row_length: tl.tensor,
    draws: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    tiles: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    L: tl.tensor,
    DRAWN: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    tile, sample = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slots = row_of(table, draw, row_length, draws, DRAWN) + L + tile * (m + n)
    rows += sample * L
    counts += sample * groups
    start = tl.program_id(2) * BLOCK_D
    if start < width:
        y += sample * stride_b
        of_y += sample * groups * width
        _unexplained(
            y,
            of_y,
            stride_l,
            width,
            rows,
            counts,
            slots,
            m,
            n,
            M,
            start,
            width,
            plane_h,
            plane_w,
            PRECISION,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
        )
    else:
        merged += sample * groups * rank
        of_merged += sample * groups * rank
        _unexplained(
            merged,
            of_merged,
            rank,
            rank,
            rows,
            counts,
            slots,
            m,
            n,
            M,
            0,
            rank,
            plane_h,
            plane_w,
            EXACT,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
        )


def _fake_follows(
    of_y: Tensor, of_merged: Tensor, counts: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    (batch, _, width), rank = of_y.shape, of_merged.shape[2]
    chunks = triton.cdiv(width, 64)
    return of_merged.new_empty((batch, rank, width)), of_merged.new_empty((batch, chunks, 2))


@operator(
    "follows(Tensor of_y, Tensor of_merged, Tensor counts, int length) -> (Tensor, Tensor)",
    _fake_follows,
)
def follows(of_y: Tensor, of_merged: Tensor, counts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The ridge regression [B, r, C] of what is unexplained of merged tokens on what is of their
    inputs, in fp32.

    Args:
        of_y, of_merged: as `unexplained` gives them.
        counts: tokens of each group [B, L'], fp32, `length` in all.

    Returns:
        It; and of each 64 channels what it explains, and what there is to explain, [B, chunks, 2].
    """
    found, power = _fake_follows(of_y, of_merged, counts, length)
    batch, groups, width = of_y.shape
    follows_kernel[(power.shape[1], batch)](
        of_y,
        of_merged,
        counts,
        found,
        power,
        groups,
        width,
        of_merged.shape[2],
        length,
        PRECISION=precision_of(of_y),
        BLOCK=64,
        BLOCK_D=64,
        RANK=_RANK,
        num_warps=4,
    )
    return found, power


@triton.jit
def follows_kernel(
    of_y: tl.tensor,
    of_merged: tl.tensor,
    counts: tl.tensor,
    found: tl.tensor,
    power: tl.tensor,
    groups: tl.tensor,
    width: tl.tensor,
    rank: tl.tensor,
    length: tl.tensor,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RANK: tl.constexpr,
) -> None:
    chunk, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    of_y += sample * groups * width
    of_merged += sample * groups * rank
    counts += sample * groups
    r, column = tl.arange(0, RANK), chunk * BLOCK_D + tl.arange(0, BLOCK_D)
    covariance = tl.zeros([RANK, RANK], tl.float32)
    follow = tl.zeros([RANK, BLOCK_D], tl.float32)
    wanted_power = 0.0
    for start in range(0, groups, BLOCK):
        g = (start + tl.arange(0, BLOCK)).to(tl.int64)
        real = g < groups
        share = tl.load(counts + g, mask=real, other=0.0) / length
        given = block(of_merged, g * rank, real, 0, rank, RANK)
        wanted = block(of_y, g * width, real, chunk * BLOCK_D, width, BLOCK_D).to(tl.float32)
        weighted = tl.trans(share[:, None] * given)
        covariance = tl.dot(weighted, given, covariance, input_precision=PRECISION)
        follow = tl.dot(weighted, wanted, follow, input_precision=PRECISION)
        wanted_power += tl.sum(share * tl.sum(wanted * wanted, 1), 0)
    same = r[:, None] == r[None, :]
    ridge = _RIDGE * tl.sum(tl.sum(tl.where(same, covariance, 0.0), 1), 0) / rank + _LEAST
    left = covariance + tl.where(same, tl.where((r < rank)[:, None], ridge, 1.0), 0.0)
    right = follow
    for j in range(RANK):  # Gauss and Jordan, without pivoting: positive definite
        its = r == j
        left_row = tl.sum(tl.where(its[:, None], left, 0.0), 0)
        right_row = tl.sum(tl.where(its[:, None], right, 0.0), 0)
        column_j = tl.sum(tl.where(its[None, :], left, 0.0), 1)
        pivot = tl.sum(tl.where(its, left_row, 0.0), 0)
        times = tl.where(its, 1 - 1 / pivot, column_j / pivot)
        left -= times[:, None] * left_row[None, :]
        right -= times[:, None] * right_row[None, :]
    real = (r < rank)[:, None] & (column < width)[None, :]
    tl.store(found + sample * rank * width + r[:, None] * width + column[None, :], right, mask=real)
    power += (sample * tl.num_programs(0) + chunk) * 2
    tl.store(power, tl.sum(tl.sum(right * follow, 1), 0))
    tl.store(power + 1, wanted_power)


def _fake_restored(
    y: Tensor,
    of_y: Tensor,
    merged: Tensor,
    of_merged: Tensor,
    seen: Tensor,
    found: Tensor,
    power: Tensor,
    rows: Tensor,
    plane: list[int],
) -> Tensor:
    return y.new_empty((y.shape[0], seen.shape[1], y.shape[2]))


@operator(
    "restored(Tensor y, Tensor of_y, Tensor merged, Tensor of_merged, Tensor seen, Tensor found,"
    " Tensor power, Tensor rows, int[] plane) -> Tensor",
    _fake_restored,
)
def restored(
    y: Tensor,
    of_y: Tensor,
    merged: Tensor,
    of_merged: Tensor,
    seen: Tensor,
    found: Tensor,
    power: Tensor,
    rows: Tensor,
    plane: list[int],
) -> Tensor:
    """All tokens [B, L, C] of merged ones y [B, L', C]. They are the blur of copies, what it leaves
    of their group, and what the inputs tell within it. Arguments as the operators above take and
    give them.
    """
    y = y if y.stride(2) == 1 else y.contiguous()
    out = _fake_restored(y, of_y, merged, of_merged, seen, found, power, rows, plane)
    batch, length, rank = seen.shape
    groups, width = y.shape[1:]
    step = power_of_2(width, 16, 128)
    restored_kernel[(triton.cdiv(length, 64), batch, triton.cdiv(width, step))](
        y,
        of_y,
        merged,
        of_merged,
        seen,
        found,
        power,
        rows,
        out,
        *y.stride()[:2],
        length,
        groups,
        width,
        rank,
        power.shape[1],
        *plane,
        PRECISION=rounded_precision_of(y),
        BLOCK=64,
        BLOCK_D=step,
        RANK=_RANK,
        num_warps=8,
    )
    return out


@triton.jit
def restored_kernel(
    y: tl.tensor,
    of_y: tl.tensor,
    merged: tl.tensor,
    of_merged: tl.tensor,
    seen: tl.tensor,
    found: tl.tensor,
    power: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    stride_b: tl.tensor,
    stride_l: tl.tensor,
    length: tl.tensor,
    groups: tl.tensor,
    width: tl.tensor,
    rank: tl.tensor,
    chunks: tl.tensor,
    plane_h: tl.tensor,
    plane_w: tl.tensor,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RANK: tl.constexpr,
) -> None:
    sample = tl.program_id(1).to(tl.int64)
    i = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    real = i < length
    start = tl.program_id(2) * BLOCK_D
    rows += sample * length
    group = tl.load(rows + i, mask=real, other=0)
    merged += sample * groups * rank
    of_merged += sample * groups * rank
    within = block(seen + sample * length * rank, i * rank, real, 0, rank, RANK)
    within -= _blur(merged, rank, rows, i, real, 0, rank, plane_h, plane_w, BLOCK, RANK)
    within -= block(of_merged, group * rank, real, 0, rank, RANK)
    explained, wanted = 0.0, 0.0
    power += sample * chunks * 2
    for chunk in range(chunks):
        explained += tl.load(power + 2 * chunk)
        wanted += tl.load(power + 2 * chunk + 1)
    share = explained / tl.maximum(wanted, TINY)
    share = tl.where(share != share, share, tl.minimum(tl.maximum(share, 0.0), 1.0))
    r, column = tl.arange(0, RANK), start + tl.arange(0, BLOCK_D)
    at = found + sample * rank * width + r[:, None] * width + column[None, :]
    slope = tl.load(at, mask=(r < rank)[:, None] & (column < width)[None, :], other=0.0) * (
        share * share
    )
    x = _blur(
        y + sample * stride_b,
        stride_l,
        rows,
        i,
        real,
        start,
        width,
        plane_h,
        plane_w,
        BLOCK,
        BLOCK_D,
    )
    x += block(of_y + sample * groups * width, group * width, real, start, width, BLOCK_D).to(
        tl.float32
    )
    x = tl.dot(within, slope, x, input_precision=PRECISION)
    at = out + (sample * length + i)[:, None] * width + column[None, :]
    tl.store(at, x.to(out.dtype.element_ty), mask=real[:, None] & (column < width)[None, :])
