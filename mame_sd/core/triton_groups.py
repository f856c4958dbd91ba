"""Who merges with whom, and the means of groups, in Triton: no matrix of similarities is ever
written.

Programs work on one tile of one sample. Blocks are padded to powers of two and masked. So any width
of tokens will do, and any tile of at most 16 x 16 tokens, cut at an image's border too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mame_sd.core.triton_common import (
    block,
    destinations,
    operator,
    placed,
    power_of_2,
    precision_of,
    read_by,
    row_of,
    sources,
    widened,
)

LARGEST_RANKING = 2**14  # sources: ranks are found by comparing each with each


def _fake_nearest(
    x: Tensor,
    table: Tensor,
    draw: Tensor | None,
    sizes: list[int],
    leader: Tensor | None,
    special: int,
    ranked: bool,
) -> tuple[Tensor, Tensor]:
    _, n, tiles, _, _, length = sizes
    if ranked:
        shape = x.shape[0], tiles, n
        return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int64)
    return x.new_empty(0, dtype=torch.float32), x.new_empty(
        (x.shape[0], special + length), dtype=torch.int64
    )


@operator(
    "nearest(Tensor x, Tensor table, Tensor? draw, int[] sizes, Tensor? leader, int special, bool"
    " ranked) -> (Tensor, Tensor)",
    _fake_nearest,
)
def nearest(
    x: Tensor,
    table: Tensor,
    draw: Tensor | None,
    sizes: list[int],
    leader: Tensor | None,
    special: int,
    ranked: bool,
) -> tuple[Tensor, Tensor]:
    """The most similar destination of each source, by cosine.

    Args:
        x: the feature [B, L, d], without special tokens.
        table, draw, sizes: see `Table`.
        leader: whose tokens decide, LongTensor [B]; None: each sample's own.
        special: tokens before them.
        ranked: sources are still to be ranked.

    Returns:
        Ranked: the largest cosine of each source slot [B, T, n] fp32, and the group it would go to,
            [B, T, n]. Else nothing, and
        the group of every token, special ones too [B, special + L].
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    m, n, tiles, *_ = sizes
    best, rows = _fake_nearest(x, table, draw, sizes, leader, special, ranked)
    side = power_of_2(m, 16, 128)
    launch = {
        "BLOCK_M": side,
        "BLOCK_N": power_of_2(n, 16, 64),
        "BLOCK_D": 32,
        "num_warps": 4 if side <= 32 else 8,
    }
    grid = tiles, max(1, triton.cdiv(n, launch["BLOCK_N"])), x.shape[0]
    nearest_kernel[grid](
        x,
        best,
        rows,
        x if leader is None else leader,
        *x.stride()[:2],
        x.shape[2],
        special,
        **read_by(table, draw, sizes),
        LED=leader is not None,
        RANKED=ranked,
        SCALED=x.dtype != torch.float16,  # whose squares and their sums are in the range of fp32
        WIDE=widened(x),
        PRECISION=precision_of(x),
        **launch,
    )
    return best, rows


@triton.jit
def _in_range(largest: tl.tensor) -> tl.tensor:
    """2 ** -floor(log2(largest)), at most 2 ** 126 and at least 2 ** -126: with it, squares stay in
    range.
    """
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _inverse_norm(squares: tl.tensor) -> tl.tensor:
    return tl.where(squares == 0, 0.0, 1 / tl.sqrt(tl.where(squares == 0, 1.0, squares)))


@triton.jit
def nearest_kernel(
    x: tl.tensor,
    best: tl.tensor,
    rows: tl.tensor,
    leader: tl.tensor,
    stride_b: tl.tensor,
    stride_l: tl.tensor,
    d: tl.tensor,
    special: tl.tensor,
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
    LED: tl.constexpr,
    RANKED: tl.constexpr,
    SCALED: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    tile = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_N
    sample = tl.program_id(2).to(tl.int64)
    row = row_of(table, draw, row_length, draws, DRAWN)
    slots = row + L + tile * (m + n)
    gather = row + L + tiles * (m + n) + N
    looked_at = sample
    if LED:
        looked_at = tl.load(leader + sample).to(tl.int64)
    x += looked_at * stride_b
    dst, dst_real = destinations(slots, m, BLOCK_M)
    src, src_real = sources(slots, m, n, first, BLOCK_N)
    dst_at, src_at = dst * stride_l, src * stride_l
    dst_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    src_scale = tl.full([BLOCK_N], 1.0, tl.float32)
    if SCALED:
        dst_largest = tl.zeros([BLOCK_M], tl.float32)
        src_largest = tl.zeros([BLOCK_N], tl.float32)
        for start in range(0, d, BLOCK_D):
            a = block(x, dst_at, dst_real, start, d, BLOCK_D).to(tl.float32)
            b = block(x, src_at, src_real, start, d, BLOCK_D).to(tl.float32)
            dst_largest = tl.maximum(dst_largest, tl.max(tl.abs(a), 1))
            src_largest = tl.maximum(src_largest, tl.max(tl.abs(b), 1))
        dst_scale = _in_range(dst_largest)
        src_scale = _in_range(src_largest)
    dst_squares = tl.zeros([BLOCK_M], tl.float32)
    src_squares = tl.zeros([BLOCK_N], tl.float32)
    s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, d, BLOCK_D):
        a = block(x, dst_at, dst_real, start, d, BLOCK_D)
        b = block(x, src_at, src_real, start, d, BLOCK_D)
        if SCALED:  # by powers of two: exact
            a = (a.to(tl.float32) * dst_scale[:, None]).to(x.dtype.element_ty)
            b = (b.to(tl.float32) * src_scale[:, None]).to(x.dtype.element_ty)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        dst_squares += tl.sum(a.to(tl.float32) * a.to(tl.float32), 1)
        src_squares += tl.sum(b.to(tl.float32) * b.to(tl.float32), 1)
        s = tl.dot(a, tl.trans(b), s, input_precision=PRECISION)
    s *= _inverse_norm(dst_squares)[:, None] * _inverse_norm(src_squares)[None, :]
    s = tl.where(
        s != s, 2.0, tl.minimum(tl.maximum(s, -1.0), 1.0)
    )  # NaN is the largest, as in torch.max
    s = tl.where(dst_real[:, None], s, -2.0)
    base = tl.load(gather + tl.load(slots)).to(
        tl.int64
    )  # destinations of a tile are neighbours among the groups
    group = base + tl.argmax(s, 0)
    if RANKED:
        top = tl.max(s, 0)
        j = first + tl.arange(0, BLOCK_N)
        at = (sample * tiles + tile) * n + j
        tl.store(best + at, tl.where(top > 1.5, float("nan"), top), mask=j < n)
        tl.store(rows + at, group, mask=j < n)
    else:
        rows += sample * (special + L)
        tl.store(rows + special + src, special + group, mask=src_real)
        if first == 0:
            i = tl.arange(0, BLOCK_M)
            tl.store(rows + special + dst, special + base + i, mask=dst_real)
            if tile == 0:
                for start in range(0, special, BLOCK_M):
                    tl.store(rows + start + i, (start + i).to(tl.int64), mask=start + i < special)


def _fake_merging(
    best: Tensor, table: Tensor, draw: Tensor | None, sizes: list[int], merged: int
) -> Tensor:
    return best.new_empty((best.shape[0], sizes[4]), dtype=torch.int8)


@operator(
    "merging(Tensor best, Tensor table, Tensor? draw, int[] sizes, int merged) -> Tensor",
    _fake_merging,
)
def merging(
    best: Tensor, table: Tensor, draw: Tensor | None, sizes: list[int], merged: int
) -> Tensor:
    """1 for the `merged` most similar of the sources, ties by position, NaN last, else 0: int8 [B,
    N], by `best` [B, T, n].
    """
    out = _fake_merging(best, table, draw, sizes, merged)
    grid = triton.cdiv(sizes[4], 64), best.shape[0]
    merging_kernel[grid](best, out, merged, **read_by(table, draw, sizes), BLOCK=64, num_warps=4)
    return out


@triton.jit
def _ranked(best: tl.tensor, real: tl.tensor, j: tl.tensor, N: tl.tensor) -> tl.tensor:
    """The values by which sources rank: NaN is below all others."""
    value = tl.load(best + tl.load(real + j, mask=j < N, other=0), mask=j < N, other=-4.0)
    return tl.where(value != value, -3.0, value)


@triton.jit
def merging_kernel(
    best: tl.tensor,
    out: tl.tensor,
    merged: tl.tensor,
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
    BLOCK: tl.constexpr,
) -> None:
    sample = tl.program_id(1).to(tl.int64)
    real = row_of(table, draw, row_length, draws, DRAWN) + L + tiles * (m + n)
    best += sample * tiles * n
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = _ranked(best, real, i, N)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        other = _ranked(best, real, j, N)
        ahead = (other[None, :] > own[:, None]) | (
            (other[None, :] == own[:, None]) & (j[None, :] < i[:, None])
        )
        before += tl.sum(ahead.to(tl.int32), 1)
    tl.store(out + sample * N + i, (before < merged).to(tl.int8), mask=i < N)


def _fake_ranked_rows(
    merges: Tensor,
    group: Tensor,
    table: Tensor,
    draw: Tensor | None,
    sizes: list[int],
    special: int,
    stay: int,
) -> tuple[Tensor, Tensor]:
    batch, length = merges.shape[0], sizes[5]
    return group.new_empty((batch, special + length)), group.new_empty((batch, stay))


@operator(
    "ranked_rows(Tensor merges, Tensor group, Tensor table, Tensor? draw, int[] sizes, int special,"
    " int stay) -> (Tensor, Tensor)",
    _fake_ranked_rows,
)
def ranked_rows(
    merges: Tensor,
    group: Tensor,
    table: Tensor,
    draw: Tensor | None,
    sizes: list[int],
    special: int,
    stay: int,
) -> tuple[Tensor, Tensor]:
    """The group of every token [B, special + L], and the preserved sources [B, stay], ascending.

    Args:
        merges: which sources merge, int8 [B, N].
        group: where each would go [B, T, n].
        stay: how many don't merge.
    """
    rows, preserved = _fake_ranked_rows(merges, group, table, draw, sizes, special, stay)
    *_, M, N, _ = sizes
    grid = triton.cdiv(max(M, N, special), 128), merges.shape[0]
    ranked_rows_kernel[grid](
        merges,
        group,
        rows,
        preserved,
        special,
        stay,
        **read_by(table, draw, sizes),
        BLOCK=128,
        num_warps=4,
    )
    return rows, preserved


@triton.jit
def ranked_rows_kernel(
    merges: tl.tensor,
    group: tl.tensor,
    rows: tl.tensor,
    preserved: tl.tensor,
    special: tl.tensor,
    stay: tl.tensor,
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
    BLOCK: tl.constexpr,
) -> None:
    sample = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    row = row_of(table, draw, row_length, draws, DRAWN)
    dst, src, real = row, row + M, row + L + tiles * (m + n)
    merges += sample * N
    group += sample * tiles * n
    rows += sample * (special + L)
    i = first + tl.arange(0, BLOCK)
    before = 0
    for start in range(0, tl.minimum(first, N), BLOCK):
        j = start + tl.arange(0, BLOCK)
        before += tl.sum(1 - tl.load(merges + j, mask=j < N, other=1).to(tl.int32), 0)
    stays = 1 - tl.load(merges + i, mask=i < N, other=1).to(tl.int32)
    rank = before + tl.cumsum(stays, 0) - stays
    nearest_group = tl.load(group + tl.load(real + i, mask=i < N, other=0), mask=i < N, other=0)
    at = tl.load(src + i, mask=i < N, other=0).to(tl.int64)
    tl.store(
        rows + special + at,
        special + tl.where(stays == 1, M + rank.to(tl.int64), nearest_group),
        mask=i < N,
    )
    tl.store(preserved + sample * stay + rank, i.to(tl.int64), mask=(i < N) & (stays == 1))
    at = tl.load(dst + i, mask=i < M, other=0).to(tl.int64)
    tl.store(rows + special + at, special + i.to(tl.int64), mask=i < M)
    tl.store(rows + i, i.to(tl.int64), mask=i < special)


def _fake_means(
    t: Tensor,
    rows: Tensor,
    table: Tensor,
    draw: Tensor | None,
    sizes: list[int],
    size: list[int],
    special: int,
    around: list[int],
    groups: int,
    sample: int,
    proportional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, _, width = t.shape
    count = groups + sum(around)
    # Heads lie behind tokens in memory, as projections leave them.
    out = t.new_empty((batch, count + sample, heads, width)).transpose(1, 2)
    logs = t.new_empty((batch, count) if proportional else (0,))
    return out, t.new_empty((batch, count), dtype=torch.float32), logs


@operator(
    "group_means(Tensor t, Tensor rows, Tensor table, Tensor? draw, int[] sizes, int[] size, int"
    " special, int[] around, int groups, int sample, bool proportional)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_means,
)
def group_means(
    t: Tensor,
    rows: Tensor,
    table: Tensor,
    draw: Tensor | None,
    sizes: list[int],
    size: list[int],
    special: int,
    around: list[int],
    groups: int,
    sample: int,
    proportional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of each group of tokens, and beside them what stands for itself.

    Args:
        t: [B, H, before + L + after, D], any strides: the tokens that were planned, with others
            before and after them.
        rows: the group of each token [B, special + L], counted from `special` on.
        table, draw, sizes: see `Table`.
        size: (times, height, width) of the tokens that were planned, see `placed`; (1, 1, L) where
            they lie as planned.
        special: special tokens that the plan counts.
        around: (before, after).
        groups: M and the preserved sources.
        sample: how many of the partition's sampled tokens are to follow.
        proportional: logarithms are wanted.

    Returns:
        [B, H, before + groups + after + sample, D]. Also how many tokens each but the sampled
        stands for [B, before + groups + after] fp32. Also the logarithms of these in the dtype of
        `t`, where they are wanted.
    """
    t = t if t.stride(3) == 1 else t.contiguous()
    out, counts, logs = _fake_means(
        t, rows, table, draw, sizes, size, special, around, groups, sample, proportional
    )
    m, n, tiles, *_ = sizes
    batch, heads, _, width = t.shape
    side, step = power_of_2(m, 16, 128), power_of_2(n, 16, 64)
    blocks = triton.cdiv(width, 64)
    alone = sum(around) + sample
    grid = tiles + triton.cdiv(alone, 64), batch * heads, blocks
    means_kernel[grid](
        t,
        out,
        counts,
        logs,
        rows,
        *t.stride()[:3],
        *out.stride()[:3],
        heads,
        width,
        special,
        *around,
        groups,
        sample,
        *size,
        **read_by(table, draw, sizes),
        PROPORTIONAL=proportional,
        WIDE=widened(t),
        PRECISION=precision_of(t),
        BLOCK_M=side,
        BLOCK_N=step,
        BLOCK_D=power_of_2(width, 16, 64),
        BLOCK_ALONE=64,
        num_warps=4 if side <= 32 else 8,
    )
    return out, counts, logs


@triton.jit
def means_kernel(
    t: tl.tensor,
    out: tl.tensor,
    counts: tl.tensor,
    logs: tl.tensor,
    rows: tl.tensor,
    stride_b: tl.tensor,
    stride_h: tl.tensor,
    stride_l: tl.tensor,
    out_b: tl.tensor,
    out_h: tl.tensor,
    out_l: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    special: tl.tensor,
    ahead: tl.tensor,
    after: tl.tensor,
    groups: tl.tensor,
    sampled: tl.tensor,
    times: tl.tensor,
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
    PROPORTIONAL: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ALONE: tl.constexpr,
) -> None:
    tile = tl.program_id(0).to(tl.int64)
    sample, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    start = tl.program_id(2) * BLOCK_D
    row = row_of(table, draw, row_length, draws, DRAWN)
    t += sample * stride_b + head * stride_h
    out += sample * out_b + head * out_h
    rows += sample * (special + L) + special
    kept = ahead + groups + after
    counts += sample * kept
    logs += sample * kept
    column = start + tl.arange(0, BLOCK_D)
    inside = column < width
    counting = (head == 0) & (start == 0)
    if tile < tiles:
        slots = row + L + tile * (m + n)
        i = tl.arange(0, BLOCK_M)
        dst, dst_real = destinations(slots, m, BLOCK_M)
        base = tl.load(rows + tl.load(slots)) - special
        at = (ahead + placed(dst, times, plane_h, plane_w)) * stride_l
        sums = block(t, at, dst_real, start, width, BLOCK_D).to(tl.float32)
        count = tl.full([BLOCK_M], 1.0, tl.float32)
        for first in range(0, n, BLOCK_N):
            src, src_real = sources(slots, m, n, first, BLOCK_N)
            group = tl.load(rows + src, mask=src_real, other=0) - special
            alone = src_real & (group >= M)  # preserved
            at = (ahead + placed(src, times, plane_h, plane_w)) * stride_l
            values = block(t, at, src_real, start, width, BLOCK_D)
            to = out + (ahead + group)[:, None] * out_l + column[None, :]
            tl.store(to, values, mask=alone[:, None] & inside[None, :])
            its = (group[None, :] - base == i[:, None]) & (src_real & (group < M))[None, :]
            finite = tl.abs(values.to(tl.float32)) < float("inf")  # not so of NaN
            clean = tl.where(finite, values, 0.0)
            if WIDE:
                clean = clean.to(tl.float32)
            sums = tl.dot(its.to(clean.dtype), clean, sums, input_precision=PRECISION)
            count += tl.sum(its.to(tl.float32), 1)
            if (
                tl.min(finite.to(tl.int32)) == 0
            ):  # what is not finite stays within its group: 0 times it is NaN
                for k in range(first, tl.minimum(first + BLOCK_N, n)):
                    position = tl.load(slots + m + k).to(tl.int64)
                    goes = tl.load(rows + position) - special - base
                    goes = tl.where(position == tl.load(slots), -1, goes)
                    one = (ahead + placed(position, times, plane_h, plane_w)) * stride_l
                    value = tl.load(t + one + column, mask=inside, other=0.0).to(tl.float32)
                    value = tl.where(tl.abs(value) < float("inf"), 0.0, value)
                    sums += tl.where((i == goes)[:, None], value[None, :], 0.0)
        mean = (sums / count[:, None]).to(out.dtype.element_ty)
        to = out + (ahead + base + i)[:, None] * out_l + column[None, :]
        tl.store(to, mean, mask=dst_real[:, None] & inside[None, :])
        if counting:
            tl.store(counts + ahead + base + i, count, mask=dst_real)
            if PROPORTIONAL:
                tl.store(
                    logs + ahead + base + i, tl.log(count).to(logs.dtype.element_ty), mask=dst_real
                )
    else:
        e = (tile - tiles) * BLOCK_ALONE + tl.arange(0, BLOCK_ALONE)
        nth = e - ahead - after
        its_sample = (nth >= 0) & (nth < sampled)
        place = tl.load(row + 2 * L + tiles * (m + n) + N + L + nth, mask=its_sample, other=0).to(
            tl.int64
        )
        alone_at = tl.where(e < ahead, e, e + L)
        alone_at = tl.where(its_sample, ahead + placed(place, times, plane_h, plane_w), alone_at)
        alone_to = tl.where(e < ahead, e, e + groups)
        alone_real = e < ahead + after + sampled
        alone_values = block(t, alone_at * stride_l, alone_real, start, width, BLOCK_D)
        tl.store(
            out + alone_to[:, None] * out_l + column[None, :],
            alone_values,
            mask=alone_real[:, None] & inside[None, :],
        )
        if counting:
            tl.store(counts + alone_to, 1.0, mask=e < ahead + after)
            if PROPORTIONAL:
                tl.store(logs + alone_to, 0.0, mask=e < ahead + after)
    if counting & (tile == 0):  # preserved sources
        for begin in range(M, groups, BLOCK_M):
            g = begin + tl.arange(0, BLOCK_M)
            tl.store(counts + ahead + g, 1.0, mask=g < groups)
            if PROPORTIONAL:
                tl.store(logs + ahead + g, 0.0, mask=g < groups)
