"""Merging what follows self-attention in a block: the feed-forward network (`mlp`) and cross-attention's queries (`cross`).

Both take tokens one by one, so they run on merged tokens, planned from their own input, and their output is restored. The
block adds it to tokens that were never merged, which keeps what tokens of one group differ in.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.plan import Plan
from mame_sd.diffusion.families.unet import PLAIN_PROCESSORS, lie
from mame_sd.diffusion.layer import Layer, LayerCall
from mame_sd.diffusion.tokens import Tokens

# Cross-attention of each query by itself. Other processors may read maps of all queries as an image.
_CROSS_PROCESSORS = PLAIN_PROCESSORS | {
    "IPAdapterAttnProcessor",
    "IPAdapterAttnProcessor2_0",
    "IPAdapterXFormersAttnProcessor",
}


class Part(Layer):
    """A module on tokens [B, L, C] that gives [B, L, C'], each token by itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._names = (self.hidden, *self._names[1:])  # blocks pass the tokens first, whatever a module calls them

    def tokens(self, call: LayerCall, known: Tokens | None, config: MaMeConfig) -> Tokens | str:
        """The tokens; a reason where the module may look at their places, or they are too few."""
        return _skip_reason(call, config) or lie(call.arguments["hidden_states"], known, config)

    def merged(self, call: LayerCall, tokens: Tokens, plan: Plan, config: MaMeConfig) -> Any:
        """The module's output [B, L, C'] of merged tokens."""
        return plan.restore(call.run(hidden_states=plan.merge(call.arguments["hidden_states"])))


def parts_of(path: str, module: nn.Module) -> dict[str, str]:
    """What can merge in a block at `path`: the setting by the module's path; nothing in other modules."""
    if not isinstance(module, BasicTransformerBlock):
        return {}
    prefix = f"{path}." if path else ""
    found = {f"{prefix}ff": "mlp"}
    if module.attn2 is not None and module.attn2.is_cross_attention:
        found[f"{prefix}attn2"] = "cross"
    return found


def _skip_reason(call: LayerCall, config: MaMeConfig) -> str | None:
    """Why this call passes through untouched; None if it may merge."""
    hidden = call.arguments.get("hidden_states")
    if not isinstance(hidden, Tensor):
        return "input is no tokens [B, L, C]"
    if hidden.dim() != 3:
        return f"input of {hidden.dim()} dimensions"
    if hidden.shape[1] < config.min_tokens:
        return f"fewer than min_tokens={config.min_tokens}"
    if not isinstance(call.module, Attention):
        return None
    mask = call.arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() > 2 and mask.shape[-2] != 1:
        return "attention mask of queries"
    if call.arguments.get("ip_adapter_masks") is not None:
        return "ip_adapter_masks, which go by position"
    return None if call.kind in _CROSS_PROCESSORS else f"{call.kind} may go by position"
