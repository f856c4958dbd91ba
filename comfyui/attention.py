"""The engine's attention calls, in the terms of `scaled_dot_product_attention`.

The engine hands its attention function and that function's arguments to
`optimized_attention_override`: (function, q, k, v, heads, mask, ..., transformer_options=). With
`skip_reshape` q, k and v are [B, H, L, D], else [B, L, H * D] (SD3's v: [B, L, H, D]). The output
is [B, H, L, D] with `skip_output_reshape`, else [B, L, H * D].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mame_sd.core.keys import Grid, KeyMerging, merge_keys, unlike
from mame_sd.core.merge import Groups

# The engine's functions that add a mask to the logits. For others, and for those of other nodes,
# keys carry the sizes of their groups.
TAKES_MASK = {f"attention_{name}" for name in ("basic", "pytorch", "split", "sub_quad", "xformers")}


@dataclass(frozen=True)
class EngineCall:
    """A call of an attention function, the engine's or another node's."""

    function: Callable[..., Tensor]
    q: Tensor
    k: Tensor
    v: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def heads(self) -> int:
        return self.args[0] if self.args else self.kwargs["heads"]

    @property
    def mask(self) -> Tensor | None:
        """[Q, L], [B, Q, L] or [B, H, Q, L], or broadcast to those; bool, or what is added to
        logits.
        """
        return self.args[1] if len(self.args) > 1 else self.kwargs.get("mask")

    def run(self) -> Tensor:
        return self.function(self.q, self.k, self.v, *self.args, **self.kwargs)

    def heads_last(self, t: Tensor) -> Tensor:
        """[B, L, H, D] of the call's q, k or v."""
        if self.kwargs.get("skip_reshape"):
            return t.transpose(1, 2)
        return t.flatten(2).unflatten(2, (-1, self.q.shape[-1] // self.heads))

    def unlike(self, grid: Grid) -> str | None:
        """Why its mask lets no keys merge; None where it does."""
        mask = self._of_heads()
        return None if mask is None else unlike(mask, [grid])

    def _of_heads(self) -> Tensor | None:
        """The mask, broadcast to [B, H, Q, L]."""
        mask = self.mask
        return mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask

    def merged(
        self, grid: Grid, how: KeyMerging, draw: Tensor | None, leader: Tensor | None
    ) -> tuple[Tensor, Groups]:
        """The output with merged keys, given to the function in the layout it knows; what merged.

        Where another node has merged the queries, so that there are fewer of them than keys, the
        values are fitted to those there are.

        Args:
            grid: the image among the keys.
            how: the settings.
            draw, leader: see `merge_keys`.
        """
        q, k, v = (self.heads_last(t).transpose(1, 2) for t in (self.q, self.k, self.v))
        queries, length = q.shape[2], k.shape[2]
        if queries != length:
            spread = torch.arange(length, device=q.device) * queries // length
            q = q.index_select(2, spread)
        mask = self._of_heads()
        function = self.function
        counted = getattr(function, "__name__", "") in TAKES_MASK
        scale = self.kwargs.get("scale")
        merged = merge_keys(q, k, v, [grid], how, mask, scale, draw, leader, counted=counted)
        key, value = merged.key, merged.value
        if not self.kwargs.get("skip_reshape"):
            key, value = (t.transpose(1, 2).flatten(2) for t in (key, value))
        args, kwargs = self.args, dict(self.kwargs)
        bias = merged.bias if counted or mask is not None else None
        if len(args) > 1:
            args = (args[0], bias, *args[2:])
        else:
            kwargs["mask"] = bias
        return function(self.q, key, value, *args, **kwargs), merged.groups[0]
