"""Count what a call asks of a graphics card, without a card: kernels, bytes and products.

Tensors on the meta device have sizes and no values. `pretended` lets them say that they are on a
CUDA device, so that code takes the path that it takes there; `counted` sees every operation. So
whole models run at their real size, on any machine and with any build of PyTorch:

    model = on_card(build(torch.device("meta")))
    apply_mame(model)
    with pretended():
        work = counted(lambda: model(**inputs))
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from mame_sd.core import min_tokens, restore
from mame_sd.diffusion import restoring

CARD = torch.device("cuda", 99)  # no real card, so that no cached tensor of one is used
META = torch.device("meta")
aten = torch.ops.aten
_IS_CUDA, _DEVICE = Tensor.is_cuda.__get__, Tensor.device.__get__  # type: ignore[attr-defined]

# Operations that launch nothing, in addition to those whose result is a view of an argument.
_FREE = re.compile(r"(new_)?empty(_like|_strided)?|_unsafe_view|lift_fresh")
# Those that are more than one launch on CUDA, by the name without the overload, as PyTorch's
# sources have them (aten/src/ATen/native/cuda); the two of linear algebra as profiled on an H200.
_LAUNCHES = {
    "sort": 6,  # a radix sort: histograms, scans and scatters of several digits
    "cumsum": 2,
    "native_group_norm": 3,  # moments, their product with the weights, the result
    "linalg_cholesky_ex": 24,  # a copy, pointers, 21 of cuSOLVER, the lower triangle
    "linalg_solve_triangular": 10,  # a copy, pointers to the matrices of both, 7 of cuBLAS
    "convolution": 2,  # the bias is added by a kernel of its own
}
_SORTED_AT_ONCE = 4096  # so many of the largest entries one kernel sorts
_ONE_BLOCK = 20000  # so many entries one block looks through, of up to 20 rows
# Those that read of their first argument what they return, and no more.
_GATHERS = {"index_select", "gather", "index", "embedding"}
_FILLS = re.compile(r"(new_)?(zeros|ones|full)(_like)?|zero_|fill_")
# Those that read and write what they move, and no more of their first argument.
_MOVES = re.compile(r"index_(copy|fill|put|add)_|scatter_(add_|reduce_)?")
_ADDED = {"addmm", "addmm_", "baddbmm", "baddbmm_"}  # the first argument is added to the product
_PRODUCTS = {"mm", "bmm", "linear", "convolution", "linalg_solve_triangular", *_ADDED}
_ATTENTION = aten.scaled_dot_product_attention.default
_AS_ONE = {aten.linear.default, _ATTENTION}  # counted as one, though PyTorch would decompose them


class Work(NamedTuple):
    """One operation of a graphics card.

    Attributes:
        kind: "product", "convolution", "attention", "masked attention", or "other".
        flops: Two for each multiplication and addition.
        width: Width of a head, for attention.
        matrices: Number of matrices of a batch, for linear algebra.
        restores: True if it chooses tokens or restores them (`mame_sd.core.restore`).
    """

    name: str
    kind: str
    dtype: torch.dtype
    bytes: float
    flops: float
    launches: int = 1
    width: int = 0
    matrices: int = 1
    restores: bool = False


class _Pretended(TorchFunctionMode):
    """Let tensors on the meta device say that they are on CARD, and make CARD's on meta.

    Args:
        known: Values of tensors whose values are read, by the tensor's id.
    """

    def __init__(self, known: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if tensor is not None and func is Tensor.cpu and id(tensor) in self._known:
            return self._known[id(tensor)]
        if func == _IS_CUDA:
            return func(*args) or args[0].is_meta
        if func == _DEVICE:
            device = func(*args)
            return CARD if device == META else device
        if func is Tensor.cuda:
            return args[0].to(META)
        return func(*tree_map(_real, args), **tree_map(_real, kwargs))


def _real(value: Any) -> Any:
    """Return meta for an argument that names the pretended device, and others as they are."""
    if isinstance(value, torch.device):
        return META if value.type == "cuda" else value
    return META if isinstance(value, str) and value.split(":")[0] == "cuda" else value


@contextmanager
def pretended(
    known: Mapping[int, Tensor] | None = None, capability: tuple[int, int] = (8, 0)
) -> Iterator[None]:
    """Let tensors on the meta device say that they are on a CUDA device, for a `with` block.

    Args:
        known: Values of tensors whose values are read, by the tensor's id.
        capability: Compute capability of the device; attention is fused on it.
    """
    # a build of PyTorch without CUDA can't be asked for it
    capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False)
    machine = min_tokens.Machine("cuda", capability, (2, 13), True, "GeForce")
    asked = mock.patch.object(min_tokens, "asked", return_value=machine)
    with _Pretended(known or {}), torch.inference_mode(), capturing, asked:
        yield


def on_card(model: nn.Module) -> nn.Module:
    """Return a model on the meta device, without gradients."""
    return model.to(META).eval().requires_grad_(False)


def counted(call: Callable[[], Any], repeats: Mapping[nn.Module, int] | None = None) -> list[Work]:
    """Return the kernels that a call launches, in order. Call it within `pretended`.

    Args:
        call: The call.
        repeats: Modules that stand for as many of their kind, one after another: models cut in
            depth.
    """
    counter, hooks = _Counter(), []
    begun: list[int] = []

    def begin(*_: Any) -> None:
        begun.append(len(counter.work))

    def end(times: int, *_: Any) -> None:
        counter.work += counter.work[begun.pop() :] * (times - 1)

    for module, times in (repeats or {}).items():
        hooks.append(module.register_forward_pre_hook(begin))
        hooks.append(module.register_forward_hook(partial(end, times)))
    try:
        with counter, counter.restoring():
            call()
    finally:
        for hook in hooks:
            hook.remove()
    return counter.work


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.work: list[Work] = []

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Mark what chooses tokens and what restores them, for a `with` block."""

        def marked(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                start = len(self.work)
                output = function(*args, **kwargs)
                self.work[start:] = [one._replace(restores=True) for one in self.work[start:]]
                return output

            return call

        names = {"choose_tokens", "take", "restore", "add_restored_"}
        with ExitStack() as patches:
            for owner in (restoring, restore, restore.ChosenTokens):
                for name in names & vars(owner).keys():
                    function = marked(getattr(owner, name))
                    patches.enter_context(mock.patch.object(owner, name, function))
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATTENTION:
            output = torch.empty_like(args[0], dtype=args[2].dtype).resize_(
                *args[0].shape[:-1], args[2].shape[-1]
            )
            self.work.append(_attention(output, *args, **kwargs))
            return output
        if func is aten.dropout.default and not args[2]:  # of which the decomposition makes a copy
            return args[0]
        if func not in _AS_ONE and _is_composite(func):
            with self:
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        every = tree_leaves((args, kwargs, output))
        on_meta = any(isinstance(t, Tensor) and t.is_meta for t in every)
        if on_meta and not _launches_nothing(func):
            self.work.append(_work(func, args, kwargs, output))
        return output


def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(
        func.namespace == "aten"
        and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    )


def _launches_nothing(func: Any) -> bool:
    if func.namespace == "prim" or _FREE.fullmatch(_name(func)):
        return True
    return any(
        made.alias_info is not None and not made.alias_info.is_write
        for made in func._schema.returns
    )


def _name(func: Any) -> str:
    return str(func._schema.name.split("::")[1])


def _bytes(t: Any) -> int:
    """Return the bytes to read of a tensor; repeated entries of an expanded one count once."""
    if not isinstance(t, Tensor):
        return 0
    entries = math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride)
    return min(entries, t.numel()) * t.element_size()


def _work(func: Any, args: Any, kwargs: Any, output: Any) -> Work:
    name = _name(func)
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    made = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
    read, written = sum(map(_bytes, given)), sum(map(_bytes, made))
    if name in _GATHERS:
        read = written + sum(map(_bytes, given[1:]))
    elif _FILLS.fullmatch(name):
        read = 0
    elif name == "copy_":
        read = _bytes(given[1]) if len(given) > 1 else 0
    elif _MOVES.fullmatch(name):
        read = written = sum(map(_bytes, given[1:]))
    elif name == "native_group_norm":
        read += _bytes(given[0])  # once for the moments, once for the result
    elif name == "convolution":
        written += 2 * sum(map(_bytes, made)) if args[2] is not None else 0
    launches = _LAUNCHES.get(name, 1)
    if name == "convolution" and args[2] is None:
        launches = 1
    elif name == "topk":
        launches = _topk(func, args, kwargs)
    kind = "other"
    if name in _PRODUCTS:
        kind = "convolution" if name == "convolution" else "product"
    dtype = next((t.dtype for t in given if t.is_floating_point()), torch.float32)
    matrices = math.prod(args[0].shape[:-2]) if name.startswith("linalg_") else 1
    flops = _flops(func, name, args, output)
    return Work(name, kind, dtype, read + written, flops, launches, matrices=matrices)


def _topk(func: Any, args: Any, kwargs: Any) -> int:
    """Return the launches of a top-k of up to 20 rows: to find entries, and to sort them."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # Long rows are counted by digit: three kernels for each byte, scans, and two memsets.
    least = 1 if given["self"].shape[-1] < _ONE_BLOCK else 2 + 3 * given["self"].element_size() + 7
    if not given.get("sorted", True):
        return least
    return least + (1 if given["k"] <= _SORTED_AT_ONCE else _LAUNCHES["sort"] + 3)


def _flops(func: Any, name: str, args: Any, output: Any) -> int:
    if name == "convolution":
        return int(flop_registry[func._overloadpacket](*args, out_val=output))
    if name == "linalg_solve_triangular":
        return int(args[0].shape[-1] * args[1].numel())
    if name not in _PRODUCTS:
        return 0
    return int(2 * output.numel() * args[name in _ADDED].shape[-1])


def _attention(output: Tensor, *args: Any, **kwargs: Any) -> Work:
    query, key, value, *more = args
    mask = kwargs.get("attn_mask", more[0] if more else None)
    pairs = math.prod(query.shape[:-2]) * query.shape[-2] * key.shape[-2]
    moved = sum(map(_bytes, (query, key, value, output, mask)))
    flops = 2 * pairs * (query.shape[-1] + value.shape[-1])
    kind = "attention" if mask is None else "masked attention"
    return Work("attention", kind, query.dtype, moved, flops, 1, width=query.shape[-1])
