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

from torch import Tensor

from mame_sd.diffusion.interception import MergeJob


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

    def merged(self, job: MergeJob) -> Tensor:
        """The output with keys merged by `job`, given to the function in the layout it knows."""
        heads_first = self.kwargs.get("skip_reshape")
        query, key, value = (self.heads_last(t).transpose(1, 2) for t in (self.q, self.k, self.v))
        mask = self.mask
        mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
        named = {"query": query, "key": key, "value": value, "attn_mask": mask}
        fewer = job.merge({**named, "scale": self.kwargs.get("scale")})
        if fewer is None:
            return self.run()
        key, value, mask = fewer["key"], fewer["value"], fewer["attn_mask"]
        if not heads_first:
            key, value = (t.transpose(1, 2).flatten(2) for t in (key, value))
        args, kwargs = self.args, dict(self.kwargs)
        if len(args) > 1:
            args = (args[0], mask, *args[2:])
        else:
            kwargs["mask"] = mask
        return self.function(self.q, key, value, *args, **kwargs)
