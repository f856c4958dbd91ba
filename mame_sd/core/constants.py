"""Small tensors that are the same in every call, made once on each device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


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


def least(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The least normal number, [1, 1, 1]: for sums by which something is divided."""
    return torch.full((1, 1, 1), torch.finfo(dtype).tiny, dtype=dtype, device=device)


def counting(length: int, device: torch.device) -> Tensor:
    """0, 1, ... below `length`, a LongTensor."""
    return torch.arange(length, device=device)
