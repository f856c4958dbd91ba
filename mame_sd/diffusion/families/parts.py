"""Merging the feed-forward network that follows self-attention in a block (`mlp`).

It takes tokens one by one, so it runs on merged tokens, planned from its own input, and its output
is restored. The block adds it to tokens that were never merged, which keeps what tokens of one
group differ in.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.plan import Plan
from mame_sd.diffusion.families.unet import image_route
from mame_sd.diffusion.layer import Layer, LayerCall, Output, Route, Tokens


class Part(Layer):
    """A module on tokens [B, L, C] that gives [B, L, C'], each token by itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._names = (
            self.hidden,
            *self._names[1:],
        )  # blocks pass the tokens first, whatever a module calls them

    def route(self, call: LayerCall, known: Tokens | None, config: MaMeConfig) -> Route | str:
        """See `Layer`."""
        return _skip_reason(call, config) or image_route(call, known, config, tokens_merged)


def tokens_merged(route: Route, plan: Plan) -> Output:
    """The module's output [B, L, C'] of merged tokens, restored."""
    merged = plan.merge(route.call.given["hidden_states"])
    return Output(plan.restore(route.call.run(hidden_states=merged), route.detail(merged)))


def parts_of(path: str, module: nn.Module) -> dict[str, str]:
    """What can merge in a block at `path`: the setting by the module's path; nothing in other
    modules.
    """
    if not isinstance(module, BasicTransformerBlock):
        return {}
    prefix = f"{path}." if path else ""
    return {f"{prefix}ff": "mlp"}


def _skip_reason(call: LayerCall, config: MaMeConfig) -> str | None:
    """Why this call passes through untouched; None if it may merge."""
    hidden: Any = call.given.get("hidden_states")
    if not isinstance(hidden, Tensor):
        return "input is no tokens [B, L, C]"
    if hidden.dim() != 3:
        return f"input of {hidden.dim()} dimensions"
    if hidden.shape[1] < config.min_tokens:
        return f"fewer than min_tokens={config.min_tokens}"
    return None
