"""What the core does with tensors everywhere: results in the place of what they are made from,
small constants that are made once on each device, rows by index, products outside of autocast.

On a CPU half of merging's time was page faults of fresh buffers. So functions of PyTorch that take
`out` are given `out=reuse(t)` where no gradient needs `t` any more; `relu` and `masked_fill` do the
same, which have no `out`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def in_place(t: Tensor) -> bool:
    """Whether a result computed from `t` may overwrite it: no gradient is needed."""
    return not (torch.is_grad_enabled() and t.requires_grad)


def reuse(t: Tensor) -> Tensor | None:
    """`t` for `out` where a result may overwrite it, else None: a fresh buffer."""
    return t if in_place(t) else None


def relu(t: Tensor) -> Tensor:
    """max(t, 0), in the place of `t` where it may be; so are the results below."""
    return torch.nn.functional.relu(t, inplace=in_place(t))


def masked_fill(t: Tensor, mask: Tensor, value: float) -> Tensor:
    """`t` with `value` where `mask` is True."""
    return t.masked_fill_(mask, value) if in_place(t) else t.masked_fill(mask, value)


def constant(make: Callable[..., Tensor], *args: Any) -> Tensor:
    """What `make` gives for these arguments, numbers and a device; nobody may change it.

    A graph that is compiled or captured makes its own: it can't be trusted with one that others
        read.
    """
    if torch.compiler.is_compiling() or is_captured():
        return make(*args)
    return _made(make, args)


def is_captured() -> bool:
    """Whether a CUDA graph is being captured: what runs then has values only when it is
    replayed.
    """
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=512)
def _made(make: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        _disable_current_modes(),
    ):  # autograd refuses inference tensors
        return make(*args)


def counting(length: int, device: torch.device) -> Tensor:
    """0, 1, ... below `length`, a LongTensor."""
    return torch.arange(length, device=device)


def blocks_of(t: Tensor, slots: Tensor) -> Tensor:
    """Rows of t [B, L, C] at `slots` [T, k], as [B * T, k, C]; always a copy."""
    blocks, k = slots.shape
    every = slots.flatten().expand(t.shape[0], -1)
    return rows_of(t, every).view(t.shape[0] * blocks, k, t.shape[2])


def rows_of(t: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows of t [B, L, C] at `index`, [k] for every sample or [B, k] for each its own, as [B, k,
    C]; into `out`, contiguous, where given.
    """
    if index.dim() == 1:
        return torch.index_select(t, 1, index, out=out)
    b, length, c = t.shape
    into = None if out is None else out.view(-1, c)
    return torch.index_select(t.reshape(b * length, c), 0, flat_rows(index, length), out=into).view(
        b, index.shape[1], c
    )


def flat_rows(index: Tensor, length: int) -> Tensor:
    """Rows [B * k] of a [B * length, C] tensor, of each sample's rows `index` [B, k]: the faster
    way to take them.
    """
    first = torch.arange(0, index.shape[0] * length, length, device=index.device)
    return (index + first.unsqueeze(-1)).flatten()


def no_autocast(t: Tensor) -> contextlib.AbstractContextManager[None]:
    """Autocast off on the device of `t`, where it is on."""
    kind = t.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()
