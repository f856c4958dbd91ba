"""Attention over fewer keys, with fitted values, in front of any attention kernel.

The keys and values of an image (or video) merge to a share of their number: groups of similar
keys become their means, logits count each group by its size, and values are fitted to the exact
attention of a few queries (`fit.py`). All queries then attend to the merged keys by whatever
kernel there is. Text beside the image stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import index
from typing import Any

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.fit import SDPA
from mame_sd.core.keys import Grid, Kernel, KeyMerging, merge_keys, own_kernel, unlike


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Sequence[int],
    before: int = 0,
    after: int = 0,
    keep: float = 0.25,
    kernel: Kernel = SDPA,
    **how: Any,
) -> Tensor:
    """Compute attention of all queries over a share of an image's keys.

    Args:
        q: queries [B, H, Q, D]; those of the image's tokens alone, or of all tokens.
        k, v: keys [B, H, N, D] and values [B, H, N, D'], N = before + prod(grid) + after, after
            projection, norm and rotation. There may be fewer heads than those of the queries, of
            which they are a divisor.
        grid: (h, w) of the image's tokens in row-major order, or (t, h, w) of a video's.
        before, after: tokens of something else, such as text, around the image's; they stay.
        keep: share of the image's keys to keep, above 0 to 1; 1 changes nothing.
        kernel: computes attention as `torch.nn.functional.scaled_dot_product_attention` does, from
            (q, k, v, attn_mask=, scale=) with heads before tokens (FlashAttention's own functions
            have them behind: wrap them). One without `attn_mask`, such as FlashAttention or
            SageAttention, gets keys that carry the sizes of their groups. `scale` is given where
            it is another than 1 / sqrt(D), `enable_gqa=True` where heads of queries share heads
            of keys.
        how: fields of `KeyMerging`; `attn_mask`, `scale`, `draw` and `leader` of `merge_keys`.

    Returns:
        [B, H, Q, D'] in the dtype of q.

    Raises:
        TypeError: `kernel` can't be called.
        ValueError: shapes that don't go together, `keep` out of its range, or a kernel without an
            argument that the call needs.
    """
    call: dict[str, Any] = {
        name: how.pop(name) for name in ("attn_mask", "scale", "draw", "leader") if name in how
    }
    size = _checked(grid, before, after, keep, how)
    tokens, mask = torch.Size(size).numel(), call.get("attn_mask")
    count = before + tokens + after
    if (
        q.dim() != 4
        or k.dim() != 4
        or v.shape[:3] != k.shape[:3]
        or k.shape[2] != count
        or q.shape[2] not in (count, tokens)
        or not k.shape[1] * q.shape[3]
        or q.shape[1] % k.shape[1]
        or not q.is_floating_point()
        or {k.dtype, v.dtype} != {q.dtype}
    ):
        given = ", ".join(f"{list(t.shape)} of {t.dtype}" for t in (q, k, v))
        raise ValueError(
            f"q, k, v: expected floating-point numbers of one dtype, [B, H, {count} or {tokens}, D]"
            f" and twice [B, H', {count}, D], H a multiple of H', got {given}"
        )
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape[-1:] in ((1,), (count,))):
        got = list(mask.shape) if isinstance(mask, Tensor) else repr(mask)
        raise ValueError(f"attn_mask: expected a tensor that ends in 1 or {count} keys, got {got}")
    for name, length in (("draw", 1), ("leader", len(q))):
        one = call.get(name)
        if one is not None and not (isinstance(one, Tensor) and one.shape == (length,)):
            raise ValueError(f"{name}: expected a LongTensor [{length}], got {one!r}")
    own = own_kernel(kernel)
    if keep < 1 and len(q):
        grids = [Grid(before, size, keep)]
        reason = None if mask is None else unlike(mask, grids)
        if reason is not None:
            raise ValueError(
                "attn_mask: expected [B, 1, 1, N], the same for all queries, or rows in which the"
                f" image's keys are alike, got {reason}; keep=1 takes any"
            )
        merged = merge_keys(q, k, v, grids, KeyMerging(**how), **call, counted=own.counts)
        k, v, mask = merged.key, merged.value, merged.bias
    return own.attend(q, k, v, mask, call.get("scale"))


def _checked(
    grid: Sequence[int], before: int, after: int, keep: float, how: dict[str, Any]
) -> tuple[int, ...]:
    """Return the sides of the grid; raise ValueError for arguments that `attention` can't take."""
    if torch.compiler.is_compiling():  # a graph was called without one before
        return tuple(int(side) for side in grid)
    names = [f.name for f in fields(KeyMerging)]
    given = {"keep": keep, **how}
    for name, value in given.items():
        if name not in ("keep", *names):
            raise ValueError(f"unknown argument {name!r}; expected one of {', '.join(names)}")
        if value is None and name != "fit_queries":
            raise ValueError(f"{name}: expected a number, got None; leave it out")
    MaMeConfig.from_dict(given)
    try:
        size = tuple(index(side) for side in grid)
        beside = index(before), index(after)
    except TypeError:
        size, beside = (), (0, 0)
    if not 1 <= len(size) <= 3 or min(*size, 1) < 1 or min(beside) < 0:
        raise ValueError(
            f"grid, before, after: expected (h, w) or (t, h, w) of at least 1 and numbers of"
            f" tokens, got {grid!r}, {before!r}, {after!r}"
        )
    return size
