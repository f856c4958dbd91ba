"""diffusers' attention processors of UNets, DiT and PixArt: which of them compute attention and
nothing else, what diffusers installs by itself, and calling one as diffusers does.
"""

from __future__ import annotations

import inspect
from typing import Any

from diffusers.models import attention_processor as processors
from diffusers.models.attention_processor import Attention

PLAIN = processors.AttnProcessor2_0()
_ADDED_KV = processors.AttnAddedKVProcessor2_0()
_UNSCALED = processors.AttnProcessor()
# Processors that compute attention by other functions than can be intercepted.
STOOD_IN_FOR = tuple(
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
    return PLAIN if attn.scale_qk else _UNSCALED


def _parameters(kind: type) -> frozenset[str]:
    """Names of the keywords that a processor's call takes; `**kwargs` counts for nothing."""
    return frozenset(inspect.signature(kind.__call__).parameters)


# Of the processors that diffusers installs by itself. It never changes: a compiled graph would be
# made again.
_KNOWN = {kind: _parameters(kind) for kind in (type(PLAIN), type(_ADDED_KV), type(_UNSCALED))}
