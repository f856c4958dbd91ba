"""Self-attention with nothing beside its tokens: UNets, DiT, PixArt.

Merged whole (`merge="qkv"`) or by its keys and values ("kv").

The installed processor computes the attention. Merged tokens are given to it as `hidden_states`, or
as `encoder_hidden_states`. From the latter, diffusers' own processors take keys and values.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models import attention_processor as processors
from diffusers.models.attention_processor import Attention
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.plan import Plan, RowPlan
from mame_sd.diffusion.families.keys import Attending, GroupedKeys, MergedKeys, log_sizes
from mame_sd.diffusion.layer import (
    Call,
    Layer,
    LayerCall,
    Output,
    Route,
    Tokens,
    compared,
    settings_for,
    skips_scores,
)

# Modules whose first input is an image [B, C, H, W] and whose blocks see its pixels, or patches, as
# tokens. KAttentionBlock is that of the latent upscaler's UNet.
_UNET_TRANSFORMERS = {"Transformer2DModel", "TransformerSpatioTemporalModel", "KAttentionBlock"}
IMAGE_MODULES = _UNET_TRANSFORMERS | {"DiTTransformer2DModel", "PixArtTransformer2DModel"}
# Processors whose forward takes keys and values from encoder_hidden_states when they are given.
# Others may ignore them (PAG) or take their presence for cross-attention (prompt-to-prompt), so
# merge="kv" leaves those layers alone.
_KV_NAMES = (
    "AttnProcessor",
    "AttnProcessor2_0",
    "AttnProcessorNPU",
    "SlicedAttnProcessor",
    "XFormersAttnProcessor",
    "XLAFlashAttnProcessor2_0",
)
_KV_PROCESSORS = tuple(getattr(processors, name) for name in _KV_NAMES if hasattr(processors, name))
# Processors that compute self-attention of the given tokens and nothing else.
PLAIN_PROCESSORS = frozenset(
    {
        *_KV_NAMES,
        "CustomDiffusionAttnProcessor",
        "CustomDiffusionAttnProcessor2_0",
        "CustomDiffusionXFormersAttnProcessor",
        "FusedAttnProcessor2_0",
        "MaMeAttnProcessor",
        "PAGCFGIdentitySelfAttnProcessor2_0",
        "PAGIdentitySelfAttnProcessor2_0",
    }
)
# Those that add a mask of numbers to the scores of keys.
_MASKED = (
    processors.AttnProcessor,
    processors.AttnProcessor2_0,
    processors.SlicedAttnProcessor,
    processors.FusedAttnProcessor2_0,
)
# Those that call scaled_dot_product_attention, in which keys and values can be corrected.
_CORRECTED = (processors.AttnProcessor2_0, processors.FusedAttnProcessor2_0)
# What these classes call, and JointAttnProcessor2_0, as diffusers wrote it: tools replace it for
# all instances, before or after this import.
_OWN_CALLS = {
    kind: kind.__call__
    for kind in (*_CORRECTED, processors.JointAttnProcessor2_0)
    if kind.__call__.__code__.co_filename == processors.__file__
}
REPLACED = "not corrected: {}.__call__ is not diffusers' own"
_ROTARY = ("image_rotary_emb", "query_rotary_emb", "key_rotary_emb", "rotary_emb")
BUILT_IN = torch._C._nn.scaled_dot_product_attention  # anything put in its place can't be seen into
NOT_COUNTED = (
    "merged tokens count once: {} calls no scaled_dot_product_attention of its tokens that takes a"
    " mask"
)
NOT_CORRECTED = "not corrected: {} calls no scaled_dot_product_attention of PyTorch's own"
LAYER_SKIP = (
    "diffusers' layer skip puts values instead of attention only where there are as many as queries"
)
_PLAIN = processors.AttnProcessor2_0()
_ADDED_KV = processors.AttnAddedKVProcessor2_0()
_UNSCALED = processors.AttnProcessor()


class PlainAttention(Layer):
    """A diffusers Attention over the tokens of one image."""

    early = True

    def route(self, call: LayerCall, known: Tokens | None, config: MaMeConfig) -> Route | str:
        """See `Layer`."""
        reason = skip_reason(call, config)
        if reason is not None:
            return reason
        form, note = keys_merged if config.merge == "kv" else tokens_merged, ""
        if config.correct and type(call.processor) in _CORRECTED and not _calls_own(call):
            note = REPLACED.format(call.kind)
        elif (
            config.correct
            and isinstance(call.processor, _CORRECTED)
            and F.scaled_dot_product_attention is BUILT_IN
        ):
            if config.merge == "kv":
                form = keys_corrected
            elif config.weights == "best" and not skips_scores(call.module):
                form = tokens_corrected
        elif config.correct and config.merge == "kv":
            note = NOT_CORRECTED.format(call.kind)
        return image_route(call, known, config, form, config.feature, note)


def image_route(
    call: LayerCall,
    known: Tokens | None,
    config: MaMeConfig,
    form: Callable[[Route, Plan], Output],
    feature: str = "x",
    note: str = "",
) -> Route | str:
    """What `Layer.route` says of the tokens of one image, with nothing beside them.

    They merge by `form`, compared by `feature`. Where they can't, it gives the reason.
    """
    hidden: Tensor = call.given["hidden_states"]
    tokens = layout_of(hidden, known, config)
    if isinstance(tokens, str):
        return tokens
    if tokens.plane is None:
        config, without = settings_for(config, tokens)
        note = ". ".join(filter(None, (without, note)))
    if feature != "x":
        hidden = compared(call.module, hidden, feature)
    return Route(call, form, config, tokens, hidden, note)


def keys_merged(route: Route, plan: Plan) -> Output:
    """All queries over merged keys and values, [B, L, C]."""
    call, hidden = route.call, route.call.given["hidden_states"]
    keys, mask = plan.merge(hidden), _counts(plan, call) if plan.uneven else None
    if isinstance(call.processor, processors.FusedAttnProcessor2_0):
        # Its keys come from a projection that self-attention has for its own tokens only. The
        # unfused ones are current.
        return Output(_attention(call.module, hidden, keys, mask))
    changes = {} if mask is None else {"attention_mask": mask}
    return Output(call.run(encoder_hidden_states=keys, **changes))


def keys_corrected(route: Route, plan: Plan) -> Output:
    """The same, and what merged keys lack is added."""
    hidden = route.call.given["hidden_states"]
    if route.config.weights == "best":
        grouped = GroupedKeys(plan)
        return Output(_attended(route.call, hidden, grouped.keys_of(hidden), grouped))
    # Tokens that didn't go to one group whole: all keys and values are needed.
    return Output(
        _attended(
            route.call, hidden, None, MergedKeys(plan, route.tokens, hidden.shape, correct=True)
        )
    )


def tokens_merged(route: Route, plan: Plan) -> Output:
    """Merged tokens over themselves, restored."""
    call = route.call
    merged, changes, note = plan.merge(call.given["hidden_states"]), {}, ""
    if plan.uneven and route.config.correct:
        if isinstance(call.processor, _MASKED):
            changes["attention_mask"] = _counts(plan, call)
        else:
            note = NOT_COUNTED.format(call.kind)
    output = call.run(hidden_states=merged, **changes)
    return Output(plan.restore(output, route.detail(merged)), note)


def tokens_corrected(route: Route, plan: Plan) -> Output:
    """The same, and what merged keys lack is added."""
    if not isinstance(plan, RowPlan):  # a rival's
        return tokens_merged(route, plan)
    grouped = GroupedKeys(plan)
    keys = grouped.keys_of(route.call.given["hidden_states"])
    merged = keys[:, : plan.tokens_kept]
    output = _attended(route.call, merged, keys, grouped)
    return Output(plan.restore(output, route.detail(merged)))


def _attended(
    call: LayerCall, queries: Tensor, keys: Tensor | None, attending: Attending
) -> Tensor:
    """The attention's output of `queries` over keys and values made of `keys` (None: of the
    queries), as `attending` has it.
    """
    if type(call.processor) in _CORRECTED and is_own(call):
        return _attention(
            call.module, queries, queries if keys is None else keys, attending=attending
        )
    changes = {} if keys is None else {"encoder_hidden_states": keys}
    with attending:
        output: Tensor = call.run(hidden_states=queries, **changes)
    return output


def is_own(call: LayerCall) -> bool:
    """Whether diffusers' own code computes a call: nothing is put around the module's forward, and
    its processor's class is as diffusers has it.
    """
    bound = getattr(call.forward, "__func__", None) is type(call.module).forward
    ours = isinstance(call.forward, partial) and call.forward.func is processed
    return (bound or ours) and not call.rest and _calls_own(call)


def _calls_own(call: LayerCall) -> bool:
    """The latter alone."""
    kind = type(call.processor)
    return kind in _OWN_CALLS and kind.__call__ is _OWN_CALLS[kind]


def _attention(
    attn: Any,
    queries: Tensor,
    keys: Tensor,
    mask: Tensor | None = None,
    attending: Attending | None = None,
) -> Tensor:
    """What diffusers' own processor computes (`AttnProcessor2_0`) where nothing of `fixed_reason`
    holds.

    Ours, because a processor does not show its keys, and a mode that watches for them is called for
    each operation.
    """
    batch, heads, width = queries.shape[0], attn.heads, attn.inner_dim // attn.heads
    query, key, value = (
        project(t).view(batch, -1, heads, width).transpose(1, 2)
        for project, t in ((attn.to_q, queries), (attn.to_k, keys), (attn.to_v, keys))
    )
    if attn.norm_q is not None:
        query = attn.norm_q(query)
    if attn.norm_k is not None:
        key = attn.norm_k(key)
    call = {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": None if mask is None else mask.unsqueeze(1),
    }
    attention = F.scaled_dot_product_attention
    output = attention(**call) if attending is None else attending.attend(attention, call)
    output = output.transpose(1, 2).reshape(batch, -1, heads * width).to(query.dtype)
    projected: Tensor = attn.to_out[1](attn.to_out[0](output))
    factor = attn.rescale_output_factor  # 1 in all published UNets: a launch less
    return projected if factor == 1 else projected / factor


def _counts(plan: Plan, call: LayerCall) -> Tensor:
    """A mask [B, 1, L'] that counts each merged token as often as it stands for tokens.

    It has the dtype of the scores that it is added to.
    """
    hidden: Tensor = call.given["hidden_states"]
    exact = call.module.upcast_attention and not isinstance(
        call.processor, _CORRECTED
    )  # scores in fp32
    return log_sizes(plan.sizes, hidden.float() if exact else hidden).expand(hidden.shape[0], 1, -1)


def layout_of(hidden_states: Tensor, known: Tokens | None, config: MaMeConfig) -> Tokens | str:
    """How tokens [B, L, C] of an image lie: as is `known`, else by `config.size`, else in a square,
    else unknown.

    `config.size` is the latent's; the levels below it follow by ceil(/2). Where the size is known
    and does not fit, it returns a reason to leave the layer alone. Such tokens are frames, or stand
    among others.
    """
    count = index(
        hidden_states.shape[1]
    )  # a plain number under torch.compile too, where sizes may be symbols
    if known is not None:
        return (
            known
            if known.count == count
            else f"{count} tokens are not those of {' x '.join(map(str, known.size))}"
        )
    if config.size is not None:
        h, w = config.size
        while h * w > count and h * w > 1:
            h, w = math.ceil(h / 2), math.ceil(w / 2)
        return (
            Tokens((h, w))
            if h * w == count
            else f"{count} tokens are no level of size={config.size}"
        )
    side = math.isqrt(count)
    return Tokens((side, side) if side * side == count else (count,))


def image_tokens(module: Any, call: Call) -> Tokens | None:
    """The tokens of an image [B, C, H, W]: its pixels in a UNet's Transformer2DModel, its patches
    in DiT and PixArt.
    """
    image = call.get("hidden_states")
    if not isinstance(image, Tensor) or image.dim() != 4:
        return None
    patch = 1
    if type(module).__name__ not in _UNET_TRANSFORMERS or getattr(
        module, "is_input_patches", False
    ):
        patch = int(module.config["patch_size"])
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
    names = _accepted(type(processor)) | {"encoder_hidden_states", "attention_mask"}
    given = {
        name: value
        for name, value in arguments.items()
        if name in names and name != "hidden_states"
    }
    return processor(attn, arguments["hidden_states"], **given)


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
    given = call.given
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
    if hidden.shape[1] < config.min_tokens:
        return f"fewer than min_tokens={config.min_tokens}"
    if call.kind == "MaMeAttnProcessor":
        return f"a {call.kind} on the module merges already"
    fused = isinstance(call.processor, processors.FusedAttnProcessor2_0)
    if config.merge == "kv" and fused and not is_own(call):
        return f"{call.kind} takes no other keys, and something is put around it"
    if config.merge == "kv" and skips_scores(call.module):
        return f"{LAYER_SKIP}; merge='qkv' goes with it"
    if config.merge == "kv" and not isinstance(
        call.processor, (*_KV_PROCESSORS, processors.FusedAttnProcessor2_0)
    ):
        kind = type(call.processor)
        name = (
            kind.__name__
            if kind.__name__ not in _KV_NAMES
            else f"{kind.__module__}.{kind.__name__}"
        )
        return f"merge='kv' needs a processor of diffusers' own, {name} is installed"
    return None


def _accepted(kind: type) -> frozenset[str]:
    """Names of the keywords that a processor's call takes; `**kwargs` counts for nothing."""
    return _KNOWN.get(kind) or _parameters(kind)


def _parameters(kind: type) -> frozenset[str]:
    return frozenset(inspect.signature(kind.__call__).parameters)


# Of the processors that diffusers installs by itself. It never changes: a compiled graph would be
# made again.
_KNOWN = {kind: _parameters(kind) for kind in (type(_PLAIN), type(_ADDED_KV), type(_UNSCALED))}
