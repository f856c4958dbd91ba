"""Merge keys and values at the attention call, in front of any kernel.

A model's own code projects, normalises and rotates queries, keys and values, and calls
`torch.nn.functional.scaled_dot_product_attention`, or what somebody put in its place. While a
`MergeJob` runs under an `SDPAInterceptor`, that call is intercepted: the image's keys and values
merge (`merge_keys`), and the same kernel computes attention over what is left. Groups of similar
keys become their means, logits count each group by its size, and values are fitted to the exact
attention of a few queries (`fit.py`). Text beside the image stays as it is.

Which job runs is read from PyTorch's stack of function modes, on which `SDPAInterceptor` stands. It
is one stack for each thread, and `torch.compile` and `torch.export` follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mame_sd.core.fit import SDPA, fitted_to, of_kept_heads, sized_keys
from mame_sd.core.kernels import OwnKernel
from mame_sd.core.merge import Cells, Groups, cells_of, group_tokens, no_autocast

ALONE = 0.125  # of the kept keys, those that stay as they are: the farthest from all others
Recall = Callable[[int, Callable[[], Groups]], Groups]
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
UNCOUNTED = ", which takes no sizes of groups: their keys carry them"


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
        draw: LongTensor [1] below `merge.DRAWS`, which of the draws; None: the first.
        leader: LongTensor [B], the sample whose keys decide what merges (`core/merge.py`).
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


@dataclass
class MergeJob:
    """One call of a layer whose keys merge.

    Attributes:
        grids: where the image's keys, and those of reference images, stand in the sequence.
        length: keys of the sequence; None: any number that holds the grids.
        first_query: where the image's queries begin among `queries` of them.
        queries: how many queries the layer has where these are not as many as keys.
        how: the settings.
        draw, leader, recall: see `merge_keys`.
        prefixed: keys of earlier calls, of any number, stand before these.
        scale: of the logits, where the processor's is not that of the call.
        kernel: computes attention over merged keys instead of the model's own.
    """

    grids: tuple[Grid, ...]
    length: int | None
    first_query: int
    queries: int
    how: KeyMerging
    draw: Tensor | None = None
    leader: Tensor | None = None
    recall: Recall | None = None
    prefixed: bool = False
    scale: float | None = None
    kernel: OwnKernel | None = None
    note: str = field(default="", init=False)  # for the report
    merged: Merged | None = field(default=None, init=False)  # of the latest call that merged
    inside: bool = field(default=False, init=False)  # a merge or a kernel of it

    def place(self, call: Mapping[str, Any]) -> tuple[list[Grid], int] | None:
        """The grids where they stand among the keys of an attention call, and where the first one's
        queries begin; None: it is another's.

        Args:
            call: by the names of scaled_dot_product_attention; tensors [B, H, n, D].
        """
        q, k = call["query"], call["key"]
        count = k.shape[-2]
        shift = 0
        if self.length is not None and count != self.length:
            shift = count - self.length
            if not self.prefixed or shift < 0:
                return None
        end = self.grids[-1].start + torch.Size(self.grids[-1].size).numel()
        if k.dim() != 4 or count < end + shift or call.get("is_causal"):
            return None
        image = torch.Size(self.grids[0].size).numel()
        grids = [grid._replace(start=grid.start + shift) for grid in self.grids]
        if q.shape[2] == count:
            return grids, grids[0].start
        if q.shape[2] == self.length:  # keys of earlier calls have no queries
            return grids, self.grids[0].start
        if q.shape[2] == self.queries:
            return grids, self.first_query
        return (grids, 0) if q.shape[2] == image else None

    def merge(self, call: Mapping[str, Any], bias: bool = True) -> dict[str, Any] | None:
        """The arguments of an attention call with merged keys and values; None: it is another's.

        Args:
            call: as `place` takes it.
            bias: whether the kernel takes numbers to be added to the logits.
        """
        placed = self.place(call)
        if placed is None:
            return None
        grids, first = placed
        scale = self.scale if self.scale is not None else call.get("scale")
        given = call.get("attn_mask")
        self.merged = merge_keys(
            call["query"], call["key"], call["value"], grids, self.how, given, scale, self.draw,
            self.leader, first_query=first, recall=self.recall, counted=bias,
        )  # fmt: skip
        mask = self.merged.bias if bias or given is not None else None
        if mask is not None and not bias and given is not None and given.dtype == torch.bool:
            mask = mask == 0  # as it came
        changes = {"key": self.merged.key, "value": self.merged.value, "attn_mask": mask}
        return {**call, **changes, **({} if scale is None else {"scale": scale})}


class SDPAInterceptor(TorchFunctionMode):
    """While entered, attention over a layer's tokens has its keys merged by `job`."""

    def __init__(self, job: MergeJob) -> None:
        super().__init__()
        self.job = job

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:
            # A Python method, which torch.compile follows only where it is called as one.
            return args[0].unflatten(*args[1:], **kwargs)
        if (func is not SDPA and func is not F.scaled_dot_product_attention) or self.job.inside:
            return func(*args, **kwargs)
        return attend_merged(func, self.job, args, kwargs)


def attend_merged(
    kernel: Callable[..., Tensor], job: MergeJob, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """A call of scaled_dot_product_attention, or of what stands in for it, with merged keys."""
    call = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    alone = call["key"].dim() == 3  # [B, n, D]: one head
    if alone:
        call |= {name: call[name].unsqueeze(1) for name in ("query", "key", "value")}
        mask = call.get("attn_mask")
        if mask is not None and mask.dim() == 3:
            call["attn_mask"] = mask.unsqueeze(1)
    job.inside = True
    try:
        if job.kernel is not None:
            merged = by_kernel_of(job, call)
            if merged is None:
                return kernel(*args, **kwargs)
            return merged.squeeze(1) if alone else merged
        changed = job.merge(call, bias=kernel is SDPA)
        if changed is None:
            return kernel(*args, **kwargs)
        if kernel is not SDPA:
            job.note = f"attention by {_name_of(kernel)}{UNCOUNTED}"
        qkv = [changed.pop(name) for name in ("query", "key", "value")]
        given = {name: v for name, v in changed.items() if name in call or v is not None}
        output = kernel(*qkv, **given)
    finally:
        job.inside = False
    return output.squeeze(1) if alone else output


def by_kernel_of(job: MergeJob, call: Mapping[str, Any]) -> Tensor | None:
    """Attention over merged keys by the job's own kernel; None: the call is another's."""
    own = job.kernel
    assert own is not None
    changed = job.merge(call, bias=own.counts)
    if changed is None:
        return None
    job.note = f"attention by {_name_of(own.call)}" + ("" if own.counts else UNCOUNTED)
    q, k, v = (changed[name] for name in ("query", "key", "value"))
    dropped = call.get("dropout_p") or 0.0
    return own.attend(q, k, v, changed["attn_mask"], changed.get("scale"), dropped)


def _name_of(kernel: Callable[..., Any]) -> str:
    return str(getattr(kernel, "__name__", type(kernel).__name__))
