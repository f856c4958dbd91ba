"""List diffusers' attention processors of UNets, DiT and PixArt, and call them as diffusers does.

The lists tell which processors compute attention and nothing else, and which ones diffusers
installs.
"""

from __future__ import annotations

import inspect
from typing import Any

from diffusers.models import attention_processor as processors
from diffusers.models.attention_processor import Attention

PLAIN = processors.AttnProcessor2_0()
_ADDED_KV = processors.AttnAddedKVProcessor2_0()
_UNSCALED = processors.AttnProcessor()
# Processors whose attention functions can't be intercepted.
STOOD_IN_FOR = tuple(
    getattr(processors, name)
    for name in ("AttnProcessor", "SlicedAttnProcessor", "XFormersAttnProcessor")
)
# Processors of joint attention that compute it in one call over the image's and the text's tokens.
COUNT_TEXT = (processors.JointAttnProcessor2_0, processors.FusedJointAttnProcessor2_0)
# Processors that compute nothing but self-attention of the given tokens.
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
    """Call `processor` for `attn` as diffusers does, and return its output.

    `arguments` are `hidden_states` and others, which are passed if the processor's call names them.
    """
    hidden_states, kind = arguments.pop("hidden_states"), type(processor)
    names = (_KNOWN.get(kind) or _parameters(kind)) | {"encoder_hidden_states", "attention_mask"}
    passed = {name: value for name, value in arguments.items() if name in names}
    return processor(attn, hidden_states, **passed)


def default_processor(attn: Any) -> Any:
    """Return the processor that diffusers installs on `attn` by default.

    It fits fused projections too: the separate projections stay and have the current weights.
    """
    if not isinstance(attn, Attention):
        return attn._default_processor_cls()
    if attn.added_kv_proj_dim is not None:
        return _ADDED_KV
    return PLAIN if attn.scale_qk else _UNSCALED


def _parameters(kind: type) -> frozenset[str]:
    """Return the names of the arguments of a processor's call, without `**kwargs`."""
    return frozenset(inspect.signature(kind.__call__).parameters)


# Arguments of the processors that diffusers installs by default. Never change this dict: compiled
# graphs would be compiled again.
_KNOWN = {kind: _parameters(kind) for kind in (type(PLAIN), type(_ADDED_KV), type(_UNSCALED))}
