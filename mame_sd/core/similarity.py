"""How alike tokens are: S of destinations and sources (paper, "Similarity-Based Fusion Matrix"),
tile by tile.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mame_sd.core.buffers import masked_fill
from mame_sd.core.partition import Positions

# Of each dtype the integers of its size, and the bits of its exponent: alone they are the power of
# two below a number.
_EXPONENTS = {
    torch.float64: (torch.int64, 0x7FF << 52),
    torch.float32: (torch.int32, 0xFF << 23),
    torch.bfloat16: (torch.int16, 0xFF << 7),
}


def similarity_of(x: Tensor, pos: Positions, metric: str) -> Tensor:
    """S [B, T, m, n] of tokens x [B, L, d], in fp32 (fp64 of fp64); padded destinations are -inf:
    nothing merges into them.
    """
    b, _, d = x.shape
    blocks = blocks_of(
        x, pos.slots
    )  # [B * T, m + n, d], a buffer of our own: what follows may overwrite it
    if metric == "cosine":
        s = _cosine(blocks, pos.m)
    else:
        dst, src = blocks.to(torch.promote_types(x.dtype, torch.float32)).split([pos.m, pos.n], 1)
        if metric == "euclidean":
            s = torch.cdist(dst, src, compute_mode="donot_use_mm_for_euclid_dist") * -(d**-0.5)
        else:  # dot, and what softmax is of
            s = _product(dst * d**-0.5, src)
    s = s.view(b, pos.blocks, pos.m, pos.n)
    if pos.dst_pad is not None:
        s = masked_fill(s, pos.dst_pad.unsqueeze(-1), -math.inf)
    return torch.softmax(s, -2) if metric == "softmax" else s


def nearest(x: Tensor, pos: Positions, metric: str, ranked: bool = True) -> tuple[Tensor, Tensor]:
    """Of each source of x [B, L, d] the largest S and its destination, both [B, T, n]; the first
    where several are as near.

    Args:
        x: without gradients.
        ranked: sources are to be compared with one another too. If not, only the destination
            counts, and cosine may leave out the norm of the source. Its tokens are then taken as
            they are (below 1e37).
    """
    halves = x.is_cuda and x.dtype in (
        torch.float16,
        torch.bfloat16,
    )  # whose products are faster as they are
    if metric != "cosine" or ranked or halves or pos.dst_pad is not None:
        best, row = similarity_of(x, pos, metric).max(-2)
        return best, row
    blocks = blocks_of(x, pos.slots).to(torch.promote_types(x.dtype, torch.float32))
    dst, src = blocks.split([pos.m, pos.n], 1)
    dst = _in_range(dst.contiguous(), free=True)
    best, row = _product(dst.mul_(_inverse_norm(dst)), src).max(-2)
    shape = x.shape[0], pos.blocks, pos.n
    return best.view(shape), row.view(shape)


def nearest_of_tiles(
    x: Tensor, pos: Positions, ranked: bool, leader: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`nearest` by cosine of each sample's leader in few operations, without gradients:
    similarities are scaled, and not tokens.
    """
    slots = pos.slots.flatten()
    blocks = x.index_select(1, slots) if leader is None else x[leader.unsqueeze(1), slots]
    blocks = blocks.view(-1, pos.m + pos.n, x.shape[2])
    if x.dtype != torch.float16:  # whose squares and their sums are in the range of fp32
        blocks = _in_range(blocks, free=True)
    norm = torch.linalg.vector_norm(
        blocks if ranked else blocks[:, : pos.m], dim=-1, dtype=torch.float32
    ).clamp_(min=torch.finfo(torch.float32).tiny)
    s = product(blocks[:, : pos.m], blocks[:, pos.m :].transpose(1, 2))
    s.div_(norm[:, : pos.m].unsqueeze(-1))
    if pos.dst_pad is not None:
        s = masked_fill(s.view(-1, pos.blocks, *s.shape[1:]), pos.dst_pad.unsqueeze(-1), -math.inf)
    best, row = s.max(-2)
    if ranked:
        best = best.view(norm.shape[0], pos.n).div_(norm[:, pos.m :]).clamp_(-1, 1)
    shape = x.shape[0], pos.blocks, pos.n
    return best.view(shape), row.view(shape)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b [n, i, k] of a [n, i, j] and b [n, j, k], exact to fp32 and in fp32. This holds of halves
    too, and where the user lets CUDA's fp32 products run in TF32.
    """
    if a.dtype == torch.float32:
        return _product(a, b.transpose(1, 2))
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def preserved_by_tau(stays: Tensor, pos: Positions) -> Tensor:
    """The preserved sources [r], ascending: those that some sample does not merge.

    Args:
        stays: bool [T, n], where some sample has no destination above tau for a source.
    """
    return stays.flatten().index_select(0, pos.src_real).nonzero().squeeze(-1)


def merged_by_keep(pos: Positions, keep: float) -> int:
    """How many sources merge for a share `keep` of the tokens to stay, as all destinations do."""
    return pos.L - max(pos.M, round(keep * pos.L))


def preserved_by_keep(best: Tensor, pos: Positions, keep: float, ascending: bool = True) -> Tensor:
    """The preserved sources [B, r].

    Args:
        best: [B, T, n], the largest similarity of every source slot. The highest merge, ties by
            position, NaN ranks last.
        keep: share of the tokens to keep.
        ascending: by position; else the most similar come first.
    """
    b, merged = best.shape[0], pos.L - max(pos.M, round(keep * pos.L))
    if merged == pos.N:
        return torch.empty(b, 0, dtype=torch.long, device=best.device)
    if not merged:
        return torch.arange(pos.N, device=best.device).expand(b, -1)
    last = torch.finfo(best.dtype).min
    best = torch.nan_to_num(best.detach(), nan=last, posinf=math.inf, neginf=-math.inf)
    of_sources = best.flatten(1).index_select(1, pos.src_real)
    preserved = of_sources.argsort(dim=1, descending=True, stable=True)[:, merged:]
    return preserved.sort(dim=1).values if ascending else preserved


def blocks_of(t: Tensor, slots: Tensor) -> Tensor:
    """Rows of t [B, L, C] at `slots` [T, k], as [B * T, k, C]; always a copy."""
    (batch, length, channels), (blocks, k) = t.shape, slots.shape
    first = torch.arange(0, batch * length, length, device=slots.device).unsqueeze(1)
    every = (slots.flatten() + first).flatten()
    rows = t.reshape(batch * length, channels).index_select(0, every)
    return rows.view(batch * blocks, k, channels)


def _cosine(blocks: Tensor, m: int) -> Tensor:
    """S_ij = x_i . x_j / (|x_i| |x_j|) [B * T, m, n], from -1 to 1, and 0 for zero tokens."""
    free = not (torch.is_grad_enabled() and blocks.requires_grad)
    if blocks.is_cuda and blocks.dtype in (torch.float16, torch.bfloat16) and free:
        s = _cosine_of_halves(blocks, m)
    else:
        blocks = _in_range(blocks.to(torch.promote_types(blocks.dtype, torch.float32)), free)
        blocks = torch.mul(blocks, _inverse_norm(blocks), out=blocks if free else None)
        s = _product(blocks[:, :m], blocks[:, m:])
    return torch.clamp(s, -1, 1, out=s if free else None)


def _product(dst: Tensor, src: Tensor) -> Tensor:
    """dst src^T [B * T, m, n] in full precision, also where the user lets CUDA's fp32 products run
    in TF32.

    TF32's spacing near 0.8 is that of fp16: rounding would decide what merges. So both factors are
    split instead, and the user's setting stays as it is.
    """
    if (
        dst.is_cuda
        and dst.dtype == torch.float32
        and torch.backends.cuda.matmul.fp32_precision == "tf32"
    ):
        dst, src = split_for_tf32(dst, src)
    return torch.bmm(dst, src.transpose(1, 2))


def split_for_tf32(dst: Tensor, src: Tensor) -> tuple[Tensor, Tensor]:
    """Factors [.., 3 d] whose product, rounded to TF32 on the way, is that of dst and src [.., d]
    to 2 ** -21.

    Each is the sum of a TF32 number and a rest; of the four products only rest by rest is left out.
    Gradients are TF32's, for the first parts are constants to them.
    """
    dst_high, src_high = to_tf32(dst), to_tf32(src)
    dst_low, src_low = dst - dst_high, src - src_high
    return torch.cat([dst_high, dst_high, dst_low], -1), torch.cat(
        [src_high, src_low, src_high], -1
    )


def to_tf32(x: Tensor) -> Tensor:
    """x in fp32, cut to the 10 bits of TF32's mantissa."""
    return (x.detach().view(torch.int32) & -(1 << 13)).view(torch.float32)


def _cosine_of_halves(blocks: Tensor, m: int) -> Tensor:
    """Cosine [B * T, m, n] in fp32 of 16-bit tokens on CUDA: exact products, no 16-bit rounding, no
    copy in fp32.
    """
    if blocks.dtype == torch.bfloat16:  # products of fp16 are never out of the range of fp32
        blocks = _in_range(blocks, free=True)
    inverse = _inverse_norm(blocks.float())
    s = torch.bmm(blocks[:, :m], blocks[:, m:].transpose(1, 2), out_dtype=torch.float32)
    return s.mul_(inverse[:, :m]).mul_(inverse[:, m:].transpose(1, 2))


def _in_range(x: Tensor, free: bool) -> Tensor:
    """Tokens x [B, L, d] divided by the power of two at their largest entry (exact), so that
    squares stay in range.

    Cosine does not depend on a token's scale: the divisor counts as a constant for gradients too.
    Overwrites `x` where it is `free`: no gradient needs it.
    """
    with torch.no_grad():
        if x.device.type == "cpu":  # where the norm is ten times as slow
            largest = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
        else:
            largest = torch.linalg.vector_norm(x, math.inf, dim=-1, keepdim=True)
        integers, mask = _EXPONENTS[x.dtype]
        power = (largest.view(integers) & mask).view(x.dtype).clamp_(min=torch.finfo(x.dtype).tiny)
    return torch.div(x, power, out=x if free else None)


def _inverse_norm(x: Tensor) -> Tensor:
    """1 / |x| [B, L, 1] of tokens [B, L, d] whose squares are in range, and 0 for a zero token
    (with gradient 0).
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    zero = norm == 0
    return norm.masked_fill(zero, 1.0).reciprocal().masked_fill(zero, 0.0)
