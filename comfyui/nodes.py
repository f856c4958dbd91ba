"""The node, and the two functions it patches into every self-attention of a UNet.

ComfyUI calls an "attn1_patch" with (queries, keys, values, extra_options) before the projections, all three [B, L, C], and
an "attn1_output_patch" with (output, extra_options) after the attention; `extra_options["original_shape"]` is the latent's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.merge import plan_merge
from mame_sd.core.plan import Plan

log = logging.getLogger("mame-sd")

BeforePatch = Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], tuple[Tensor, Tensor, Tensor]]
AfterPatch = Callable[[Tensor, Mapping[str, Any]], Tensor]


class MaMeModelPatch:
    """Node: merges tokens in the self-attention of a UNet model (SD 1.x, SD 2.x, SDXL)."""

    RETURN_TYPES: ClassVar = ("MODEL",)
    FUNCTION: ClassVar = "patch"
    CATEGORY: ClassVar = "model_patches"
    DESCRIPTION: ClassVar = "Faster self-attention by merging similar tokens (MaMe). Keep: share of tokens that remain."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        number = {"min": -1.0, "max": 1.0, "step": 0.005, "round": 0.001}
        return {
            "required": {
                "model": ("MODEL",),
                "by": (["keep", "tau"],),
                "amount": ("FLOAT", {"default": MaMeConfig().keep, **number}),
                "merge": (["keys and values", "queries too"],),
                "min_tokens": ("INT", {"default": MaMeConfig().min_tokens, "min": 1, "max": 1 << 20}),
            }
        }

    def patch(self, model: Any, by: str, amount: float, merge: str, min_tokens: int) -> tuple[Any]:
        """A clone of `model` that merges; `model` itself is left as it is.

        Raises:
            ValueError: `amount` is out of the range of `by`.
        """
        kind = "kv" if merge == "keys and values" else "qkv"
        config = MaMeConfig.from_dict({by: amount, "merge": kind, "min_tokens": min_tokens})
        before, after = patches(config)
        clone = model.clone()
        clone.set_model_attn1_patch(before)
        clone.set_model_attn1_output_patch(after)
        return (clone,)


def patches(config: MaMeConfig) -> tuple[BeforePatch, AfterPatch]:
    """What to call before and after each self-attention. They take turns: one call of the second for each of the first."""
    plans: list[Plan] = []
    told: set[str] = set()

    def tell(message: str) -> None:
        if message not in told:
            told.add(message)
            log.info("MaMe: %s", message)

    def before(q: Tensor, k: Tensor, v: Tensor, extra_options: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        plans.clear()
        tokens = q.shape[1]
        size = level_size(extra_options, tokens)
        if k.shape != q.shape or tokens < config.min_tokens or size is None:
            tell(f"{tokens} tokens left alone")
            return q, k, v
        plan = plan_merge(q, config, size)
        tell(f"{plan.tokens_in} -> {plan.tokens_kept} tokens at {size[0]} x {size[1]}")
        keys = plan.merge(k)
        values = keys if v is k else plan.merge(v)
        if config.merge == "kv":
            return q, keys, values
        plans.append(plan)
        return (keys if q is k else plan.merge(q)), keys, values

    def after(n: Tensor, extra_options: Mapping[str, Any]) -> Tensor:
        return plans.pop().restore(n) if plans else n

    return before, after


def level_size(extra_options: Mapping[str, Any], tokens: int) -> tuple[int, int] | None:
    """(h, w) of `tokens`, from the latent's shape [..., H, W], each level half of the one above, rounded up.

    None when they are no level of it: attention over frames, or tokens that another patch has merged.
    """
    h, w = (int(n) for n in extra_options["original_shape"][-2:])
    while h * w > tokens and h * w > 1:
        h, w = (h + 1) // 2, (w + 1) // 2
    return (h, w) if h * w == tokens else None


NODE_CLASS_MAPPINGS = {"MaMeModelPatch": MaMeModelPatch}
NODE_DISPLAY_NAME_MAPPINGS = {"MaMeModelPatch": "MaMe token merging"}
