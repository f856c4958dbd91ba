"""Merge keys and values at the attention call, in front of any kernel.

Groups of similar keys (`groups.py`) become their means, logits count each group by its size, and
values are fitted to the exact attention of a few queries (`fit.py`). Text next to the image stays
as it is. `intercept.py` applies this within the attention calls of a model.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mame_sd.core.cells import Cells
from mame_sd.core.fit import fit_values, sized_keys
from mame_sd.core.groups import (
    Groups,
    cached_tensors,
    group_tokens,
    make_cells,
    no_autocast,
    unreadable,
)

# Share of the kept keys that stay as they are: the farthest from all destinations.
UNMERGED_SHARE = 0.125


class Grid(NamedTuple):
    """An image among the keys of an attention.

    It has the position of its first key, (h, w) of its tokens in row-major order or (t, h, w) of a
    video's, and the share of its keys to keep.
    """

    start: int
    size: tuple[int, ...]
    keep: float


@dataclass(frozen=True)
class KeyMerging:
    """Settings of merging keys and values.

    Attributes:
        fit_queries: number of queries that the values are fitted to. If 0, the values are means. If
            None, one query for 32 tokens, from 64 to 256.
        tile_size: side of the square tiles in which keys are compared. If 0, all keys are compared
            with all.
        seed: seeds the draws of destinations and queries.
    """

    fit_queries: int | None = None
    tile_size: int = 16
    seed: int = 0


class Choice(NamedTuple):
    """Hold what decides, besides the keys themselves, which keys merge.

    Attributes:
        draw: LongTensor [1] in [0, `cells.DRAWS`), the index of the draw. If None, the first draw.
        leader: LongTensor [B], for each sample the index of the sample whose keys decide for it
            (`guidance.guidance_leaders`). If None, each sample decides for itself.
        groups: the groups of each grid by its number, if an earlier call with the same input made
            them. Groups that are made here are stored in it.
    """

    draw: Tensor | None = None
    leader: Tensor | None = None
    groups: MutableMapping[int, Groups] | None = None


FIRST = Choice()  # the first draw, without leaders


class Merged(NamedTuple):
    """Keys and values that stand for all keys and values.

    Attributes:
        key, value: [B, H, K, D] and [B, H, K, D'].
        bias: [B, 1, 1, K] (or [B, .., Q, K] with a mask), to be added to the logits, or None.
        groups: for each grid the groups of its tokens.
    """

    key: Tensor
    value: Tensor
    bias: Tensor | None
    groups: tuple[Groups, ...]


def merge_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grids: Sequence[Grid],
    options: KeyMerging,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    choice: Choice = FIRST,
    first_query: int | None = None,
    size_bias: bool = True,
    repeats: int = 1,
) -> Merged:
    """Merge keys, and fit values to the attention of a few queries of the first grid's tokens.

    Args:
        q: queries [B, H, Q, D], as in `attention`.
        k: keys [B, H', N, D], H' a divisor of H.
        v: values [B, H', N, D'].
        grids: the images that merge, in their order among the keys. The generated image comes
            first.
        options: the settings.
        attn_mask: the attention's mask, boolean or added to the logits, broadcast to [B, H, Q, N].
            `unlike` must not refuse it.
        scale: scale of the logits. If None, 1 / sqrt(D).
        choice: the draw, the leaders, and groups of an earlier call.
        first_query: position of the first grid's queries in q. If None, the position of its keys,
            or 0 if q holds the image's queries alone.
        size_bias: if True, the bias counts each group by its size. If False, the keys carry the
            sizes (`fit.sized_keys`), for kernels without a bias.
        repeats: how often the last key counts, which is after all grids. Without a mask, and with a
            bias.

    Returns:
        Keys [B, H', K, D], values [B, H', K, D'] in the dtype of v, and a bias in the dtype of q;
        with the groups.
    """
    if first_query is None:
        first_query = grids[0].start if q.shape[2] == k.shape[2] else 0
    tokens, count = torch.Size(grids[0].size).numel(), options.fit_queries
    if count is None:
        count = min(max(tokens // 32, 64), 256)
    image, by_key = slice(first_query, first_query + tokens), None
    if attn_mask is not None:
        attn_mask, by_key = _of_keys(attn_mask, q, k.shape[2])
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if not q.dtype == k.dtype == v.dtype:  # as under autocast, where some norms return fp32
        q, k, v = (t.to(torch.get_autocast_dtype(t.device.type)) for t in (q, k, v))
    with no_autocast(q):
        averages = _average(k, v, grids, options, choice, by_key, count > 0)
        key, value, log_sizes, columns, groups = averages
        drawn, fit_mask = groups[0].queries, attn_mask
        if repeats > 1:
            log_sizes[:, -1] += math.log(repeats)
            fit_mask = repeats_row(k.shape[2], repeats, q)
        bias = fit_bias = log_sizes[:, None, None] if size_bias else None
        few = drawn[: max(1, count * k.shape[1] // q.shape[1])]
        if attn_mask is not None:
            zero = log_sizes.new_zeros(()) if bias is None else bias
            if columns is not None:
                masked = zero + columns[:, None, None]
            else:
                masked = _with_mask(zero, attn_mask, grids, groups, k.shape[2])
            bias = fit_bias = masked
            if attn_mask.dim() > 1 and attn_mask.shape[-2] > 1:  # a row for each query
                fit_mask, fit_bias = (
                    t[..., image, :].index_select(-2, few) for t in (attn_mask, masked)
                )
        if count or not size_bias:
            some = q[:, :, image].index_select(2, few if size_bias else drawn)
        if not size_bias and scale:
            others = torch.cat([q[:, :, :first_query], q[:, :, image.stop :]], 2)
            key = sized_keys(key, some, others, log_sizes, scale)
        if count:
            after = k.shape[2] - grids[-1].start - groups[-1].tokens_in
            merged = grids[0].start, key.shape[2] - after
            some = some[:, :, : len(few)]
            if by_key is not None:  # hidden values must not change the result
                v = v.masked_fill((by_key == -torch.inf)[:, None, :, None], 0)
            value = fit_values(some, (k, v), (key, value), fit_bias, fit_mask, scale, merged)
    return Merged(key, value, None if bias is None else bias.to(q.dtype), groups)


def repeats_row(length: int, repeats: int, like: Tensor) -> Tensor:
    """Return a mask [1, 1, 1, length] that counts the last key `repeats` times.

    It has the dtype of `like` and is on the same device.
    """
    return cached_tensors(_repeats_row, length, repeats, like.dtype, like.device)


def _repeats_row(length: int, repeats: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    row = torch.zeros(1, 1, 1, length, dtype=dtype, device=device)
    row[..., -1] = math.log(repeats)
    return row


def _average(
    k: Tensor,
    v: Tensor,
    grids: Sequence[Grid],
    options: KeyMerging,
    choice: Choice,
    by_key: Tensor | None,
    fitted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[Groups, ...]]:
    """Group the keys of each grid, and average the keys and values of each group.

    `by_key` holds the numbers [B, N] that a mask adds to the logits of each key, if any. `fitted`
    is True if the values are fitted afterwards. All other arguments are those of `merge_keys`.

    Returns:
        Keys [B, H', K, D], values [B, H', K, D'], logs of the sizes of groups [B, K], the mask's
        columns [B, K] of the kept keys, and the groups of each grid.
    """
    parts: tuple[list[Tensor], list[Tensor]] = [], []  # keys and values [B, H, .., D]
    logs, columns, end = [], [], 0
    by_grid = {} if choice.groups is None else choice.groups
    for number, (start, size, keep) in enumerate(grids):
        share = (1 - UNMERGED_SHARE) * keep
        cells = make_cells(size, share, options.tile_size, options.seed, k.device)
        if isinstance(k, FakeTensor) and not torch.compiler.is_compiling():
            cells = _without_numbers(cells, k.fake_mode)
        last = start + cells.tokens
        slots: list[Tensor] = []  # [B, T * P, H, D]
        for t in (k, v):
            by_token = t.transpose(1, 2)
            whole = t.device.type == "cpu" and t.is_contiguous() and not isinstance(t, FakeTensor)
            if not whole or by_token.is_contiguous():
                image = by_token[:, start:last] if start else by_token
                slots.append(image.index_select(1, cells.order))
            else:  # a CPU would copy all of `by_token` to read its rows
                batch, heads, length, width = t.shape
                first = torch.arange(batch * heads, device=t.device).view(batch, 1, heads)
                at = (first * length + start + cells.order.unsqueeze(1)).flatten()
                rows = t.view(-1, width).index_select(0, at)
                slots.append(rows.view(batch, -1, heads, width))
        if number not in by_grid:
            stay = max(0, round(keep * cells.tokens) - cells.kept)
            x = slots[0].flatten(2)
            by_grid[number] = group_tokens(x, cells, choice.draw, choice.leader, stay)
        groups = by_grid[number]
        if by_key is None:
            means, counts = groups.means(*slots, fitted=fitted)
        else:
            means, counts, kept_columns = _seen_means(groups, slots, by_key[:, start:last])
            columns += [by_key[:, end:start], kept_columns]
        for of, t, mean in zip(parts, (k, v), means, strict=True):
            of += [t[:, :, end:start], *(part.transpose(1, 2) for part in mean)]
        alone = groups.stay.shape[1]
        alone += k.shape[2] - last if number == len(grids) - 1 else 0
        logs.append(F.pad(counts.log(), (start - end, alone)))
        end = last
    key, value = (torch.cat([*of, t[:, :, end:]], 2) for of, t in zip(parts, (k, v), strict=True))
    log_sizes = torch.cat(logs, 1) if len(logs) > 1 else logs[0]
    by_kept = None if by_key is None else torch.cat([*columns, by_key[:, end:]], 1)
    return key, value, log_sizes, by_kept, tuple(by_grid[n] for n in range(len(grids)))


def _without_numbers(cells: Cells, mode: FakeTensorMode) -> Cells:
    """Return cells whose tables are fake tensors of a mode, which have no values."""
    tables: dict[str, Any] = {
        name: mode.from_tensor(x) for name, x in vars(cells).items() if isinstance(x, Tensor)
    }
    return replace(cells, **tables)


ROWS = "an attention mask with a row for each query"
ROWS_HIDE = f"{ROWS}, in which the image's keys differ"
ROWS_UNREAD = f"{ROWS}, whose numbers no compiled graph can read"


def unlike(mask: Tensor, grids: Sequence[Grid]) -> str | None:
    """Return why keys can't merge under a mask, or None if they can.

    A query sees all keys of a group or none. So either each query must see all keys of an image
    alike, or all queries must see the same keys; in that case `merge_keys` weighs the keys by the
    mask.

    Args:
        mask: boolean or added to the logits, broadcast to [B, H, Q, N].
        grids: the images among the keys.
    """
    if _same_for_all(mask) or mask.shape[-1] == 1:
        return None
    if unreadable(mask):
        return ROWS_UNREAD
    parts = (mask[..., g.start : g.start + torch.Size(g.size).numel()] for g in grids)
    return None if all(constant_along(part, -1) for part in parts) else ROWS_HIDE


def constant_along(t: Tensor, dim: int) -> bool:
    """Return True if all entries along a dimension are equal. This waits for the device."""
    return bool((t == t.narrow(dim, 0, 1)).all())


def _same_for_all(mask: Tensor) -> bool:
    """Return True if a mask is the same for all queries and heads, by its shape or strides."""
    of_many = [dim for dim in (-2, -3) if mask.dim() >= -dim and mask.shape[dim] > 1]
    return all(mask.stride(dim) == 0 for dim in of_many)


def _of_keys(mask: Tensor, q: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
    """Reduce a mask that is the same for all queries and heads to one row.

    Returns:
        The mask [.., 1, N] and the numbers [B, N] that it adds to the logits of the `length` keys,
        in fp32 at least. Any other mask is returned as it is, with None.
    """
    if not _same_for_all(mask) or mask.shape[-1] == 1:
        return mask, None
    mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)[:, :1, :1]
    columns = mask[:, 0, 0].expand(len(q), length)
    dtype = torch.promote_types(q.dtype, torch.float32)
    if mask.dtype == torch.bool:
        return mask, torch.zeros_like(columns, dtype=dtype).masked_fill(~columns, -torch.inf)
    return mask, columns.to(dtype)


def _seen_means(
    groups: Groups, slots: Sequence[Tensor], columns: Tensor
) -> tuple[list[list[Tensor]], Tensor, Tensor]:
    """Average the tokens of each group, weighted by the exponential of a mask.

    Args:
        groups: the groups that merge.
        slots: keys and values [B, T * P, H, D], as `Groups.means` takes them.
        columns: [B, n], the numbers that the mask adds to the logits of the n tokens.

    Returns:
        Means as `Groups.means` returns them; the sizes of groups [B, M], in which a token counts by
        its weight relative to the largest, and which are 1 for groups that are not seen; and the
        mask's columns [B, K] of the kept keys, -inf for groups that are not seen.
    """
    top = columns.amax(1, keepdim=True)
    top = top.where(top > -torch.inf, 0.0)
    at_slot = columns.index_select(1, groups.cells.order)  # [B, T * P]
    # Tokens that stay alone are returned unweighted.
    weight = (at_slot - top).exp().scatter(1, groups.stay, 1.0)
    by = weight.unflatten(1, (-1, 1, 1)).to(slots[0].dtype)
    (*means, share), counts = groups.means(*(t * by for t in slots), by)
    seen = share[0].flatten(1)  # [B, M]
    none = seen == 0
    used = seen.masked_fill(none, 1.0).unflatten(1, (-1, 1, 1))
    for mean in means:
        mean[0] = mean[0] / used
    kept_columns = torch.cat([top.masked_fill(none, -torch.inf), at_slot.gather(1, groups.stay)], 1)
    return means, (counts * seen).masked_fill(none, 1.0), kept_columns


def _with_mask(
    bias: Tensor, mask: Tensor, grids: Sequence[Grid], groups: Sequence[Groups], length: int
) -> Tensor:
    """Add a mask [.., N] to the bias [B, .., K] of the kept keys.

    All tokens of a group share one column of the mask (`unlike`), so that each kept key takes the
    column at its own position. `length` is N.
    """
    if mask.shape[-1] > 1:
        mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
        row = groups[0].row
        every = torch.arange(length, device=row.device).expand(row.shape[0], -1)
        parts, end = [], 0
        for grid, of_grid in zip(grids, groups, strict=True):
            parts += [every[:, end : grid.start], of_grid.kept + grid.start]
            end = grid.start + of_grid.tokens_in
        at_key = torch.cat([*parts, every[:, end:]], 1)[:, None, None]  # [B, 1, 1, K]
        mask = torch.take_along_dim(mask, at_key.to(mask.device), -1)
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias
