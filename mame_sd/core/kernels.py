"""A kernel of the user's own, and which arguments it takes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from mame_sd.core.fit import SDPA

Kernel = Callable[..., Tensor]


class OwnKernel(NamedTuple):
    """A kernel and the names of its arguments."""

    call: Kernel
    names: frozenset[str]

    @property
    def counts(self) -> bool:
        """Whether it adds a bias to the logits."""
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
        """Attention [B, H, Q, D'], by a call with the arguments that are needed.

        Raises ValueError where the kernel lacks one, or gives another shape.
        """
        given: dict[str, Any] = {}
        if attn_mask is not None:
            given["attn_mask"] = attn_mask
        if scale is not None and not math.isclose(scale, q.shape[-1] ** -0.5):
            given["scale"] = scale
        if dropout_p:
            given["dropout_p"] = dropout_p
        if q.shape[1] != k.shape[1]:
            given["enable_gqa"] = True
        for name, value in given.items():
            if name not in self.names:
                shown = list(value.shape) if isinstance(value, Tensor) else value
                raise ValueError(
                    f"kernel: expected one with an argument {name}, for it is {shown} here"
                )
        output = self.call(q, k, v, **given)
        wanted = (*q.shape[:3], v.shape[3])
        if not isinstance(output, Tensor) or output.shape != wanted:
            got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"kernel: expected it to give a tensor {list(wanted)}, got {got}")
        return output


def own_kernel(kernel: Kernel) -> OwnKernel:
    """Read which arguments a kernel has, by name: SageAttention takes and ignores any other.

    Raises TypeError for what is no function, or one whose arguments can't be read.
    """
    if kernel is SDPA:
        return OwnKernel(kernel, frozenset(("attn_mask", "scale", "dropout_p", "enable_gqa")))
    if isinstance(kernel, type) or not callable(kernel):
        raise TypeError(f"kernel: expected a function of (q, k, v), got {kernel!r}")
    own = getattr(kernel, "_orig_mod", kernel)  # of a module that torch.compile wraps
    try:
        names = inspect.signature(own.forward if isinstance(own, nn.Module) else own).parameters
    except ValueError:
        raise TypeError(
            f"kernel: expected a function whose arguments can be read, got {kernel!r}; wrap it in"
            " one of (q, k, v)"
        ) from None
    return OwnKernel(kernel, frozenset(names))
