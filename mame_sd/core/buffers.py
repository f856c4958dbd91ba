"""Results in the place of what they are made from, where no gradient needs it any more.

On a CPU half of merging's time was page faults of fresh buffers. Functions of PyTorch that take
`out` are given `out=reuse(t)`; `relu` and `masked_fill` do the same, which have none.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
