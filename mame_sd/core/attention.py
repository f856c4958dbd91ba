"""Compute attention over fewer keys, with fitted values, by any attention kernel.

The keys and values of an image (or video) merge to a share of their number: groups of similar
keys become their means, logits count each group by its size, and values are fitted to the exact
attention of a few queries (`fit.py`). All queries then attend to the merged keys by any kernel.
Text next to the image stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.cells import DRAWS, checked_grid
from mame_sd.core.fit import SDPA
from mame_sd.core.groups import unreadable
from mame_sd.core.intercept import Kernel, adapt_kernel
from mame_sd.core.merge_keys import Choice, Grid, KeyMerging, merge_keys, unlike

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Sequence[int],
    before: int = 0,
    after: int = 0,
    keep: float = 0.25,
    kernel: Kernel = SDPA,
    **options: Any,
) -> Tensor:
    """Compute attention of all queries over a share of an image's keys.

    Args:
        q: queries [B, H, Q, D], either of the image's tokens alone or of all tokens.
        k: keys [B, H', N, D], N = before + prod(grid) + after, after projection, norm and rotation.
            H' must be a divisor of H.
        v: values [B, H', N, D'].
        grid: (h, w) of the image's tokens in row-major order, or (t, h, w) of a video's.
        before: number of other tokens, such as text, before the image's. They stay as they are.
        after: number of other tokens after the image's. They stay as they are.
        keep: share of the image's keys to keep, above 0 to 1; 1 changes nothing.
        kernel: computes attention as `torch.nn.functional.scaled_dot_product_attention` does, from
            (q, k, v, attn_mask=, scale=) with heads before tokens. FlashAttention's own functions
            have tokens before heads: wrap them. A kernel without `attn_mask`, such as
            FlashAttention or SageAttention, gets keys that carry the sizes of their groups. `scale`
            is passed if it differs from 1 / sqrt(D), and `enable_gqa=True` if several heads of
            queries share a head of keys.
        options: fields of `KeyMerging`; `draw` and `leader` of `Choice`; `attn_mask` and `scale`.

    Returns:
        [B, H, Q, D'] in the dtype of q.

    Raises:
        TypeError: `kernel` can't be called.
        ValueError: the tensors don't fit one another, an argument is out of its range, keys can't
            merge under the mask, or the kernel lacks an argument that the call needs.
    """
    call: dict[str, Any] = {
        name: options.pop(name)
        for name in ("attn_mask", "scale", "draw", "leader")
        if name in options
    }
    size = _checked(grid, before, after, keep, options)
    _check_tensors(q, k, v, size, before, after)
    mask = call.get("attn_mask")
    _check_call(q, k, **call)
    adapter = adapt_kernel(kernel)
    if keep < 1 and len(q):
        grids = [Grid(before, size, keep)]
        reason = None if mask is None else unlike(mask, grids)
        if reason is not None:
            raise ValueError(
                "attn_mask: expected [B, 1, 1, N], the same for all queries, or rows in which the"
                f" image's keys are alike, got {reason}; keep=1 takes any"
            )
        choice, settings = Choice(call.get("draw"), call.get("leader")), KeyMerging(**options)
        scale, bias = call.get("scale"), adapter.takes_bias
        merged = merge_keys(q, k, v, grids, settings, mask, scale, choice, size_bias=bias)
        k, v, mask = merged.key, merged.value, merged.bias
    return adapter.attend(q, k, v, mask, call.get("scale"))


def _check_tensors(
    q: Tensor, k: Tensor, v: Tensor, size: tuple[int, ...], before: int, after: int
) -> None:
    """Raise ValueError if queries, keys and values don't fit one another or a grid of `size`.

    Tensors are [B, H, Q, D], [B, H', N, D] and [B, H', N, D']. `before` and `after` are the numbers
    of tokens before and after the grid.
    """
    tokens = torch.Size(size).numel()
    count = before + tokens + after
    if all(isinstance(t, Tensor) for t in (q, k, v)):
        got = ", ".join(f"{list(t.shape)} of {t.dtype}" for t in (q, k, v))
        if (
            q.dim() == k.dim() == v.dim() == 4
            and k.shape == (len(q), k.shape[1], count, q.shape[3])
            and k.shape[:3] == v.shape[:3]
            and q.shape[2] in (count, tokens)
            and min(*q.shape[1:], k.shape[1], v.shape[3]) > 0
            and q.shape[1] % k.shape[1] == 0
            and q.dtype == k.dtype == v.dtype in DTYPES
            and q.device == k.device == v.device
        ):
            return
        if len({t.device for t in (q, k, v)}) > 1:
            got += f", on {', '.join(str(t.device) for t in (q, k, v))}"
    else:
        got = ", ".join(type(t).__name__ for t in (q, k, v))
    raise ValueError(
        f"q, k, v: expected tensors of floating-point numbers of one dtype and device, [B, H,"
        f" {count} or {tokens}, D], [B, H', {count}, D] and [B, H', {count}, D'], H a multiple of"
        f" H', got {got}"
    )


def _check_call(
    q: Tensor,
    k: Tensor,
    attn_mask: Any = None,
    scale: Any = None,
    draw: Any = None,
    leader: Any = None,
) -> None:
    """Raise ValueError if arguments don't fit queries [B, H, Q, D] and keys [B, H', N, D]."""
    if attn_mask is not None:
        sizes = [*q.shape[:3], k.shape[2]]
        fits = isinstance(attn_mask, Tensor) and 0 < attn_mask.dim() <= 4
        if fits:
            pairs = zip(reversed(attn_mask.shape), reversed(sizes), strict=False)
            fits = all(side in (1, size) for side, size in pairs)
            fits = fits and attn_mask.dtype in (torch.bool, q.dtype)
            fits = fits and attn_mask.device == q.device
        if not fits:
            raise ValueError(
                f"attn_mask: expected a tensor of booleans or {q.dtype} on {q.device}, broadcast to"
                f" [B, H, Q, N] = {sizes}, got {_said(attn_mask)}"
            )
    number = not isinstance(scale, bool) and isinstance(scale, int | float)
    if scale is not None and not (number and math.isfinite(scale)):
        raise ValueError(f"scale: expected a finite number, got {scale!r}")
    for name, one, length, end in (("draw", draw, 1, DRAWS), ("leader", leader, len(q), len(q))):
        if one is None:
            continue
        fits = isinstance(one, Tensor) and one.shape == (length,) and one.dtype == torch.long
        fits = fits and one.device == q.device
        # Values are checked on CPUs alone: on a GPU this would wait for the device.
        if fits and length and one.device.type == "cpu" and not unreadable(one):
            fits = 0 <= int(one.min()) <= int(one.max()) < end
        if not fits:
            raise ValueError(
                f"{name}: expected a LongTensor [{length}] on {q.device}, of numbers from 0 to"
                f" {end - 1}, got {_said(one)}"
            )


def _said(value: Any) -> str:
    """Describe an argument on one line."""
    if not isinstance(value, Tensor):
        return f"{value!r}"
    few = value.numel() <= 8 and value.dtype == torch.long and not unreadable(value)
    numbers = f"{value.tolist()}, " if few else ""
    return f"{numbers}{list(value.shape)} of {value.dtype} on {value.device}"


def _checked(
    grid: Sequence[int], before: int, after: int, keep: float, options: dict[str, Any]
) -> tuple[int, ...]:
    """Return the sides of the grid, or raise ValueError for arguments that `attention` can't take.

    `options` are fields of `KeyMerging`. All other arguments are those of `attention`.
    """
    if torch.compiler.is_compiling():  # an eager call has checked the arguments before
        return tuple(int(side) for side in grid)
    names = [f.name for f in fields(KeyMerging)]
    values = {"keep": keep, **options}
    for name, value in values.items():
        if name not in ("keep", *names):
            raise ValueError(f"unknown argument {name!r}; expected one of {', '.join(names)}")
        if value is None and name != "fit_queries":
            raise ValueError(f"{name}: expected a number, got None; leave it out")
    MaMeConfig.from_dict(values)
    return checked_grid(grid, before, after)
