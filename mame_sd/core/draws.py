"""Which of the drawn partitions a step takes, and tensors that are made once for each device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mame_sd.core.cells import DRAWS

__all__ = ["DRAWS", "constant", "counting", "draw_at"]


def draw_at(timestep: Tensor | float) -> Tensor:
    """Which of the drawn partitions a step takes, a LongTensor [1] below DRAWS; it follows from the
    (largest) timestep.

    Largest, because video models give tokens that are known already (a first frame) the timestep 0
    throughout. The multiples of a constant choose, one by which few draws come twice over the
    timesteps of usual schedulers.
    """
    times = timestep if isinstance(timestep, Tensor) else torch.tensor([timestep])
    thousandths = (times.float().amax().reshape(1) * 1000).long()
    return ((thousandths * 0xAAF4E5A7) & 0xFFFFFFFF) * DRAWS >> 32


def constant(make: Callable[..., Tensor], *args: Any) -> Tensor:
    """What `make` gives for these arguments, numbers and a device; nobody may change it.

    A graph that is compiled or captured makes its own: it can't be trusted with one that others
    read.
    """
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if captured or torch.compiler.is_compiling():
        return make(*args)
    return _made(make, args)


@lru_cache(maxsize=512)
def _made(make: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        return make(*args)  # autograd refuses inference tensors


def counting(length: int, device: torch.device) -> Tensor:
    """0, 1, ... below `length`, a LongTensor."""
    return torch.arange(length, device=device)
