"""Merging at the attention call of a model's own processor, in front of any kernel.

A processor projects, normalises and rotates queries, keys and values, and calls
`torch.nn.functional.scaled_dot_product_attention`, what somebody put in its place, or a backend of
diffusers' dispatcher (SageAttention, FlashAttention, xFormers, flex, ...). While a `MergeJob` runs,
all of these are intercepted: all that came before the call stays as it is, the image's keys and
values merge (`mame_sd.core.attention`), and the same kernel computes attention over what is left.

Which job runs is read from PyTorch's stack of function modes, on which `SDPAInterceptor` stands. It
is one stack for each thread, and `torch.compile` and `torch.export` follow it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mame_sd.core.attention import (
    Grid,
    KeyMerging,
    Merged,
    OwnKernel,
    Recall,
    merge_keys,
)
from mame_sd.core.fit import SDPA

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
# Backends of the dispatcher whose kernels take numbers to be added to the logits. For all others
# keys carry the sizes of their groups (`sized_keys`).
_TAKES_BIAS = {"native", "_native_cudnn", "_native_efficient", "_native_math", "flex", "xformers"}
UNCOUNTED = ", which takes no sizes of groups: their keys carry them"


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
        return _attend(func, self.job, args, kwargs)


def _attend(
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
            merged = _by_kernel_of(job, call)
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


def _by_kernel_of(job: MergeJob, call: Mapping[str, Any]) -> Tensor | None:
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


def _job() -> MergeJob | None:
    """The job of this thread's innermost layer that merges; None: no layer does, or its kernel runs
    already.
    """
    for place in range(torch._C._len_torch_function_stack() - 1, -1, -1):
        mode = torch._C._get_function_stack_at(place)
        if isinstance(mode, SDPAInterceptor):
            return None if mode.job.inside else mode.job
    return None


class _Backends(dict[Any, Callable[..., Any]]):
    """The backends of diffusers' dispatcher, each under interception, whenever it is registered."""

    def __setitem__(self, name: Any, backend: Callable[..., Any]) -> None:
        super().__setitem__(name, _watched(backend, getattr(name, "value", name)))


@torch.compiler.assume_constant_result  # while a graph is compiled, not in it
def watch_kernels() -> None:
    """Puts each backend of diffusers' dispatcher under interception, those to come too, and
    whatever somebody put in the place of scaled_dot_product_attention.

    A watched kernel does as before where no layer of its thread merges.
    """
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    if not isinstance(Registry._backends, _Backends):
        found, Registry._backends = Registry._backends, _Backends()
        for name, backend in found.items():
            Registry._backends[name] = backend
    kernel = F.scaled_dot_product_attention
    if kernel is not SDPA and not hasattr(kernel, "_mame_watched"):
        F.scaled_dot_product_attention = _watched_replacement(kernel)


def _watched_replacement(kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def watched(*args: Any, **kwargs: Any) -> Any:
        job = _job()
        return kernel(*args, **kwargs) if job is None else _attend(kernel, job, args, kwargs)

    watched._mame_watched = True  # type: ignore[attr-defined]
    return watched


def _watched(backend: Callable[..., Any], name: str) -> Callable[..., Any]:
    if hasattr(backend, "_mame_watched"):
        return backend
    # diffusers' own native backend calls scaled_dot_product_attention
    native = name == "native" and backend.__module__ == "diffusers.models.attention_dispatch"
    counted = name in _TAKES_BIAS and "attn_mask" in inspect.signature(backend).parameters

    @functools.wraps(backend)
    def watched(**call: Any) -> Any:
        job = None if native else _job()
        mask = call.get("attn_mask")
        if job is None or (mask is not None and not isinstance(mask, Tensor)):  # flex's BlockMask
            return backend(**call)
        if mask is not None and mask.dim() == 2:  # [B, N], as the dispatcher has it
            mask = mask[:, None, None]
        heads_first = {n: call[n].transpose(1, 2) for n in ("query", "key", "value")}
        job.inside = True
        try:
            if job.kernel is not None:
                own = _by_kernel_of(job, {**call, **heads_first, "attn_mask": mask})
                return backend(**call) if own is None else own.transpose(1, 2)
            changed = job.merge({**call, **heads_first, "attn_mask": mask}, bias=counted)
            if changed is None:
                return backend(**call)
            job.note = f"attention by {name}" + ("" if counted else UNCOUNTED)
            merged = {n: changed[n].transpose(1, 2).contiguous() for n in ("key", "value")}
            taken = {n: v for n, v in changed.items() if n in call or v is not None}
            return backend(**{**taken, **merged, "query": call["query"]})
        finally:
            job.inside = False

    watched._mame_watched = True  # type: ignore[attr-defined]
    return watched
