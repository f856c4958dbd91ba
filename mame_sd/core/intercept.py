"""Intercept the attention calls of a layer, and merge their keys in front of any kernel.

A model's own code projects, normalises and rotates queries, keys and values, and calls
`torch.nn.functional.scaled_dot_product_attention`, or a function that was put in its place. While
a `MergeJob` runs under an `SDPAInterceptor`, that call is intercepted: the image's keys and values
merge (`merge_keys.py`), and the same kernel computes attention over the kept keys. Backends of
diffusers' dispatcher are intercepted too (`mame_sd.diffusion.attention_backends`).

`SDPAInterceptor` is a function mode of PyTorch. Each thread has one stack of such modes, and
`torch.compile` and `torch.export` follow it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mame_sd.core.fit import SDPA
from mame_sd.core.groups import Groups
from mame_sd.core.merge_keys import (
    Choice,
    Grid,
    KeyMerging,
    Merged,
    merge_keys,
    repeats_row,
    unlike,
)

Kernel = Callable[..., Tensor]
Mode = TypeVar("Mode", bound=TorchFunctionMode)
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
UNCOUNTED = ", which takes no sizes of groups: their keys carry them"


class KernelAdapter(NamedTuple):
    """Pass an attention kernel only those arguments that it names."""

    call: Kernel
    names: frozenset[str]

    @property
    def takes_bias(self) -> bool:
        """Return True if the kernel accepts a bias of the logits."""
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
        passed = {name: value for name, value in needed.items() if value is not None}
        for name, value in passed.items():
            if name not in self.names:
                shown = list(value.shape) if isinstance(value, Tensor) else value
                message = f"kernel: expected one with an argument {name}, for it is {shown} here"
                raise ValueError(message)
        output = self.call(q, k, v, **passed)
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
    function = getattr(kernel, "_orig_mod", kernel)  # the module that torch.compile wraps
    try:
        names = inspect.signature(
            function.forward if isinstance(function, nn.Module) else function
        ).parameters
    except ValueError:
        raise TypeError(
            f"kernel: expected a function whose arguments can be read, got {kernel!r}; wrap it in"
            " one of (q, k, v)"
        ) from None
    return KernelAdapter(kernel, frozenset(names))


@dataclass
class MergeJob:
    """Merge the keys in one call of a layer.

    Attributes:
        grids: positions of the image's keys, and of reference images' keys, in the sequence.
        length: number of keys in the sequence. If None, any number that contains the grids.
        first_query: position of the image's first query among `queries` queries.
        queries: number of queries of the layer, if it differs from the number of keys.
        options: the settings.
        draw, leader: see `Choice`.
        groups: for each attention call by its number, the groups of its grids that an earlier call
            of the layer made.
        prefixed: if True, any number of keys of earlier calls precede these keys.
        scale: scale of the logits, if the processor's scale differs from that of the call.
        kernel: computes attention over merged keys instead of the model's own kernel.
        merges: if False, keys don't merge and only `rows` applies.
        repeats: how often the last key of the sequence counts, in fp32.
        rows: LongTensor [B, n], the positions among the image's tokens of the queries to compute.
            The output is zero for all other queries of the image. If None, all queries are
            computed.
        note: text for the report.
        left: reason why the latest attention call over the grids was not merged. Empty if it was.
        merged: result of the latest attention call that merged, or None.
        counted: True once an attention call counted its last key `repeats` times.
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
    groups: dict[int, dict[int, Groups]] | None = None
    prefixed: bool = False
    scale: float | None = None
    kernel: KernelAdapter | None = None
    merges: bool = True
    repeats: int = 1
    rows: Tensor | None = None
    note: str = field(default="", init=False)
    left: str = field(default="", init=False)
    merged: Merged | None = field(default=None, init=False)
    counted: bool = field(default=False, init=False)
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

    def merge(
        self, call: Mapping[str, Any], grids: list[Grid], first: int, bias: bool = True
    ) -> dict[str, Any] | None:
        """Return the arguments of an attention call with merged keys and values.

        Args:
            call: as for `place`.
            grids: the grids at their positions among the keys.
            first: position of the first grid's first query.
            bias: if True, the kernel accepts a bias of the logits.

        Returns:
            The arguments by name, or None if the keys can't merge under the call's mask.
        """
        scale = self.scale if self.scale is not None else call.get("scale")
        attn_mask = call.get("attn_mask")
        self.left = unlike(attn_mask, grids) or "" if isinstance(attn_mask, Tensor) else ""
        if self.left:
            return None
        groups = None if self.groups is None else self.groups.setdefault(self.calls, {})
        self.calls += 1
        q, k, v = (call[name] for name in _NAMES[:3])
        choice = Choice(self.draw, self.leader, groups)
        self.merged = merge_keys(
            q, k, v, grids, self.options, attn_mask, scale, choice, first, bias, self.repeats
        )
        mask = self.merged.bias
        if (
            mask is not None
            and not bias
            and attn_mask is not None
            and attn_mask.dtype == torch.bool
        ):
            mask = mask == 0  # boolean again, as in the original call
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
            bias: if True, that kernel accepts a bias of the logits.
            kernel: the model's kernel, which computes the changed call if `self.kernel` is None.
            unmerged: computes the original call.
            laid_out: converts the output [B, H, Q, D'] of `self.kernel` to the layout that the
                caller expects. If None, nothing is converted.
            axis: dimension of the queries in the output of `kernel`.

        Returns:
            The output of the kernel that ran, in the layout that the caller expects.
        """
        adapter, changed = self.kernel, None
        if adapter is not None:
            name, bias = kernel_name(adapter.call), adapter.takes_bias
        self.inside = True  # calls that the kernel makes are not intercepted
        try:
            placed = self.place(call)
            if placed is None:
                return unmerged()
            grids, first = placed
            if self.merges and (changed := self.merge(call, grids, first, bias)) and name:
                self.note = f"attention by {name}" + ("" if bias else UNCOUNTED)
            if self.repeats > 1 and changed is None:
                row = repeats_row(call["key"].shape[2], self.repeats, call["query"])
                changed = {**call, "attn_mask": row}
            self.counted = True
            some = self.rows is not None and self.rows.shape[0] == call["query"].shape[0]
            if some:
                changed = self._of_rows(changed or call, first)
            if changed is None:
                return unmerged()
            qkv = [changed.pop(n) for n in ("query", "key", "value")]
            if adapter is None:
                arguments = {n: v for n, v in changed.items() if n in call or v is not None}
                output = kernel(*qkv, **arguments)
                return self._in_place(output, first, axis) if some else output
            mask, dropped = changed.get("attn_mask"), call.get("dropout_p") or 0.0
            output = adapter.attend(qkv[0], qkv[1], qkv[2], mask, changed.get("scale"), dropped)
            output = self._in_place(output, first, 2) if some else output
            return output if laid_out is None else laid_out(output)
        finally:
            self.inside = False

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

        `axis` is the dimension of the queries in `output`, and `first` the position of the image's
        first query.
        """
        assert self.rows is not None
        count, tokens = self.rows.shape[1], torch.Size(self.grids[0].size).numel()
        before, image, after = output.split(
            [first, count, output.shape[axis] - first - count], axis
        )
        shape = list(image.shape)
        shape[axis] = tokens
        last = output.dim() - axis - 1
        at = self.rows.view(self.rows.shape[0], *[1] * (axis - 1), count, *[1] * last)
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
        return _attend_merged(func, self.job, args, kwargs)


def running_job() -> MergeJob | None:
    """Return the job of this thread's innermost layer that merges.

    It is None if no layer merges, or the layer's kernel is running already.
    """
    mode = innermost(SDPAInterceptor)
    return None if mode is None or mode.job.inside else mode.job


def innermost(kind: type[Mode]) -> Mode | None:
    """Return the innermost function mode of a class that this thread has entered, or None.

    The modes belong to the call, and `torch.compile` follows them, which a ContextVar would not.
    """
    for place in range(torch._C._len_torch_function_stack() - 1, -1, -1):
        mode = torch._C._get_function_stack_at(place)
        if isinstance(mode, kind):
            return mode
    return None


def watch_replacement() -> None:
    """Intercept a function that was put in the place of scaled_dot_product_attention, if any."""
    kernel = F.scaled_dot_product_attention
    if kernel is SDPA or hasattr(kernel, "_mame_watched"):
        return

    @functools.wraps(kernel)
    def watched(*args: Any, **kwargs: Any) -> Any:
        job = running_job()
        return kernel(*args, **kwargs) if job is None else _attend_merged(kernel, job, args, kwargs)

    watched._mame_watched = True  # type: ignore[attr-defined]
    F.scaled_dot_product_attention = watched


def _attend_merged(
    kernel: Callable[..., Tensor], job: MergeJob, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call scaled_dot_product_attention, or a function in its place, with merged keys.

    Tensors among the arguments are [B, H, n, D] or [B, n, D]. The output is [B, H, Q, D'] or
    [B, Q, D'].
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
