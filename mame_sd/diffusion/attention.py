"""One self-attention call, merged: decide whether it may, plan, delegate to the installed processor, restore.

Both ways into diffusers (`processor.py` and `hooks.py`) call `merged_attention`, so they give the same numbers (with
`redraw=False`: processors see no steps).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

from diffusers.models import attention_processor as processors
from diffusers.models.attention_processor import Attention
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.merge import plan_merge
from mame_sd.core.partition import GRIDS
from mame_sd.core.plan import Plan
from mame_sd.core.triton_plan import kernel_note
from mame_sd.report import LayerStats

# (hidden_states, encoder_hidden_states or None) -> the attention's output
Call = Callable[[Tensor, Tensor | None], Tensor]

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
_ROTARY = ("image_rotary_emb", "query_rotary_emb", "key_rotary_emb", "rotary_emb")
NO_SIZE = "height and width unknown: merged with partition 'alternating' and without tiles; give size=(h, w)"


@dataclass(frozen=True)
class Layout:
    """How the tokens of a call lie: (h, w) or None, and whether a needed size is missing (`fallback`)."""

    size: tuple[int, int] | None
    fallback: bool = False


def fixed_reason(attn: Attention) -> str | None:
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


def skip_reason(
    attn: Attention,
    hidden_states: Tensor,
    encoder_hidden_states: Any,
    attention_mask: Any,
    extra: Mapping[str, Any],
    config: MaMeConfig,
    processor: Any,
) -> str | None:
    """Why this call passes through untouched; None if it may merge. `processor` is the one that would run."""
    if encoder_hidden_states is not None:
        return "cross-attention"
    if attention_mask is not None:
        return "attention mask"
    if hidden_states.dim() != 3:
        return f"input of {hidden_states.dim()} dimensions"
    reason = fixed_reason(attn)
    if reason is not None:
        return reason
    if any(extra.get(name) is not None for name in _ROTARY):
        return "rotary positions"
    if hidden_states.shape[1] < config.min_tokens:
        return f"fewer than min_tokens={config.min_tokens}"
    if config.merge == "kv" and not isinstance(processor, (*_KV_PROCESSORS, processors.FusedAttnProcessor2_0)):
        return f"merge='kv' needs a diffusers default processor, {type(processor).__name__} is installed"
    return None


def layout(tokens: int, config: MaMeConfig, size: tuple[int, int] | None) -> Layout | str:
    """The (h, w) of `tokens`: the true `size` if given, else by `config.size`, else a square.

    `config.size` is the latent's; the levels below it follow by ceil(/2). Returns the reason to leave the layer alone
    when a size is known that `tokens` do not fit: temporal attention, or image tokens among others.
    """
    if size is not None:
        return (
            Layout(size) if size[0] * size[1] == tokens else f"{tokens} tokens are not those of {size[0]} x {size[1]}"
        )
    if config.size is not None:
        h, w = config.size
        while h * w > tokens and h * w > 1:
            h, w = math.ceil(h / 2), math.ceil(w / 2)
        if h * w == tokens:
            return Layout((h, w))
        return f"{tokens} tokens are no level of size={config.size}"
    side = math.isqrt(tokens)
    if side * side == tokens:
        return Layout((side, side))
    return Layout(None, fallback=config.partition in GRIDS or config.tiles > 0)


def feature_of(attn: Attention, hidden_states: Tensor, kind: str) -> Tensor:
    """What similarity compares [B, L, d]: the tokens, their keys, or their keys averaged over the heads."""
    if kind == "x":
        return hidden_states
    keys: Tensor = attn.to_k(hidden_states)
    return keys if kind == "k" else keys.unflatten(-1, (-1, attn.inner_dim // attn.heads)).mean(-2)


def merged_attention(
    attn: Attention,
    hidden_states: Tensor,
    config: MaMeConfig,
    size: tuple[int, int] | None,
    stats: LayerStats,
    call: Call,
    draw: Tensor | None = None,
) -> Tensor:
    """The attention's output [B, L, C], computed on merged tokens (or on merged keys and values).

    Args:
        attn: the module; `skip_reason` has returned None for this call.
        hidden_states: [B, L, C].
        size: the true (h, w) with h * w = L, None if unknown.
        stats: counters of this layer.
        call: runs the installed processor on (hidden_states, encoder_hidden_states).
        draw: see `plan_merge`.
    """
    plan = plan_call(hidden_states, config, size, stats, lambda: feature_of(attn, hidden_states, config.feature), draw)
    if plan is None:
        return call(hidden_states, None)
    merged = plan.merge(hidden_states)
    if config.merge == "kv":
        return call(hidden_states, merged)
    return plan.restore(call(merged, None))


def plan_call(
    hidden_states: Tensor,
    config: MaMeConfig,
    size: tuple[int, int] | None,
    stats: LayerStats,
    feature: Callable[[], Tensor],
    draw: Tensor | None = None,
) -> Plan | None:
    """The plan of a call on tokens [B, L, C], counted in `stats`; None where they are not those of the known size.

    Args:
        hidden_states: [B, L, C].
        config: the settings.
        size: the true (h, w), None if unknown.
        stats: counters of this layer.
        feature: gives what similarity compares [B, L, d].
        draw: see `plan_merge`.
    """
    tokens = index(hidden_states.shape[1])  # a plain number under torch.compile too, where sizes may be symbols
    where = layout(tokens, config, size)
    if isinstance(where, str):
        stats.skipped(where, tokens)
        return None
    note = ""
    if where.fallback:
        note = NO_SIZE if config.kernel is None else f"{NO_SIZE}. Kernel {config.kernel!r} needs tiles: not run"
        config = without_size(config)
    plan = plan_merge(feature(), config, where.size, draw=draw)
    stats.merged(plan, where.size, note, kernel_note(config, plan))
    return plan


def without_size(config: MaMeConfig) -> MaMeConfig:
    """`config` for tokens whose (h, w) is unknown: partition "alternating", no tiles, and no kernel, which needs them."""
    return config.replace(partition="alternating", tiles=0, kernel=None)


def unfused(processor: Any, encoder_hidden_states: Tensor | None) -> Any:
    """The processor that runs: a fused one reads keys and values from a joint projection that self-attention has only
    for its own tokens, so with merged keys the unfused default takes its place (same weights, same numbers).
    """
    if encoder_hidden_states is not None and isinstance(processor, processors.FusedAttnProcessor2_0):
        return _PLAIN
    return processor


def default_processor(attn: Attention) -> Any:
    """What diffusers installs on `attn` by itself. On fused projections too: the separate ones stay and are current."""
    if not isinstance(attn, Attention):
        return attn._default_processor_cls()
    if attn.added_kv_proj_dim is not None:
        return _ADDED_KV
    return _PLAIN if attn.scale_qk else _UNSCALED


_PLAIN = processors.AttnProcessor2_0()
_ADDED_KV = processors.AttnAddedKVProcessor2_0()
_UNSCALED = processors.AttnProcessor()
