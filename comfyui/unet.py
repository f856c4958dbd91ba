"""A UNet's self-attention: what comes before it merges, in it merged keys are corrected, what comes
after it is whole again.

ComfyUI calls an "attn1_patch" with (queries, keys, values, extra_options) before the projections,
all three [B, L, C]. It calls an "attn1_output_patch" with (output, extra_options) after the
attention, with the same `extra_options`. Between them, after the projections, it calls the
`optimized_attention_override`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mame_sd import plan_merge
from mame_sd.core.detail import Detail
from mame_sd.core.partition import DRAWS
from mame_sd.diffusion.families.keys import GroupedKeys
from mame_sd.diffusion.layer import NOTHING_TO_WIN, nothing_to_win

from .attention import EngineCall
from .layers import Key, Settings
from .models import UNet

KEY = "mame_sd"
PLAN = "mame_sd_plan"
REPLACED = "another node replaces the attention of a block (such as PAG or SAG)"
CUT = "another node has merged or cut the queries (such as ToMe or HyperTile)"
RULED_OUT = "the settings leave a layer as it is"
SMALL = "{} tokens are fewer than min_tokens={}"
OTHER = "attention over {} tokens is not the image's {} x {}"


class UNetPatch:
    """The three patches.

    They keep nothing: a plan travels from one to the next in the call's or the block's own options.
    """

    def __init__(self, settings: Settings, unet: UNet) -> None:
        self.settings = settings
        self.unet = unet

    def before(
        self, q: Tensor, k: Tensor, v: Tensor, extra_options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The three with merged keys and values; merged queries too, where those of the settings
        do.
        """
        call, name = extra_options[KEY], name_of(extra_options)
        config = self.settings.of(name)
        batch, _, h, w = extra_options["activations_shape"]
        tokens = k.shape[1]
        if config is None:
            call.run.note_left(RULED_OUT)
        elif tokens != h * w or k.shape[0] != batch:
            call.run.note_left(OTHER, tokens, h, w)
        elif tokens < config.min_tokens:
            call.run.note_left(SMALL, tokens, config.min_tokens)
        elif replaced(extra_options, call.replaced):
            call.run.note_left(REPLACED)
        elif q.shape[0] != batch or (config.merge == "qkv" and q.shape != k.shape):
            call.run.note_left(CUT)
        else:
            number = self.unet.layers.number(name) or 0
            draw = None if call.draw is None else (call.draw + number) % DRAWS
            plan = plan_merge(k, config, (h, w), draw=draw, leader=call.leader)
            if nothing_to_win(config, plan):
                call.run.note_left(NOTHING_TO_WIN)
                return q, k, v
            call.note_merged(plan, (h, w))
            if config.merge == "qkv":
                means = plan.merge(k)
                detail = Detail(k, (h, w), means) if config.detail else None
                extra_options[PLAN] = plan, detail
                q = means if q is k else plan.merge(q)
            reached = not call.run.unreached
            grouped = GroupedKeys(plan, config.correct and reached)
            counts = plan.uneven and config.merge == "kv"
            call.keys = grouped if reached and (config.correct or counts) else None
            keys = grouped.keys_of(k)
            return q, keys, keys if v is k else grouped.keys_of(v)
        return q, k, v

    def attend(
        self,
        function: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The output of the engine's call; an `optimized_attention_override`."""
        call = kwargs["transformer_options"][KEY]
        engine = EngineCall(call.attention(function), q, k, v, args, kwargs)
        keys, call.keys = call.keys, None
        return engine.run() if keys is None else engine.attended(keys)

    def after(self, n: Tensor, extra_options: dict[str, Any]) -> Tensor:
        call = extra_options[KEY]
        if call.keys is not None:
            call.keys = None
            call.run.unreached = True
        plan, detail = extra_options.pop(PLAN, (None, None))
        return n if plan is None else plan.restore(n, detail)


def name_of(extra_options: dict[str, Any]) -> Key:
    """The transformer layer that the options are of: its block, the block's place, the layer in
    it.
    """
    return (*extra_options.get("block", ()), extra_options.get("block_index", 0))


def replaced(extra_options: dict[str, Any], blocks: frozenset[tuple[Any, ...]]) -> bool:
    """Whether this layer's self-attention is among `blocks`, which name a block or one transformer
    layer of it.
    """
    name = name_of(extra_options)
    return name in blocks or name[:-1] in blocks
