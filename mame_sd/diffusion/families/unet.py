"""Self-attention with nothing beside its tokens: UNets, DiT, PixArt. Merged whole (`merge="qkv"`) or by its keys and values ("kv").

The installed processor computes the attention: merged tokens are given to it as `hidden_states`, or as
`encoder_hidden_states`, from which diffusers' own processors take keys and values.
"""

from __future__ import annotations

import inspect
import math
from contextlib import nullcontext
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models import attention_processor as processors
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.plan import Plan
from mame_sd.core.row_plan import RowPlan
from mame_sd.diffusion.families.keys import GroupedKeys, MergedKeys, log_sizes
from mame_sd.diffusion.layer import Layer, LayerCall, compared
from mame_sd.diffusion.tokens import Call, Tokens

# Modules whose first input is an image [B, C, H, W] and whose blocks see its pixels, or patches, as tokens.
_UNET_TRANSFORMERS = {"Transformer2DModel", "TransformerSpatioTemporalModel"}
IMAGE_MODULES = _UNET_TRANSFORMERS | {"DiTTransformer2DModel", "PixArtTransformer2DModel"}
# Processors whose forward takes keys and values from encoder_hidden_states when they are given. Others may ignore them
# (PAG) or take their presence for cross-attention (prompt-to-prompt), so merge="kv" leaves those layers alone.
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
_WHOLE_KEYS = (processors.AttnProcessor2_0, processors.FusedAttnProcessor2_0)
_ROTARY = ("image_rotary_emb", "query_rotary_emb", "key_rotary_emb", "rotary_emb")
_BUILT_IN = torch._C._nn.scaled_dot_product_attention  # anything put in its place can't be seen into
NOT_COUNTED = "merged tokens count once: {} calls no scaled_dot_product_attention of its tokens that takes a mask"
NOT_CORRECTED = "not corrected: {} calls no scaled_dot_product_attention of PyTorch's own"
LAYER_SKIP = "diffusers' layer skip puts values in place of attention only where there are as many as queries"
_PLAIN = processors.AttnProcessor2_0()
_ADDED_KV = processors.AttnAddedKVProcessor2_0()
_UNSCALED = processors.AttnProcessor()


class PlainAttention(Layer):
    """A diffusers Attention over the tokens of one image."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__(module)
        self._uncounted: set[str] = set()  # processors in which whole merged tokens were seen to count once

    def tokens(self, call: LayerCall, known: Tokens | None, config: MaMeConfig) -> Tokens | str:
        """The tokens of a self-attention; a reason for any other call and for layers too small."""
        return skip_reason(call, config) or lie(call.arguments["hidden_states"], known, config)

    def feature(self, call: LayerCall, tokens: Tokens, config: MaMeConfig) -> Tensor:
        """The layer's input, or its keys."""
        return compared(call.module, call.arguments["hidden_states"], config.feature)

    def merged(self, call: LayerCall, tokens: Tokens, plan: Plan, config: MaMeConfig) -> Any:
        """The attention's output [B, L, C] of merged tokens, or of all queries with merged keys and values."""
        hidden = call.arguments["hidden_states"]
        corrects = self._corrects(call, config) and (config.merge == "kv" or isinstance(plan, RowPlan))
        if corrects and config.weights != "best":
            # Tokens that didn't go to one group whole: all keys and values are needed.
            batch, length = hidden.shape[:2]
            with MergedKeys(plan, 0, length, batch, lambda t: t, lambda t: t, correct=True):
                return call.run()
        changes: dict[str, Any] = {}
        if config.merge == "kv" or corrects:
            keys = GroupedKeys(plan, corrects)
            changes["encoder_hidden_states"] = keys.keys_of(hidden)
        if config.merge == "qkv":
            changes["hidden_states"] = (
                changes["encoder_hidden_states"][:, : plan.tokens_kept] if corrects else plan.merge(hidden)
            )
        if not corrects and plan.uneven and (config.merge == "kv" or config.correct):
            if config.merge == "kv" or isinstance(call.processor, _MASKED):
                changes["attention_mask"] = _counts(plan, call)
            else:
                self._uncounted.add(call.kind)
        with keys if corrects else nullcontext():
            # The fused one reads keys from a joint projection that self-attention has for its own tokens only. The unfused
            # default has the same weights and gives the same numbers.
            apart = "encoder_hidden_states" in changes and isinstance(call.processor, processors.FusedAttnProcessor2_0)
            output = processed(_PLAIN, call.module, {**call.arguments, **changes}) if apart else call.run(**changes)
        return plan.restore(output) if config.merge == "qkv" else output

    def note(self, call: LayerCall, config: MaMeConfig) -> str:
        """Where keys and values are not corrected though they are to be, or merged tokens count once: why."""
        if not config.correct or self._corrects(call, config):
            return ""
        if config.merge == "qkv":
            return NOT_COUNTED.format(call.kind) if call.kind in self._uncounted else ""
        return NOT_CORRECTED.format(call.kind)

    def _corrects(self, call: LayerCall, config: MaMeConfig) -> bool:
        """Whether what merged keys lack is added: in PyTorch's own attention, and to whole merged tokens where each went to one of them."""
        whole = isinstance(call.processor, _WHOLE_KEYS) and F.scaled_dot_product_attention is _BUILT_IN
        if config.merge == "qkv" and (config.weights != "best" or skips_scores(call.module)):
            return False
        return config.correct and whole


def _counts(plan: Plan, call: LayerCall) -> Tensor:
    """A mask [B, 1, L'] that counts each merged token as often as it stands for tokens, in the dtype of the scores that it is added to."""
    hidden: Tensor = call.arguments["hidden_states"]
    exact = call.module.upcast_attention and not isinstance(call.processor, _WHOLE_KEYS)  # scores in fp32
    return log_sizes(plan.sizes, hidden.float() if exact else hidden).expand(hidden.shape[0], 1, -1)


def lie(hidden_states: Tensor, known: Tokens | None, config: MaMeConfig) -> Tokens | str:
    """How tokens [B, L, C] of an image lie: as is `known`, else by `config.size`, else in a square, else unknown.

    `config.size` is the latent's; the levels below it follow by ceil(/2). Gives a reason to leave the layer alone where the
    size is known and the tokens are not its: attention over frames, or image tokens among others.
    """
    count = index(hidden_states.shape[1])  # a plain number under torch.compile too, where sizes may be symbols
    if known is not None:
        h, w = known.size[:2]
        return Tokens((h, w)) if h * w == count else f"{count} tokens are not those of {h} x {w}"
    if config.size is not None:
        h, w = config.size
        while h * w > count and h * w > 1:
            h, w = math.ceil(h / 2), math.ceil(w / 2)
        return Tokens((h, w)) if h * w == count else f"{count} tokens are no level of size={config.size}"
    side = math.isqrt(count)
    return Tokens((side, side) if side * side == count else (count,))


def image_tokens(module: Any, call: Call) -> Tokens | None:
    """The tokens of an image [B, C, H, W]: its pixels in a UNet's Transformer2DModel, its patches in DiT and PixArt."""
    image = call.get("hidden_states")
    if not isinstance(image, Tensor) or image.dim() != 4:
        return None
    patch = 1
    if type(module).__name__ not in _UNET_TRANSFORMERS or getattr(module, "is_input_patches", False):
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


def processed(processor: Any, attn: Attention, arguments: Call) -> Any:
    """What `processor` gives for a call of `attn`; like diffusers it is passed the arguments that its call names."""
    names = _accepted(type(processor)) | {"encoder_hidden_states", "attention_mask"}
    given = {name: value for name, value in arguments.items() if name in names and name != "hidden_states"}
    return processor(attn, arguments["hidden_states"], **given)


def default_processor(attn: Any) -> Any:
    """What diffusers installs on `attn` by itself. On fused projections too: the separate ones stay and are current."""
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
    if hidden.shape[1] < config.min_tokens:
        return f"fewer than min_tokens={config.min_tokens}"
    if call.kind == "MaMeAttnProcessor":
        return f"a {call.kind} on the module merges already"
    if config.merge == "kv" and skips_scores(call.module):
        return f"{LAYER_SKIP}; merge='qkv' goes with it"
    if config.merge == "kv" and not isinstance(call.processor, (*_KV_PROCESSORS, processors.FusedAttnProcessor2_0)):
        return f"merge='kv' needs a diffusers default processor, {call.kind} is installed"
    return None


def skips_scores(attn: Any) -> bool:
    """Whether diffusers' layer skip puts values in place of attention, which it does where there are as many as queries."""
    registry = getattr(attn, "_diffusers_hook", None)
    return registry is not None and any(getattr(h, "skip_attention_scores", False) for h in registry.hooks.values())


def _accepted(kind: type) -> frozenset[str]:
    """Names of the keywords that a processor's call takes; `**kwargs` counts for nothing."""
    return _KNOWN.get(kind) or _parameters(kind)


def _parameters(kind: type) -> frozenset[str]:
    return frozenset(inspect.signature(kind.__call__).parameters)


# Of the processors that diffusers installs by itself. It never changes: a compiled graph would be made again.
_KNOWN = {kind: _parameters(kind) for kind in (type(_PLAIN), type(_ADDED_KV), type(_UNSCALED))}
