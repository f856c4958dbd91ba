"""Self-attention with nothing beside its tokens: UNets, DiT, PixArt.

The installed processor computes the attention, also what it does before and after it. Processors
that call no attention that can be intercepted (sliced ones, xFormers' own) are stood in for by
diffusers' `AttnProcessor2_0`.
"""

from __future__ import annotations

import inspect
import math
from functools import partial
from operator import index
from typing import Any

from diffusers.models import attention_processor as processors
from diffusers.models.attention_processor import Attention
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.merge import least_tokens, too_few
from mame_sd.core.paper import Plan
from mame_sd.diffusion.context import Call, Tokens
from mame_sd.diffusion.layer import (
    NO_SIZE,
    AttentionAdapter,
    LayerCall,
    Route,
    compared,
    skips_scores,
)

# Modules whose first input is an image [B, C, H, W] and whose blocks see its pixels, or patches, as
# tokens. KAttentionBlock is that of the latent upscaler's UNet.
_UNET_TRANSFORMERS = {"Transformer2DModel", "TransformerSpatioTemporalModel", "KAttentionBlock"}
IMAGE_MODULES = _UNET_TRANSFORMERS | {"DiTTransformer2DModel", "PixArtTransformer2DModel"}
# Processors that compute attention by other functions than can be intercepted.
_STOOD_IN_FOR = tuple(
    getattr(processors, name)
    for name in ("AttnProcessor", "SlicedAttnProcessor", "XFormersAttnProcessor")
)
# Processors that compute self-attention of the given tokens and nothing else.
PLAIN_PROCESSORS = frozenset(
    {
        "AttnProcessor",
        "AttnProcessor2_0",
        "AttnProcessorNPU",
        "SlicedAttnProcessor",
        "XFormersAttnProcessor",
        "XLAFlashAttnProcessor2_0",
        "CustomDiffusionAttnProcessor",
        "CustomDiffusionAttnProcessor2_0",
        "CustomDiffusionXFormersAttnProcessor",
        "FusedAttnProcessor2_0",
        "MaMeAttnProcessor",
        "PAGCFGIdentitySelfAttnProcessor2_0",
        "PAGIdentitySelfAttnProcessor2_0",
    }
)
_ROTARY = ("image_rotary_emb", "query_rotary_emb", "key_rotary_emb", "rotary_emb")
LAYER_SKIP = (
    "diffusers' layer skip puts values instead of attention only where there are as many as queries"
)
STOOD_IN = "computed by AttnProcessor2_0 in place of {}"
_PLAIN = processors.AttnProcessor2_0()
_ADDED_KV = processors.AttnAddedKVProcessor2_0()
_UNSCALED = processors.AttnProcessor()


class PlainAttention(AttentionAdapter):
    """A diffusers Attention over the tokens of one image."""

    def route(self, call: LayerCall, known: Tokens | None, config: MaMeConfig) -> Route | str:
        """See `AttentionAdapter`."""
        reason = skip_reason(call, config)
        if reason is not None:
            return reason
        hidden: Tensor = call.arguments["hidden_states"]
        tokens = layout_of(hidden, known, config)
        if isinstance(tokens, str):
            return tokens
        if config.tau is not None:
            feature = compared(call.module, hidden, config.feature)
            return Route(call, config, tokens, merge_tokens=_tokens_merged, feature=feature)
        notes = [NO_SIZE] if len(tokens.size) == 1 else []
        run, job = None, {}
        if type(call.processor) in _STOOD_IN_FOR:  # none of the user's own that derive from them
            run = partial(processed, _PLAIN, call.module, **call.arguments)
            notes.append(STOOD_IN.format(call.kind))
            if not call.module.scale_qk:
                job["scale"] = call.module.scale
        return Route(call, config, tokens, note=". ".join(notes), run=run, job=job)


def _tokens_merged(route: Route, plan: Plan) -> Tensor:
    """The attention's output [B, L, C] of merged tokens, restored (MaMe, then MaRe)."""
    merged = plan.merge(route.call.arguments["hidden_states"])
    return plan.restore(route.call.run(hidden_states=merged))


def layout_of(hidden_states: Tensor, known: Tokens | None, config: MaMeConfig) -> Tokens | str:
    """How tokens [B, L, C] of an image lie: as is `known`, else by `config.size`, else in a square,
    else unknown.

    `config.size` is the latent's; the levels below it follow by ceil(/2). Where the size is known
    and does not fit, it returns a reason to leave the layer alone. Such tokens are frames, or stand
    among others.
    """
    # A plain number under torch.compile too, where sizes may be symbols.
    count = index(hidden_states.shape[1])
    if known is not None:
        if known.count == count:
            return known
        return f"{count} tokens are not those of {' x '.join(map(str, known.size))}"
    if config.size is not None:
        h, w = config.size
        while h * w > count and h * w > 1:
            h, w = math.ceil(h / 2), math.ceil(w / 2)
        if h * w == count:
            return Tokens((h, w))
        return f"{count} tokens are no level of size={config.size}"
    side = math.isqrt(count)
    return Tokens((side, side) if side * side == count else (count,))


def image_tokens(module: Any, call: Call) -> Tokens | None:
    """The tokens of an image [B, C, H, W]: its pixels in a UNet's Transformer2DModel, its patches
    in DiT and PixArt.
    """
    image = call.get("hidden_states")
    if not isinstance(image, Tensor) or image.dim() != 4:
        return None
    by_pixel = type(module).__name__ in _UNET_TRANSFORMERS
    by_pixel = by_pixel and not getattr(module, "is_input_patches", False)
    patch = 1 if by_pixel else int(module.config["patch_size"])
    return Tokens((index(image.shape[-2]) // patch, index(image.shape[-1]) // patch))


def fixed_reason(attn: Any) -> str | None:
    """Why this module may never merge, whatever it is called with; None if it may."""
    if not isinstance(attn, Attention):
        return f"{type(attn).__name__} is no diffusers Attention"
    if attn.is_cross_attention or attn.only_cross_attention:
        return "cross-attention"
    if attn.added_kv_proj_dim is not None:
        return "added keys and values"
    if attn.group_norm is not None or attn.spatial_norm is not None:
        return "normalises over space"
    if attn.residual_connection:
        return "adds its own input to its output"
    if attn.norm_cross:
        return "normalises encoder states"
    if "Linear" in type(attn.processor).__name__:
        return "linear attention"
    return None


def processed(processor: Any, attn: Attention, /, **arguments: Any) -> Any:
    """What `processor` gives for a call of `attn`; like diffusers it is passed the arguments that
    its call names.
    """
    hidden_states, kind = arguments.pop("hidden_states"), type(processor)
    names = (_KNOWN.get(kind) or _parameters(kind)) | {"encoder_hidden_states", "attention_mask"}
    given = {name: value for name, value in arguments.items() if name in names}
    return processor(attn, hidden_states, **given)


def default_processor(attn: Any) -> Any:
    """What diffusers installs on `attn` by itself.

    On fused projections too: the separate ones stay and are current.
    """
    if not isinstance(attn, Attention):
        return attn._default_processor_cls()
    if attn.added_kv_proj_dim is not None:
        return _ADDED_KV
    return _PLAIN if attn.scale_qk else _UNSCALED


def skip_reason(call: LayerCall, config: MaMeConfig) -> str | None:
    """Why this call passes through untouched; None if it may merge."""
    given = call.arguments
    if given.get("encoder_hidden_states") is not None:
        return "cross-attention"
    if given.get("attention_mask") is not None:
        return "attention mask"
    hidden = given.get("hidden_states")
    if not isinstance(hidden, Tensor):
        return "input is no tokens [B, L, C]"
    if hidden.dim() != 3:
        return f"input of {hidden.dim()} dimensions"
    reason = fixed_reason(call.module)
    if reason is not None:
        return reason
    if any(given.get(name) is not None for name in _ROTARY):
        return "rotary positions"
    if hidden.shape[1] < least_tokens(config.min_tokens, hidden.device):
        return too_few(config.min_tokens, hidden.device)
    if call.kind == "MaMeAttnProcessor":
        return f"a {call.kind} on the module merges already"
    if config.tau is None and skips_scores(call.module):
        return f"{LAYER_SKIP}; tau goes with it"
    return None


def _parameters(kind: type) -> frozenset[str]:
    """Names of the keywords that a processor's call takes; `**kwargs` counts for nothing."""
    return frozenset(inspect.signature(kind.__call__).parameters)


# Of the processors that diffusers installs by itself. It never changes: a compiled graph would be
# made again.
_KNOWN = {kind: _parameters(kind) for kind in (type(_PLAIN), type(_ADDED_KV), type(_UNSCALED))}
