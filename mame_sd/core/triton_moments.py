"""The first-order correction of attention (`correction.py`) in Triton: its moments in two launches,
the sum in one.

Sums over the sample and over the means are cut into chunks, so that there are programs enough for a
card: one for each chunk. The chunks are added in a fixed order, so the same call gives the same
result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mame_sd.core.triton_common import (
    TINY,
    block,
    operator,
    placed,
    power_of_2,
    read_by,
    rounded_precision_of,
    row_of,
)

_PROGRAMS = 256  # about as many as a card wants
_ROWS = 128  # that a program adds up at least: each writes its sums down, and another reads them
_SIDE = 64  # of the part of a covariance that a program holds


def _fake_partial_moments(
    key: Tensor,
    value: Tensor,
    drawn_key: Tensor,
    drawn_value: Tensor,
    rows: Tensor,
    counts: Tensor,
    table: Tensor,
    draw: Tensor | None,
    sizes: list[int],
    size: list[int],
    sample: int,
    first: list[int],
    kept: int,
    proportional: bool,
) -> tuple[Tensor, Tensor]:
    (batch, heads, _, width), wide = key.shape, value.shape[3]
    sides = triton.cdiv(width, _SIDE) * triton.cdiv(wide, _SIDE)
    most = min(8, triton.cdiv(_PROGRAMS, batch * heads * sides))
    drawn, means = (max(1, min(most, triton.cdiv(count, _ROWS))) for count in (sample, kept))
    means = 0 if proportional else means
    made = key.new_empty(0, dtype=torch.float32)
    covariances = made.new_empty((batch * heads, 2 * drawn + means, wide, width))
    return covariances, made.new_empty((batch * heads, means, 2, width + wide))


@operator(
    "partial_moments(Tensor key, Tensor value, Tensor drawn_key, Tensor drawn_value, Tensor rows,"
    " Tensor counts, Tensor table, Tensor? draw, int[] sizes, int[] size, int sample, int[] first,"
    " int kept, bool proportional) -> (Tensor, Tensor)",
    _fake_partial_moments,
)
def partial_moments(
    key: Tensor,
    value: Tensor,
    drawn_key: Tensor,
    drawn_value: Tensor,
    rows: Tensor,
    counts: Tensor,
    table: Tensor,
    draw: Tensor | None,
    sizes: list[int],
    size: list[int],
    sample: int,
    first: list[int],
    kept: int,
    proportional: bool,
) -> tuple[Tensor, Tensor]:
    """Sums over chunks of the kept keys and of the sample, from which `lacking` makes what
    attention lacks.

    Args:
        key, value: the means [B, H, n, D] and [B, H, n, D'], any strides.
        drawn_key, drawn_value: those of tokens, [B, H, N, D] and [B, H, N, D'].
        rows: the group of each token [B, L].
        counts: how many tokens each of the keys stands for, [B, n] fp32.
        table, draw, sizes: see `Table`.
        size: (times, height, width) of the tokens, see `placed`.
        sample: how many of the partition's sampled tokens are looked at.
        first: where the groups' keys begin in `key`; where tokens begin in `drawn_key`; and 1 where
            the sampled ones stand there by themselves, one after the other, else 0.
        kept: how many groups there are.
        proportional: logits count keys: only what varies within groups is lacking.

    Returns:
        Of each head sums of products [B * H, 2 d + m, D', D]. Two of each of the sample's d chunks
        are of differences from the means, the even ones and the odd ones. One of each of the means'
        m chunks is of the means, each times its share less 1 / kept. And sums [B * H, m, 2, D + D']
        of the means, so weighted, and by themselves. Means are counted from about their middle.
    """
    key, value, drawn_key, drawn_value = (
        t if t.stride(3) == 1 else t.contiguous() for t in (key, value, drawn_key, drawn_value)
    )
    covariances, sums = _fake_partial_moments(
        key,
        value,
        drawn_key,
        drawn_value,
        rows,
        counts,
        table,
        draw,
        sizes,
        size,
        sample,
        first,
        kept,
        proportional,
    )
    (batch, heads, _, width), wide = key.shape, value.shape[3]
    means = sums.shape[1]
    chunks = (covariances.shape[1] - means) // 2
    side_k, side_v = power_of_2(width, 16, _SIDE), power_of_2(wide, 16, _SIDE)
    parts = triton.cdiv(width, side_k)
    step = (
        32 if key.dtype == torch.float32 else 64
    )  # keys of one step: more of fp32 would not fit on the chip
    partial_moments_kernel[(chunks + means, batch * heads, parts * triton.cdiv(wide, side_v))](
        key,
        value,
        drawn_key,
        drawn_value,
        rows,
        counts,
        covariances,
        sums,
        *key.stride()[:3],
        *value.stride()[:3],
        *drawn_key.stride()[:3],
        *drawn_value.stride()[:3],
        rows.stride(0),
        counts.stride(0),
        heads,
        width,
        wide,
        first[0],
        first[1],
        kept,
        sample,
        triton.cdiv(triton.cdiv(kept, max(1, means)), step) * step,
        triton.cdiv(triton.cdiv(triton.cdiv(sample, 2), chunks), step) * step,
        chunks,
        means,
        *size,
        parts,
        **read_by(table, draw, sizes),
        PROPORTIONAL=proportional,
        APART=bool(first[2]),
        PRECISION=rounded_precision_of(key),
        BLOCK=step,
        SIDE_K=side_k,
        SIDE_V=side_v,
        num_warps=8,
        num_stages=1,
    )
    return covariances, sums


@triton.jit
def _middle(
    t: tl.tensor,
    stride: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    kept: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The mean of the first rows: about where all of them lie, alike for each chunk."""
    i = tl.arange(0, BLOCK).to(tl.int64)
    real = (i < kept)[:, None] & inside[None, :]
    values = tl.load(t + i[:, None] * stride + column[None, :], mask=real, other=0.0).to(tl.float32)
    return tl.sum(values, 0) / tl.minimum(kept, BLOCK)


@triton.jit
def partial_moments_kernel(
    key: tl.tensor,
    value: tl.tensor,
    drawn_key: tl.tensor,
    drawn_value: tl.tensor,
    rows: tl.tensor,
    counts: tl.tensor,
    covariances: tl.tensor,
    sums: tl.tensor,
    key_b: tl.tensor,
    key_h: tl.tensor,
    key_l: tl.tensor,
    value_b: tl.tensor,
    value_h: tl.tensor,
    value_l: tl.tensor,
    drawn_key_b: tl.tensor,
    drawn_key_h: tl.tensor,
    drawn_key_l: tl.tensor,
    drawn_value_b: tl.tensor,
    drawn_value_h: tl.tensor,
    drawn_value_l: tl.tensor,
    rows_b: tl.tensor,
    counts_b: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    wide: tl.tensor,
    first_key: tl.tensor,
    first_drawn: tl.tensor,
    kept: tl.tensor,
    sampled: tl.tensor,
    keys_each: tl.tensor,
    pairs_each: tl.tensor,
    chunks: tl.tensor,
    means: tl.tensor,
    times: tl.tensor,
    plane_h: tl.tensor,
    plane_w: tl.tensor,
    parts: tl.tensor,
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
    APART: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    SIDE_K: tl.constexpr,
    SIDE_V: tl.constexpr,
) -> None:
    chunk, both = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sample, head = both // heads, both % heads
    part_k, part_v = tl.program_id(2) % parts, tl.program_id(2) // parts
    at_k, at_v = part_k * SIDE_K + tl.arange(0, SIDE_K), part_v * SIDE_V + tl.arange(0, SIDE_V)
    in_k, in_v = at_k < width, at_v < wide
    key += sample * key_b + head * key_h + first_key * key_l
    value += sample * value_b + head * value_h + first_key * value_l
    drawn_key += sample * drawn_key_b + head * drawn_key_h + first_drawn * drawn_key_l
    drawn_value += sample * drawn_value_b + head * drawn_value_h + first_drawn * drawn_value_l
    rows += sample * rows_b
    counts += sample * counts_b + first_key
    picked = row_of(table, draw, row_length, draws, DRAWN) + 3 * L + tiles * (m + n) + N

    area, line = wide * width, width + wide
    inside = in_v[:, None] & in_k[None, :]
    out = covariances + both * (2 * chunks + means) * area + at_v[:, None] * width + at_k[None, :]
    if chunk < chunks:
        even = tl.zeros([SIDE_V, SIDE_K], tl.float32)
        odd = tl.zeros([SIDE_V, SIDE_K], tl.float32)
        first_half = (sampled + 1) // 2
        last = tl.minimum((chunk + 1) * pairs_each, first_half)
        for start in range(chunk * pairs_each, last, BLOCK):
            pair = start + tl.arange(0, BLOCK)
            for half in tl.static_range(2):
                s = pair + half * first_half
                real = (s < sampled) & (pair < last)
                place = tl.load(picked + s, mask=real, other=0).to(tl.int64)
                mean = tl.load(rows + place, mask=real, other=0)
                at = placed(place, times, plane_h, plane_w)
                if APART:
                    at = s.to(tl.int64)
                k = block(drawn_key, at * drawn_key_l, real, part_k * SIDE_K, width, SIDE_K).to(
                    tl.float32
                )
                v = block(drawn_value, at * drawn_value_l, real, part_v * SIDE_V, wide, SIDE_V).to(
                    tl.float32
                )
                k -= block(key, mean * key_l, real, part_k * SIDE_K, width, SIDE_K).to(tl.float32)
                v -= block(value, mean * value_l, real, part_v * SIDE_V, wide, SIDE_V).to(
                    tl.float32
                )
                if half == 0:
                    even = tl.dot(tl.trans(v), k, even, input_precision=PRECISION)
                else:
                    odd = tl.dot(tl.trans(v), k, odd, input_precision=PRECISION)
        tl.store(out + 2 * chunk * area, even, mask=inside)
        tl.store(out + (2 * chunk + 1) * area, odd, mask=inside)
    else:
        if not PROPORTIONAL:
            part = chunk - chunks
            middle_k = _middle(key, key_l, at_k, in_k, kept, BLOCK)
            middle_v = _middle(value, value_l, at_v, in_v, kept, BLOCK)
            between = tl.zeros([SIDE_V, SIDE_K], tl.float32)
            sum_k = tl.zeros([SIDE_K], tl.float32)
            sum_v = tl.zeros([SIDE_V], tl.float32)
            apart_k = tl.zeros([SIDE_K], tl.float32)
            apart_v = tl.zeros([SIDE_V], tl.float32)
            until = tl.minimum((part + 1) * keys_each, kept)
            for begin in range(part * keys_each, until, BLOCK):
                i = (begin + tl.arange(0, BLOCK)).to(tl.int64)
                known = i < until
                share = tl.load(counts + i, mask=known, other=0.0) / L
                share -= tl.where(known, 1.0 / kept, 0.0)
                of_k = block(key, i * key_l, known, part_k * SIDE_K, width, SIDE_K).to(tl.float32)
                of_v = block(value, i * value_l, known, part_v * SIDE_V, wide, SIDE_V).to(
                    tl.float32
                )
                of_k = tl.where(known[:, None], of_k - middle_k[None, :], 0.0)
                of_v = tl.where(known[:, None], of_v - middle_v[None, :], 0.0)
                weighed = share[:, None] * of_k
                between = tl.dot(tl.trans(of_v), weighed, between, input_precision=PRECISION)
                sum_k += tl.sum(of_k, 0)
                sum_v += tl.sum(of_v, 0)
                apart_k += tl.sum(weighed, 0)
                apart_v += tl.sum(share[:, None] * of_v, 0)
            tl.store(out + (chunks + chunk) * area, between, mask=inside)
            sums += (both * means + part) * 2 * line
            if part_v == 0:
                tl.store(sums + at_k, apart_k, mask=in_k)
                tl.store(sums + line + at_k, sum_k, mask=in_k)
            if part_k == 0:
                tl.store(sums + width + at_v, apart_v, mask=in_v)
                tl.store(sums + line + width + at_v, sum_v, mask=in_v)


def _fake_lacking(
    covariances: Tensor, sums: Tensor, kept: int, sample: int, factor: float, proportional: bool
) -> tuple[Tensor, Tensor]:
    both, _, wide, width = covariances.shape
    return covariances.new_empty((both, width, wide)), covariances.new_empty(
        (0 if proportional else both, wide)
    )


@operator(
    "lacking(Tensor covariances, Tensor sums, int kept, int sample, float factor,"
    " bool proportional) -> (Tensor, Tensor)",
    _fake_lacking,
)
def lacking(
    covariances: Tensor, sums: Tensor, kept: int, sample: int, factor: float, proportional: bool
) -> tuple[Tensor, Tensor]:
    """What attention over means lacks, from `partial_moments`. It is `factor` times the covariance,
    transposed, [B * H, D, D']. The shift is [B * H, D'] (none where logits count the keys), in
    fp32.
    """
    product, shift = _fake_lacking(covariances, sums, kept, sample, factor, proportional)
    (both, slots, wide, width), means = covariances.shape, sums.shape[1]
    lacking_kernel[(both,)](
        covariances,
        sums,
        product,
        shift,
        (slots - means) // 2,
        means,
        width,
        wide,
        kept,
        max(1, sample // 2),
        factor,
        PROPORTIONAL=proportional,
        SIDE_K=power_of_2(width, 16, _SIDE),
        SIDE_V=power_of_2(wide, 16, _SIDE),
        num_warps=8,
    )
    return product, shift


@triton.jit
def _added_up(
    t: tl.tensor, at: tl.tensor, real: tl.tensor, chunks: tl.tensor, stride: tl.tensor
) -> tl.tensor:
    """What lies at the offsets `at` of each chunk, added up in order."""
    found = tl.load(t + at, mask=real, other=0.0)
    for chunk in range(1, chunks):
        found += tl.load(t + chunk * stride + at, mask=real, other=0.0)
    return found


@triton.jit
def lacking_kernel(
    covariances: tl.tensor,
    sums: tl.tensor,
    product: tl.tensor,
    shift: tl.tensor,
    chunks: tl.tensor,
    means: tl.tensor,
    width: tl.tensor,
    wide: tl.tensor,
    kept: tl.tensor,
    half: tl.tensor,
    factor: tl.tensor,
    PROPORTIONAL: tl.constexpr,
    SIDE_K: tl.constexpr,
    SIDE_V: tl.constexpr,
) -> None:
    both = tl.program_id(0).to(tl.int64)
    area, line = wide * width, width + wide
    covariances += both * (2 * chunks + means) * area
    sums += both * means * 2 * line
    signal, power = 0.0, 0.0
    for start_v in range(0, wide, SIDE_V):
        at_v = start_v + tl.arange(0, SIDE_V)
        for start_k in range(0, width, SIDE_K):
            at_k = start_k + tl.arange(0, SIDE_K)
            real = (at_v < wide)[:, None] & (at_k < width)[None, :]
            at = at_v[:, None] * width + at_k[None, :]
            a = _added_up(covariances, at, real, chunks, 2 * area) / half
            b = _added_up(covariances + area, at, real, chunks, 2 * area) / half
            within = (a + b) / 2
            signal += tl.sum(tl.sum(a * b, 1), 0)
            power += tl.sum(tl.sum(within * within, 1), 0)
    # What the sample shows is shrunk by how little its two halves agree.
    share = signal / tl.maximum(power, TINY)
    share = tl.where(share != share, share, tl.minimum(tl.maximum(share, 0.0), 1.0))
    for start_v in range(0, wide, SIDE_V):
        at_v = start_v + tl.arange(0, SIDE_V)
        in_v = at_v < wide
        for start_k in range(0, width, SIDE_K):
            at_k = start_k + tl.arange(0, SIDE_K)
            in_k = at_k < width
            real = in_v[:, None] & in_k[None, :]
            at = at_v[:, None] * width + at_k[None, :]
            a = _added_up(covariances, at, real, chunks, 2 * area) / half
            b = _added_up(covariances + area, at, real, chunks, 2 * area) / half
            found = share * (a + b) / 2
            if not PROPORTIONAL:
                # Cov_sizes - Cov_alike of the means: the sum weighted by the difference of the
                # shares, less what their means are apart.
                found += _added_up(covariances + 2 * chunks * area, at, real, means, area)
                apart_k = _added_up(sums, at_k, in_k, means, 2 * line)
                apart_v = _added_up(sums + width, at_v, in_v, means, 2 * line)
                mean_k = _added_up(sums + line, at_k, in_k, means, 2 * line) / kept
                mean_v = _added_up(sums + line + width, at_v, in_v, means, 2 * line) / kept
                found -= (
                    mean_v[:, None] * apart_k[None, :]
                    + apart_v[:, None] * (mean_k + apart_k)[None, :]
                )
                if start_k == 0:
                    tl.store(shift + both * wide + at_v, apart_v, mask=in_v)
            to = product + both * area + at_k[None, :] * wide + at_v[:, None]
            tl.store(to, factor * found, mask=real)


def _fake_add_lacking(output: Tensor, query: Tensor, product: Tensor, shift: Tensor) -> None:
    return None


@operator(
    "add_lacking(Tensor(a!) output, Tensor query, Tensor product, Tensor shift) -> ()",
    _fake_add_lacking,
)
def add_lacking(output: Tensor, query: Tensor, product: Tensor, shift: Tensor) -> None:
    """Adds query @ product + shift to attention's output, in its place.

    Args:
        output: [B, H, Q, D'], the last dimension dense.
        query: [B, H, Q, D].
        product, shift: as `lacking` gives them.
    """
    query = query if query.stride(3) == 1 else query.contiguous()
    (batch, heads, queries, width), wide = query.shape, output.shape[3]
    side = power_of_2(wide, 16, _SIDE)
    grid = triton.cdiv(queries, 128), batch * heads, triton.cdiv(wide, side)
    add_lacking_kernel[grid](
        output,
        query,
        product,
        shift,
        *output.stride()[:3],
        *query.stride()[:3],
        heads,
        queries,
        width,
        wide,
        SHIFTED=shift.shape[0] > 0,
        PRECISION=rounded_precision_of(query),
        BLOCK=128,
        SIDE=side,
        STEP=32,
        num_warps=8,
    )


@triton.jit
def add_lacking_kernel(
    output: tl.tensor,
    query: tl.tensor,
    product: tl.tensor,
    shift: tl.tensor,
    output_b: tl.tensor,
    output_h: tl.tensor,
    output_l: tl.tensor,
    query_b: tl.tensor,
    query_h: tl.tensor,
    query_l: tl.tensor,
    heads: tl.tensor,
    queries: tl.tensor,
    width: tl.tensor,
    wide: tl.tensor,
    SHIFTED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    both = tl.program_id(1).to(tl.int64)
    sample, head = both // heads, both % heads
    i = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    real = i < queries
    column = tl.program_id(2) * SIDE + tl.arange(0, SIDE)
    inside = column < wide
    query += sample * query_b + head * query_h
    product += both * width * wide
    added = tl.zeros([BLOCK, SIDE], tl.float32)
    for start in range(0, width, STEP):
        q = block(query, i * query_l, real, start, width, STEP).to(tl.float32)
        k = start + tl.arange(0, STEP)
        p = tl.load(
            product + k[:, None] * wide + column[None, :],
            mask=(k < width)[:, None] & inside[None, :],
            other=0.0,
        )
        added = tl.dot(q, p, added, input_precision=PRECISION)
    if SHIFTED:
        added += tl.load(shift + both * wide + column, mask=inside, other=0.0)[None, :]
    at = output + sample * output_b + head * output_h + i[:, None] * output_l + column[None, :]
    mask = real[:, None] & inside[None, :]
    before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (before + added).to(output.dtype.element_ty), mask=mask)
