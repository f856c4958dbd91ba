"""Merge in a UNet's self-attention: keys with `keep`, whole tokens around it with `tau`.

ComfyUI calls an "attn1_patch" with (queries, keys, values, extra_options) before the projections,
all three [B, L, C]. It calls an "attn1_output_patch" with (output, extra_options) after the
attention, with the same `extra_options`. Between them, after the projections, it calls the
`optimized_attention_override`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from mame_sd import plan_tokens

from .attention import EngineCall
from .layers import Key, Settings, left_alone
from .run import KEY, RULED_OUT, UNREACHED

PLAN = "mame_sd_plan"
REPLACED = "another node replaces the attention of a block (such as PAG or SAG)"
CUT = "another node has merged or cut the queries (such as ToMe or HyperTile)"
OTHER = "attention over {} tokens is not the image's {} x {}"


class UNetPatch:
    """The three patches.

    They have no state: a plan travels from one to the next in the options of the call or block.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def before(
        self, q: Tensor, k: Tensor, v: Tensor, extra_options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three unchanged, or with merged tokens if `tau` is set.

        Args:
            q: input of the queries' projection, [B, L, C].
            k: input of the keys' projection, [B, L, C].
            v: input of the values' projection, [B, L, C].
            extra_options: the block's options.
        """
        call, name = extra_options[KEY], name_of(extra_options)
        config = self.settings.of(name)
        batch, _, h, w = extra_options["activations_shape"]
        tokens = k.shape[1]
        if tokens == h * w and k.shape[0] == batch:
            call.sizes[name] = h, w
        if config is None:
            call.run.note_left(RULED_OUT)
        elif tokens != h * w or k.shape[0] != batch:
            call.run.note_left(OTHER, tokens, h, w)
        elif why := left_alone(config, k, tokens, k.shape[2], extra_options.get("dim_head", 64)):
            call.run.note_left(*why)
        elif name in call.replaced or name[:-1] in call.replaced:  # or its block
            call.run.note_left(REPLACED)
        elif q.shape[0] != batch or (config.method == "tokens" and q.shape != k.shape):
            call.run.note_left(CUT)
        elif config.tau is None:
            number = self.settings.layers.number(name) or 0
            call.merge = partial(call.merged_keys, config, (h, w), number, 0)
        else:
            plan = extra_options[PLAN] = plan_tokens(k, config.tau)
            call.note_merged(plan, (h, w), "tokens")
            merged = plan.merge(k)
            value = merged if v is k else plan.merge(v)
            return merged if q is k else plan.merge(q), merged, value
        return q, k, v

    def attend(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the output of the engine's call, as an `optimized_attention_override`."""
        call = kwargs["transformer_options"][KEY]
        engine: EngineCall = call.of_engine(function, *args, **kwargs)
        merge, call.merge = call.merge, None
        return engine.run() if merge is None else merge(engine)

    def after(self, n: Tensor, extra_options: dict[str, Any]) -> Tensor:
        """Return the output of all tokens."""
        call = extra_options[KEY]
        if call.merge is not None:
            call.merge = None
            call.run.note_left(UNREACHED)
        plan = extra_options.pop(PLAN, None)
        return n if plan is None else plan.restore(n)


def name_of(extra_options: dict[str, Any]) -> Key:
    """Return the layer that options belong to: its block, the block's place, the layer in it."""
    return (*extra_options.get("block", ()), extra_options.get("block_index", 0))
