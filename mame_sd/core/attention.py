"""Attention over fewer keys, with fitted values, in front of any attention kernel.

The keys and values of an image (or video) merge to a share of their number: groups of similar
keys become their means, logits count each group by its size, and values are fitted to the exact
attention of a few queries (`fit.py`). All queries then attend to the merged keys by whatever
kernel there is. Text beside the image stays as it is.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.cells import Cells, cells_of
from mame_sd.core.devices import no_autocast
from mame_sd.core.fit import SDPA, fitted_to, of_kept_heads, sized_keys
from mame_sd.core.groups import Groups, group_tokens

Kernel = Callable[..., Tensor]
ALONE = 0.125  # of the kept keys, those that stay as they are: the farthest from all others
Recall = Callable[[int, Callable[[], Groups]], Groups]


class Grid(NamedTuple):
    """An image or video among the keys of an attention: where it starts, (h, w) or (t, h, w) of its
    tokens in row-major order, and the share of its keys to keep.
    """

    start: int
    size: tuple[int, ...]
    keep: float


@dataclass(frozen=True)
class KeyMerging:
    """How keys and values merge.

    Attributes:
        fit_queries: how many queries the values are fitted to; 0: the values are means; None: one
            of 32 tokens, from 64 to 256.
        tile_size: side of the square tiles in which keys are compared; 0 compares all with all.
        seed: of the draws of destinations and queries.
    """

    fit_queries: int | None = None
    tile_size: int = 16
    seed: int = 0


class Merged(NamedTuple):
    """Keys and values to attend to instead of all of them.

    Attributes:
        key, value: [B, H, K, D] and [B, H, K, D'].
        bias: [B, 1, 1, K] (or [B, .., Q, K] with a mask), to be added to the logits.
        groups: of each grid, which key each of its tokens went to.
    """

    key: Tensor
    value: Tensor
    bias: Tensor
    groups: tuple[Groups, ...]


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
    """Attention of all queries over a share of an image's keys.

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
    count = before + torch.Size(size).numel() + after
    if q.dim() != 4 or k.dim() != 4 or k.shape[2] != count or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"k: expected keys and values [B, H, {count}, D] of {before} tokens, those of"
            f" {' x '.join(map(str, size))} and {after} more, got {list(k.shape)} and"
            f" {list(v.shape)}"
        )
    if not q.is_floating_point() or {k.dtype, v.dtype} != {q.dtype} or not k.shape[1] * q.shape[3]:
        raise ValueError(
            "q, k, v: expected floating-point numbers of one dtype in one head or more, got"
            f" {q.dtype}, {k.dtype}, {v.dtype} in {k.shape[1]} heads of {q.shape[3]} channels"
        )
    if q.shape[2] not in (count, count - before - after) or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q: expected queries of all {count} tokens or of the image's {count - before - after},"
            f" in a multiple of {k.shape[1]} heads, got {list(q.shape)}"
        )
    mask = call.get("attn_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape[-1:] in ((1,), (count,))):
        got = list(mask.shape) if isinstance(mask, Tensor) else repr(mask)
        raise ValueError(f"attn_mask: expected a tensor that ends in 1 or {count} keys, got {got}")
    for name, length in (("draw", 1), ("leader", len(q))):
        given = call.get(name)
        if given is not None and not (isinstance(given, Tensor) and given.shape == (length,)):
            raise ValueError(f"{name}: expected a LongTensor [{length}], got {given!r}")
    own = own_kernel(kernel)
    if keep < 1 and len(q):
        grids = [Grid(before, size, keep)]
        merged = merge_keys(q, k, v, grids, KeyMerging(**how), **call, counted=own.counts)
        k, v = merged.key, merged.value
        mask = merged.bias if own.counts or mask is not None else None
    return own.attend(q, k, v, mask, call.get("scale"))


class OwnKernel(NamedTuple):
    """A kernel and the names of its arguments."""

    call: Kernel
    names: frozenset[str]

    @property
    def counts(self) -> bool:
        """Whether it adds a bias to the logits."""
        return "attn_mask" in self.names

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Attention [B, H, Q, D'], by a call with the arguments that are needed.

        Raises ValueError where the kernel lacks one, or gives another shape.
        """
        given: dict[str, Any] = {}
        if attn_mask is not None:
            given["attn_mask"] = attn_mask
        if scale is not None and not math.isclose(scale, q.shape[-1] ** -0.5):
            given["scale"] = scale
        if dropout_p:
            given["dropout_p"] = dropout_p
        if q.shape[1] != k.shape[1]:
            given["enable_gqa"] = True
        for name, value in given.items():
            if name not in self.names:
                shown = list(value.shape) if isinstance(value, Tensor) else value
                raise ValueError(
                    f"kernel: expected one with an argument {name}, for it is {shown} here"
                )
        output = self.call(q, k, v, **given)
        wanted = (*q.shape[:3], v.shape[3])
        if not isinstance(output, Tensor) or output.shape != wanted:
            got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"kernel: expected it to give a tensor {list(wanted)}, got {got}")
        return output


def own_kernel(kernel: Kernel) -> OwnKernel:
    """Read which arguments a kernel has, by name: SageAttention takes and ignores any other.

    Raises TypeError for what is no function, or one whose arguments can't be read.
    """
    if kernel is SDPA:
        return OwnKernel(kernel, frozenset(("attn_mask", "scale", "dropout_p", "enable_gqa")))
    if isinstance(kernel, type) or not callable(kernel):
        raise TypeError(f"kernel: expected a function of (q, k, v), got {kernel!r}")
    own = getattr(kernel, "_orig_mod", kernel)  # of a module that torch.compile wraps
    try:
        names = inspect.signature(own.forward if isinstance(own, nn.Module) else own).parameters
    except ValueError:
        raise TypeError(
            f"kernel: expected a function whose arguments can be read, got {kernel!r}; wrap it in"
            " one of (q, k, v)"
        ) from None
    return OwnKernel(kernel, frozenset(names))


def _checked(
    grid: Sequence[int], before: int, after: int, keep: float, how: dict[str, Any]
) -> tuple[int, ...]:
    """The sides of the grid. Raises ValueError for arguments of `attention` that can't be."""
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


def merge_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grids: Sequence[Grid],
    how: KeyMerging,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    draw: Tensor | None = None,
    leader: Tensor | None = None,
    first_query: int | None = None,
    recall: Recall | None = None,
    counted: bool = True,
) -> Merged:
    """Fewer keys, and values fitted to the attention of a few queries of the first grid's tokens.

    Args:
        q, k, v: as in `attention`.
        grids: the images that merge, in their order among the keys, the generated one first.
        how: the settings.
        attn_mask: of the attention, boolean or added to the logits, broadcast to [B, H, Q, N].
        scale: of the logits; None: 1 / sqrt(D).
        draw: LongTensor [1] below `cells.DRAWS`, which of the draws; None: the first.
        leader: LongTensor [B], the sample whose keys decide what merges (`core/pairs.py`).
        first_query: where the first grid's queries begin in q; None: where its keys do, or at 0
            where q holds the image's alone.
        recall: (number of the grid, what makes its groups) -> its groups, such as those of an
            earlier call.
        counted: whether the bias counts each group by its size; else, for kernels that take none,
            the keys carry the sizes (`fit.sized_keys`).
    """
    if first_query is None:
        first_query = grids[0].start if q.shape[2] == k.shape[2] else 0
    with no_autocast(q):
        parts, sizes, end = [], [], 0
        groups: list[Groups] = []
        first: Cells | None = None
        for grid in grids:
            cells = cells_of(grid.size, (1 - ALONE) * grid.keep, how.tile_size, how.seed, k.device)
            stay = max(0, round(grid.keep * cells.tokens) - cells.kept)
            first = first or cells
            every = slice(grid.start, grid.start + cells.tokens)
            slots = [
                t[:, :, every].transpose(1, 2).index_select(1, cells.order) for t in (k, v)
            ]  # [B, T * P, H, D]
            compare = partial(group_tokens, slots[0].flatten(2), cells, draw, leader, stay)
            found = compare() if recall is None else recall(len(groups), compare)
            means, counts = found.means(*slots)
            if grid.start > end:
                parts.append([t[:, :, end : grid.start] for t in (k, v)])
                sizes.append(counts.new_ones(k.shape[0], grid.start - end))
            parts.append([t.transpose(1, 2) for t in means])
            sizes.append(counts)
            groups.append(found)
            end = every.stop
        last = sum(t.shape[1] for t in sizes)
        if end < k.shape[2]:
            parts.append([t[:, :, end:] for t in (k, v)])
            sizes.append(sizes[0].new_ones(k.shape[0], k.shape[2] - end))
        key, value = (torch.cat(of, 2) if len(of) > 1 else of[0] for of in zip(*parts, strict=True))
        count = torch.cat(sizes, 1) if len(sizes) > 1 else sizes[0]
        log_sizes = count.log()
        bias = (log_sizes if counted else torch.zeros_like(count))[:, None, None]
        mask = attn_mask
        if mask is not None and mask.shape[-1] > 1:
            mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
            at_key = _positions(grids, groups, k.shape[2])[:, None, None]  # [B, 1, 1, K]
            mask = torch.take_along_dim(mask, at_key.to(mask.device), -1)
        if mask is not None:
            boolean = mask.dtype == torch.bool
            bias = torch.where(mask, bias, -torch.inf) if boolean else mask + bias
        assert first is not None
        queries = how.fit_queries
        if queries is None:
            queries = min(max(first.tokens // 32, 64), 256)
        if queries or not counted:
            spread = first.queries[0]
            if draw is not None:
                spread = first.queries.index_select(0, draw).view(-1)
            spread = spread + first_query if first_query else spread
        if not counted:
            last_query = first_query + first.tokens
            others = [t for t in (q[:, :, :first_query], q[:, :, last_query:]) if t.shape[2]]
            beside = torch.cat(others, 2) if others else q[:, :, :0]
            some, beside = (
                of_kept_heads(t, k.shape[1]) for t in (q.index_select(2, spread), beside)
            )
            by = q.shape[-1] ** -0.5 if scale is None else scale
            key = sized_keys(key, some, beside, log_sizes, by) if by else key
        if queries:
            shared = q.shape[1] // k.shape[1]  # heads of queries for each head of keys
            at = spread[: max(1, queries // shared)]
            value = fitted_to(
                q, at, (k, v), (key, value), bias, attn_mask, scale, (grids[0].start, last)
            )
    return Merged(key, value, bias.to(q.dtype), tuple(groups))


def _positions(grids: Sequence[Grid], groups: Sequence[Groups], length: int) -> Tensor:
    """The positions [B, K] among all keys that the kept ones stand at."""
    row = groups[0].row
    every = torch.arange(length, device=row.device).expand(len(row), -1)
    parts, end = [], 0
    for grid, found in zip(grids, groups, strict=True):
        parts += [every[:, end : grid.start], found.kept + grid.start]
        end = grid.start + found.tokens_in
    return torch.cat([*parts, every[:, end:]], 1)
