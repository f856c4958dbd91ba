"""Merging what follows self-attention in a block: the feed-forward network (`mlp`) and cross-attention's queries (`cross`).

Both take tokens one by one, so they run on merged tokens, planned from their own input, and their output is restored. The
block adds it to tokens that were never merged, which keeps what tokens of one group differ in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from diffusers.models import attention_processor as processors
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn

from mame_sd.config import PARTS, MaMeConfig
from mame_sd.diffusion.attention import PLAIN_PROCESSORS, plan_call
from mame_sd.diffusion.hooks import MAME_HOOK, AroundHook, Shared, SizeHook, size_of
from mame_sd.report import LayerStats

# Cross-attention of each query by itself. Other processors may read maps of all queries as an image.
_CROSS_PROCESSORS = PLAIN_PROCESSORS | {
    "IPAdapterAttnProcessor",
    "IPAdapterAttnProcessor2_0",
    "IPAdapterXFormersAttnProcessor",
}


class PartHook(AroundHook):
    """Merges around one module of a block, on [B, L, C] and giving [B, L, C'], while the setting `stats.part` is on."""

    name = MAME_HOOK

    def __init__(self, shared: Shared, stats: LayerStats, image: SizeHook | None) -> None:
        super().__init__()
        self.shared = shared
        self.stats = stats
        self.image = image

    @property
    def on(self) -> bool:
        """Whether the settings in force merge this part."""
        return self.shared.parts[self.stats.part] is not None

    def around(self, module: Any, forward: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The module's output on merged tokens, restored, where that is sound."""
        config = self.shared.parts[self.stats.part]
        if not self.shared.active or config is None:
            return forward(hidden_states, *args, **kwargs)
        reason = _skip_reason(module, hidden_states, config, args, kwargs)
        if reason is not None:
            self.stats.skipped(reason, hidden_states.shape[1])
            return forward(hidden_states, *args, **kwargs)
        plan = plan_call(
            hidden_states, config, size_of(self.image), self.stats, lambda: hidden_states, self.shared.draw
        )
        if plan is None:
            return forward(hidden_states, *args, **kwargs)
        return plan.restore(forward(plan.merge(hidden_states), *args, **kwargs))


def parts_of(path: str, module: nn.Module) -> dict[str, str]:
    """What can merge in a block at `path`: the setting by the module's path; nothing in other modules."""
    if not isinstance(module, BasicTransformerBlock):
        return {}
    prefix = f"{path}." if path else ""
    found = {f"{prefix}ff": "mlp"}
    if module.attn2 is not None and module.attn2.is_cross_attention:
        found[f"{prefix}attn2"] = "cross"
    return found


def check_parts(config: MaMeConfig, hooks: Iterable[Any], root: nn.Module) -> None:
    """Raises ValueError where `config` asks for a part that none of `hooks` merges."""
    there = {hook.stats.part for hook in hooks if isinstance(hook, PartHook)}
    for name in PARTS:
        if getattr(config, name) is not None and name not in there:
            raise ValueError(
                f"{name}: expected blocks of a UNet, DiT or PixArt ({BasicTransformerBlock.__name__}) that have such a "
                f"part, found none in {type(root).__name__}; leave {name} out"
            )


def _skip_reason(
    module: Any, hidden_states: Tensor, config: MaMeConfig, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """Why this call passes through untouched; None if it may merge."""
    if hidden_states.dim() != 3:
        return f"input of {hidden_states.dim()} dimensions"
    if hidden_states.shape[1] < config.min_tokens:
        return f"fewer than min_tokens={config.min_tokens}"
    if not isinstance(module, processors.Attention):
        return None
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if isinstance(mask, Tensor) and mask.dim() > 2 and mask.shape[-2] != 1:
        return "attention mask of queries"
    if kwargs.get("ip_adapter_masks") is not None:
        return "ip_adapter_masks, which go by position"
    name = type(module.processor).__name__
    return None if name in _CROSS_PROCESSORS else f"{name} may go by position"
