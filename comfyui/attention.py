"""Translate attention calls of the engine to `scaled_dot_product_attention`.

The engine passes its attention function and that function's arguments to
`optimized_attention_override`: (function, q, k, v, heads, mask, ..., transformer_options=). With
`skip_reshape` q, k and v are [B, H, L, D], otherwise [B, L, H * D] (SD3's v: [B, L, H, D]). The
output is [B, H, L, D] with `skip_output_reshape`, otherwise [B, L, H * D].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mame_sd.core.groups import Groups
from mame_sd.core.merge_keys import Choice, Grid, KeyMerging, merge_keys, unlike

# The engine's functions that add a mask to the logits. For others, and for those of other nodes,
# keys carry the sizes of their groups.
TAKES_MASK = {f"attention_{name}" for name in ("basic", "pytorch", "split", "sub_quad", "xformers")}


@dataclass(frozen=True)
class EngineCall:
    """A call of an attention function of the engine or of another node."""

    function: Callable[..., Tensor]
    q: Tensor
    k: Tensor
    v: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def heads(self) -> int:
        """Return the number of heads."""
        return self.args[0] if self.args else self.kwargs["heads"]

    @property
    def mask(self) -> Tensor | None:
        """Return the mask, bool or additive, broadcastable to [Q, L], [B, Q, L] or [B, H, Q, L]."""
        return self.args[1] if len(self.args) > 1 else self.kwargs.get("mask")

    def run(self) -> Tensor:
        """Call the function."""
        return self.function(self.q, self.k, self.v, *self.args, **self.kwargs)

    def heads_last(self, t: Tensor) -> Tensor:
        """Return the call's q, k or v as [B, L, H, D]."""
        if self.kwargs.get("skip_reshape"):
            return t.transpose(1, 2)
        return t.flatten(2).unflatten(2, (-1, self.q.shape[-1] // self.heads))

    def unlike(self, grid: Grid) -> str | None:
        """Return why the call's mask lets no keys merge, or None if it does."""
        mask = self._of_heads()
        return None if mask is None else unlike(mask, [grid])

    def _of_heads(self) -> Tensor | None:
        """Return the mask, broadcast to [B, H, Q, L]."""
        mask = self.mask
        return mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask

    def merged(self, grid: Grid, options: KeyMerging, choice: Choice) -> tuple[Tensor, Groups]:
        """Call the function with merged keys, in the layout that it expects.

        If another node has merged the queries, so that there are fewer of them than keys, the
        values are fitted to the queries that there are.

        Args:
            grid: the image among the keys.
            options: the settings.
            choice: the draw and the leaders.

        Returns:
            The output, and the groups that merged.
        """
        q, k, v = (self.heads_last(t).transpose(1, 2) for t in (self.q, self.k, self.v))
        queries, length = q.shape[2], k.shape[2]
        if queries != length:
            spread = torch.arange(length, device=q.device) * queries // length
            q = q.index_select(2, spread)
        mask = self._of_heads()
        function = self.function
        size_bias = getattr(function, "__name__", "") in TAKES_MASK
        scale = self.kwargs.get("scale")
        merged = merge_keys(q, k, v, [grid], options, mask, scale, choice, size_bias=size_bias)
        key, value = merged.key, merged.value
        if not self.kwargs.get("skip_reshape"):
            key, value = (t.transpose(1, 2).flatten(2) for t in (key, value))
        args, kwargs = self.args, dict(self.kwargs)
        bias = merged.bias if size_bias or mask is not None else None
        if len(args) > 1:
            args = (args[0], bias, *args[2:])
        else:
            kwargs["mask"] = bias
        return function(self.q, key, value, *args, **kwargs), merged.groups[0]
