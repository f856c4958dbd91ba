"""Merge keys and values at the attention call, in front of any kernel.

A model's own code projects, normalises and rotates queries, keys and values, and calls
`torch.nn.functional.scaled_dot_product_attention`, or a function that was put in its place. While
a `MergeJob` runs under an `SDPAInterceptor`, that call is intercepted: the image's keys and values
merge (`merge_keys`), and the same kernel computes attention over the kept keys. Groups of similar
keys become their means, logits count each group by its size, and values are fitted to the exact
attention of a few queries (`fit.py`). Text next to the image stays as it is.

`SDPAInterceptor` is a function mode of PyTorch. Each thread has one stack of such modes, and
`torch.compile` and `torch.export` follow it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from mame_sd.core.fit import SDPA, fit_values, sized_keys
from mame_sd.core.groups import (
    Cells,
    Groups,
    group_tokens,
    make_cells,
    no_autocast,
    unreadable,
)

UNMERGED_SHARE = (
    0.125  # share of the kept keys that stay as they are: the farthest from all destinations
)
Kernel = Callable[..., Tensor]
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
UNCOUNTED = ", which takes no sizes of groups: their keys carry them"


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
    draw: Tensor | None = None,
    leader: Tensor | None = None,
    first_query: int | None = None,
    known: MutableMapping[int, Groups] | None = None,
    size_bias: bool = True,
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
        draw: LongTensor [1] in [0, `groups.DRAWS`), the index of the draw. If None, the first draw.
        leader: LongTensor [B], the sample whose keys decide what merges
            (`groups.guidance_leaders`).
        first_query: position of the first grid's queries in q. If None, the position of its keys,
            or 0 if q holds the image's queries alone.
        known: the groups of each grid by its number, if an earlier call with the same input made
            them. Groups that are made here are stored in it.
        size_bias: if True, the bias counts each group by its size. If False, the keys carry the
            sizes (`fit.sized_keys`), for kernels without a bias.

    Returns:
        Keys [B, H', K, D], values [B, H', K, D'] in the dtype of v, and a bias in the dtype of q;
        with the groups.
    """
    if first_query is None:
        first_query = grids[0].start if q.shape[2] == k.shape[2] else 0
    known = {} if known is None else known
    tokens = torch.Size(grids[0].size).numel()
    image, count = slice(first_query, first_query + tokens), options.fit_queries
    if count is None:
        count = min(max(tokens // 32, 64), 256)
    parts: tuple[list[Tensor], list[Tensor]] = [], []  # keys and values [B, H, .., D]
    by_key = None
    if attn_mask is not None:
        attn_mask, by_key = _of_keys(attn_mask, q, k.shape[2])
    logs, columns, end = [], [], 0
    with no_autocast(q):
        for number, (start, size, keep) in enumerate(grids):
            cells = make_cells(
                size, (1 - UNMERGED_SHARE) * keep, options.tile_size, options.seed, k.device
            )
            if isinstance(k, FakeTensor) and not torch.compiler.is_compiling():
                cells = _without_numbers(cells, k.fake_mode)
            last = start + cells.tokens
            # If the image comes first, don't slice: a CPU would copy the slice to read its slots.
            slots = [
                (t[:, :, start:last] if start else t).transpose(1, 2).index_select(1, cells.order)
                for t in (k, v)
            ]  # [B, T * P, H, D]
            if number not in known:
                stay = max(0, round(keep * cells.tokens) - cells.kept)
                known[number] = group_tokens(slots[0].flatten(2), cells, draw, leader, stay)
            if by_key is None:
                means, counts = known[number].means(*slots, fitted=count > 0)
            else:
                means, counts, own = _seen_means(known[number], slots, by_key[:, start:last])
                columns += [by_key[:, end:start], own]
            for of, t, mean in zip(parts, (k, v), means, strict=True):
                of += [t[:, :, end:start], *(part.transpose(1, 2) for part in mean)]
            rest = k.shape[2] - last if number == len(grids) - 1 else 0
            alone = known[number].stay.shape[1] + rest
            logs.append(F.pad(counts.log(), (start - end, alone)))
            end = last
        groups = tuple(known[number] for number in range(len(grids)))
        key, value = (
            torch.cat([*of, t[:, :, end:]], 2) for of, t in zip(parts, (k, v), strict=True)
        )  # [B, H, K, D]
        log_sizes = torch.cat(logs, 1) if len(logs) > 1 else logs[0]
        own_bias = bias = log_sizes[:, None, None] if size_bias else None
        at, rows = groups[0].queries, attn_mask
        few = at[: max(1, count * k.shape[1] // q.shape[1])]
        if attn_mask is not None:
            zero = log_sizes.new_zeros(()) if bias is None else bias
            if by_key is not None:
                masked = zero + torch.cat([*columns, by_key[:, end:]], 1)[:, None, None]
            else:
                masked = _with_mask(zero, attn_mask, grids, groups, k.shape[2])
            own_bias = bias = masked
            if attn_mask.dim() > 1 and attn_mask.shape[-2] > 1:
                rows, own_bias = (
                    t[..., image, :].index_select(-2, few) for t in (attn_mask, masked)
                )
        if count or not size_bias:
            some = q[:, :, image].index_select(2, few if size_bias else at)
        by = q.shape[-1] ** -0.5 if scale is None else scale
        if not size_bias and by:
            beside = torch.cat([q[:, :, :first_query], q[:, :, image.stop :]], 2)
            key = sized_keys(key, some, beside, log_sizes, by)
        if count:
            merged = grids[0].start, key.shape[2] - k.shape[2] + end
            some = some[:, :, : len(few)]
            if by_key is not None:  # hidden values must not change the result
                v = v.masked_fill((by_key == -torch.inf)[:, None, :, None], 0)
            value = fit_values(some, (k, v), (key, value), own_bias, rows, by, merged)
    return Merged(key, value, None if bias is None else bias.to(q.dtype), groups)


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

    Args:
        mask: boolean or added to the logits, broadcast to [B, H, Q, N].
        q: queries [B, H, Q, D].
        length: N, the number of keys.

    Returns:
        The mask [.., 1, N] and the numbers [B, N] that it adds to the logits, in fp32 at least. Any
        other mask is returned as it is, with None.
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
    own = torch.cat([top.masked_fill(none, -torch.inf), at_slot.gather(1, groups.stay)], 1)
    return means, (counts * seen).masked_fill(none, 1.0), own


def _with_mask(
    bias: Tensor, mask: Tensor, grids: Sequence[Grid], groups: Sequence[Groups], length: int
) -> Tensor:
    """Add a mask to the bias of the kept keys.

    All tokens of a group share one column of the mask (`unlike`), so that each kept key takes the
    column at its own position.

    Args:
        bias: [B, .., K], the bias of the kept keys.
        mask: [.., N], boolean or added to the logits of all keys.
        grids: the images among the keys.
        groups: the groups of each grid.
        length: N, the number of keys.

    Returns:
        The bias with the mask, [B, .., K].
    """
    if mask.shape[-1] > 1:
        mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
        row = groups[0].row
        every = torch.arange(length, device=row.device).expand(row.shape[0], -1)
        parts, end = [], 0
        for grid, found in zip(grids, groups, strict=True):
            parts += [every[:, end : grid.start], found.kept + grid.start]
            end = grid.start + found.tokens_in
        at_key = torch.cat([*parts, every[:, end:]], 1)[:, None, None]  # [B, 1, 1, K]
        mask = torch.take_along_dim(mask, at_key.to(mask.device), -1)
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias


class KernelAdapter(NamedTuple):
    """An attention kernel and the names of its arguments."""

    call: Kernel
    names: frozenset[str]

    @property
    def takes_bias(self) -> bool:
        """Return True if the kernel adds a bias to the logits."""
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
        """Compute attention, passing only those arguments that are needed.

        Args:
            q: queries [B, H, Q, D].
            k: keys [B, H', K, D].
            v: values [B, H', K, D'].
            attn_mask: added to the logits, broadcast to [B, H, Q, K].
            scale: scale of the logits. If None, 1 / sqrt(D).
            dropout_p: probability of dropout.

        Returns:
            [B, H, Q, D'] in the dtype of q.

        Raises:
            ValueError: the kernel lacks an argument that is needed, or returns another shape or
                dtype.
        """
        usual = scale is None or math.isclose(scale, q.shape[-1] ** -0.5)
        needed = {
            "attn_mask": attn_mask,
            "scale": None if usual else scale,
            "dropout_p": dropout_p or None,
            "enable_gqa": True if q.shape[1] != k.shape[1] else None,
        }
        given = {name: value for name, value in needed.items() if value is not None}
        for name, value in given.items():
            if name not in self.names:
                shown = list(value.shape) if isinstance(value, Tensor) else value
                message = f"kernel: expected one with an argument {name}, for it is {shown} here"
                raise ValueError(message)
        output = self.call(q, k, v, **given)
        wanted = (*q.shape[:3], v.shape[3])
        if not isinstance(output, Tensor) or output.shape != wanted:
            got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"kernel: expected it to give a tensor {list(wanted)}, got {got}")
        cast = torch.is_autocast_enabled(q.device.type)
        if output.dtype != q.dtype and not cast:
            raise ValueError(f"kernel: expected it to give {q.dtype}, got {output.dtype}")
        return output


def adapt_kernel(kernel: Kernel) -> KernelAdapter:
    """Read the names of a kernel's arguments.

    Names are read, not tested by a call, because SageAttention accepts and ignores any argument.

    Raises:
        TypeError: `kernel` is not a function, or its arguments can't be read.
    """
    if kernel is SDPA:
        return KernelAdapter(kernel, frozenset((*_NAMES, "scale", "enable_gqa")))
    if isinstance(kernel, type) or not callable(kernel):
        raise TypeError(f"kernel: expected a function of (q, k, v), got {kernel!r}")
    own = getattr(kernel, "_orig_mod", kernel)  # the module that torch.compile wraps
    try:
        names = inspect.signature(own.forward if isinstance(own, nn.Module) else own).parameters
    except ValueError:
        raise TypeError(
            f"kernel: expected a function whose arguments can be read, got {kernel!r}; wrap it in"
            " one of (q, k, v)"
        ) from None
    return KernelAdapter(kernel, frozenset(names))


@dataclass
class MergeJob:
    """One call of a layer whose keys merge.

    Attributes:
        grids: positions of the image's keys, and of reference images' keys, in the sequence.
        length: number of keys in the sequence. If None, any number that contains the grids.
        first_query: position of the image's first query among `queries` queries.
        queries: number of queries of the layer, if it differs from the number of keys.
        options: the settings.
        draw, leader: see `merge_keys`.
        known: for each attention call by its number, the groups of its grids that an earlier call
            of the layer made.
        prefixed: if True, any number of keys of earlier calls precede these keys.
        scale: scale of the logits, if the processor's scale differs from that of the call.
        kernel: computes attention over merged keys instead of the model's own kernel.
        merges: if False, keys don't merge and only `rows` applies.
        rows: LongTensor [B, n], the positions among the image's tokens of the queries to compute.
            The output is zero for all other queries of the image. If None, all queries are
            computed.
        note: text for the report.
        left: reason why the latest attention call over the grids was not merged. Empty if it was.
        merged: result of the latest attention call that merged, or None.
        calls: number of calls that merged. Attention may run sample by sample.
        inside: True while a merge or its kernel runs.
    """

    grids: tuple[Grid, ...]
    length: int | None
    first_query: int
    queries: int
    options: KeyMerging
    draw: Tensor | None = None
    leader: Tensor | None = None
    known: dict[int, dict[int, Groups]] | None = None
    prefixed: bool = False
    scale: float | None = None
    kernel: KernelAdapter | None = None
    merges: bool = True
    rows: Tensor | None = None
    note: str = field(default="", init=False)
    left: str = field(default="", init=False)
    merged: Merged | None = field(default=None, init=False)
    calls: int = field(default=0, init=False)
    inside: bool = field(default=False, init=False)

    def place(self, call: Mapping[str, Any]) -> tuple[list[Grid], int] | None:
        """Locate the grids in an attention call.

        Args:
            call: arguments by their names in scaled_dot_product_attention, tensors [B, H, n, D].

        Returns:
            The grids at their positions among the keys, and the position of the first grid's first
            query; or None if the call is not over this layer's tokens.
        """
        q, k = call["query"], call["key"]
        count = k.shape[-2]
        shift = 0 if self.length is None else count - self.length
        image, last = (torch.Size(self.grids[i].size).numel() for i in (0, -1))
        end = self.grids[-1].start + last
        if shift < 0 or (shift > 0 and not self.prefixed) or count < end + shift:
            return None
        if k.dim() != 4 or call.get("is_causal"):
            return None
        grids = [grid._replace(start=grid.start + shift) for grid in self.grids]
        if q.shape[2] == count:
            return grids, grids[0].start
        if q.shape[2] == self.length:  # the prefixed keys have no queries
            return grids, self.grids[0].start
        if q.shape[2] == self.queries:
            return grids, self.first_query
        return (grids, 0) if q.shape[2] == image else None

    def merge(self, call: Mapping[str, Any], bias: bool = True) -> dict[str, Any] | None:
        """Return the arguments of an attention call with merged keys and values.

        Args:
            call: as for `place`.
            bias: if True, the kernel adds a bias to the logits.

        Returns:
            The arguments by name, or None if the call is not over this layer's tokens or can't
            merge.
        """
        placed = self.place(call)
        if placed is None:
            return None
        grids, first = placed
        scale = self.scale if self.scale is not None else call.get("scale")
        given = call.get("attn_mask")
        self.left = unlike(given, grids) or "" if isinstance(given, Tensor) else ""
        if self.left:
            return None
        known = None if self.known is None else self.known.setdefault(self.calls, {})
        self.calls += 1
        self.merged = merge_keys(
            call["query"], call["key"], call["value"], grids, self.options, given, scale, self.draw,
            self.leader, first, known, size_bias=bias,
        )  # fmt: skip
        mask = self.merged.bias
        if mask is not None and not bias and given is not None and given.dtype == torch.bool:
            mask = mask == 0  # boolean again, as the kernel was given it
        changes = {"key": self.merged.key, "value": self.merged.value, "attn_mask": mask}
        return {**call, **changes, **({} if scale is None else {"scale": scale})}

    def attend(
        self,
        call: Mapping[str, Any],
        name: str,
        bias: bool,
        kernel: Callable[..., Any],
        unmerged: Callable[[], Any],
        laid_out: Callable[[Tensor], Tensor] | None = None,
        axis: int = 2,
    ) -> Any:
        """Compute attention over merged keys.

        A call that is not over this layer's tokens is computed as it is.

        Args:
            call: as for `place`.
            name: name of the model's kernel for the report. Empty if the report need not name it.
            bias: if True, that kernel adds a bias to the logits.
            kernel: computes the changed call.
            unmerged: computes the original call.
            laid_out: converts the output [B, H, Q, D'] of `self.kernel` to the layout that the
                caller expects. If None, nothing is converted.
            axis: dimension of the queries in the output of `kernel`.

        Returns:
            The output of the kernel that ran, in the layout that the caller expects.
        """
        own = self.kernel
        if own is not None:
            name, bias = kernel_name(own.call), own.takes_bias
        self.inside = True  # calls that the kernel makes are not intercepted
        try:
            placed = self.place(call)
            some = self._some(call)
            if placed is None or not (self.merges or some):
                return unmerged()
            merged = self.merge(call, bias) if self.merges else None
            if merged is None and not some:
                return unmerged()
            if merged is not None and name:
                self.note = f"attention by {name}" + ("" if bias else UNCOUNTED)
            changed = dict(call) if merged is None else merged
            if some:
                changed = self._of_rows(changed, placed[1])
            qkv = [changed.pop(n) for n in ("query", "key", "value")]
            if own is None:
                given = {n: v for n, v in changed.items() if n in call or v is not None}
                output = kernel(*qkv, **given)
                return self._in_place(output, placed[1], axis) if some else output
            mask, dropped = changed.get("attn_mask"), call.get("dropout_p") or 0.0
            output = own.attend(qkv[0], qkv[1], qkv[2], mask, changed.get("scale"), dropped)
            output = self._in_place(output, placed[1], 2) if some else output
            return output if laid_out is None else laid_out(output)
        finally:
            self.inside = False

    def _some(self, call: Mapping[str, Any]) -> bool:
        """Return True if this call computes only some queries of the image."""
        return self.rows is not None and self.rows.shape[0] == call["query"].shape[0]

    def _of_rows(self, call: Mapping[str, Any], first: int) -> dict[str, Any]:
        """Return the arguments of a call with only those queries that `rows` selects.

        The image's queries begin at `first`.
        """
        assert self.rows is not None
        end = first + torch.Size(self.grids[0].size).numel()
        at = self.rows[:, None, :, None]  # [B, 1, n, 1]
        changed = dict(call)
        for name in ("query", "attn_mask"):
            t: Tensor | None = call.get(name)
            if t is None or t.dim() < 2 or t.shape[-2] == 1:
                continue
            t = t.reshape(*[1] * (4 - t.dim()), *t.shape)
            image = torch.take_along_dim(t[:, :, first:end], at.to(t.device), 2)
            parts = t[:, :, :first], image, t[:, :, end:]
            changed[name] = torch.cat([p.expand(image.shape[0], -1, -1, -1) for p in parts], 2)
        return changed

    def _in_place(self, output: Tensor, first: int, axis: int) -> Tensor:
        """Scatter computed queries to their positions. All other queries of the image are zero.

        Args:
            output: attention of the selected queries.
            first: position of the image's first query.
            axis: dimension of the queries in `output`.

        Returns:
            The output of all queries.
        """
        assert self.rows is not None
        count, tokens = self.rows.shape[1], torch.Size(self.grids[0].size).numel()
        before, image, after = output.split(
            [first, count, output.shape[axis] - first - count], axis
        )
        shape = list(image.shape)
        shape[axis] = tokens
        behind = output.dim() - axis - 1
        at = self.rows.view(self.rows.shape[0], *[1] * (axis - 1), count, *[1] * behind)
        image = image.new_zeros(shape).scatter(axis, at.expand_as(image), image)
        return torch.cat([before, image, after], axis)


class SDPAInterceptor(TorchFunctionMode):
    """Merge the keys of attention calls by `job` while this mode is entered."""

    def __init__(self, job: MergeJob) -> None:
        super().__init__()
        self.job = job

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:
            # torch.compile follows this Python method only if it is called as a method.
            return args[0].unflatten(*args[1:], **kwargs)
        if (func is not SDPA and func is not F.scaled_dot_product_attention) or self.job.inside:
            return func(*args, **kwargs)
        return attend_merged(func, self.job, args, kwargs)


def attend_merged(
    kernel: Callable[..., Tensor], job: MergeJob, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call scaled_dot_product_attention, or a function in its place, with merged keys.

    Args:
        kernel: the attention function.
        job: the merging of this layer's call.
        args: positional arguments of the call.
        kwargs: named arguments of the call. Tensors are [B, H, n, D] or [B, n, D].

    Returns:
        The attention's output, [B, H, Q, D'] or [B, Q, D'].
    """
    call = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    name = "" if kernel is SDPA else kernel_name(kernel)
    unmerged = partial(kernel, *args, **kwargs)
    if call["key"].dim() != 3:
        return job.attend(call, name, kernel is SDPA, kernel, unmerged)

    def one_head(*args: Any, **kwargs: Any) -> Tensor:
        return kernel(*args, **kwargs).squeeze(1)

    call |= {n: call[n].unsqueeze(1) for n in ("query", "key", "value")}  # from [B, n, D]
    mask = call.get("attn_mask")
    if mask is not None and mask.dim() == 3:
        call["attn_mask"] = mask.unsqueeze(1)
    return job.attend(call, name, kernel is SDPA, one_head, unmerged, lambda t: t.squeeze(1), 1)


def kernel_name(kernel: Callable[..., Any]) -> str:
    """Return the name of a kernel in reports."""
    return str(getattr(kernel, "__name__", type(kernel).__name__))
