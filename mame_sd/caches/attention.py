"""What is read off a transformers model: its attention layers, their queries, and its rotary
positions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd import upstream

IMPLEMENTATIONS = ("sdpa", "eager")


def attention_layers(model: nn.Module) -> list[Any]:
    """The self-attention layers of a decoder that can be compressed, in order.

    Raises:
        TypeError: no transformers model.
        ValueError: no layer with a KV cache, an attention that isn't known, or an implementation
            that takes no mask.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None:
        raise TypeError(
            f"model: expected a causal language model of transformers, got {type(model).__name__}"
        )
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"model: expected a decoder alone, got {name}, whose cache holds an encoder's keys too"
        )
    known: list[Any] = [m for m in model.modules() if _known(m)]
    unknown = {type(m).__name__ for m in model.modules() if _attends(m) and not _known(m)}
    if unknown:
        raise ValueError(
            f"model: unknown attention {', '.join(sorted(unknown))} in {name}; expected q_proj,"
            " k_proj, v_proj and rotary positions, as in Llama, Qwen, Mistral and Gemma"
        )
    if not known:
        raise ValueError(
            "model: expected a decoder with a KV cache, found no attention layer that has one in"
            f" {name}"
        )
    used = upstream.implementation_of(known[0].config)
    if used not in IMPLEMENTATIONS:
        raise ValueError(
            f"attn_implementation: expected {' or '.join(IMPLEMENTATIONS)}, whose masks can weigh"
            f" keys, got {used!r}"
        )
    return known


def _attends(module: Any) -> bool:
    return (
        hasattr(module, "layer_idx")
        and "Attention" in type(module).__name__
        and hasattr(module, "forward")
    )


def _known(module: Any) -> bool:
    parts = all(
        hasattr(module, n)
        for n in ("layer_idx", "q_proj", "k_proj", "v_proj", "head_dim", "config")
    )
    return parts and _attends(module) and hasattr(_file(module), "apply_rotary_pos_emb")


def _file(module: Any) -> Any:
    return sys.modules[type(module).__module__]


def is_sliding(module: Any) -> bool:
    """Whether a layer sees a window alone, whose cache is short as it is."""
    config, index = module.config, module.layer_idx
    types = getattr(config, "layer_types", None)
    if types:
        return "sliding" in types[index] or "chunked" in types[index]
    return getattr(config, "sliding_window", None) is not None and getattr(
        config, "use_sliding_window", True
    )


def queries_of(module: Any, hidden_states: Tensor) -> Tensor:
    """Queries [B, H, N, D] before the rotation, of a layer's input [B, N, C]."""
    b, n = hidden_states.shape[:2]
    queries = module.q_proj(hidden_states)
    norm = getattr(module, "q_norm", None)
    if (
        norm is not None and norm.weight.numel() == queries.shape[-1]
    ):  # over all heads at once, as OLMo 2 does
        queries = norm(queries)
    queries = queries.view(b, n, -1, module.head_dim)
    if norm is not None and norm.weight.numel() == module.head_dim:
        queries = norm(queries)
    return queries.transpose(1, 2)


def rotated(module: Any, queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries [B, H, N, D] at the positions of cos and sin [B, N, D], by the model's own
    function.
    """
    return _file(module).apply_rotary_pos_emb(queries, queries, cos, sin)[0]


def rotation_of(model: nn.Module, module: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The function that rotates x [B, H, N, D] to positions [B, N], which may be negative."""
    rotary = next(
        (m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None
    )
    if rotary is None:
        raise ValueError(
            f"model: expected a rotary embedding beside {type(module).__name__}, found none"
        )
    types = getattr(module.config, "layer_types", None)
    by_type = "layer_type" in inspect.signature(rotary.forward).parameters

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        extra = (types[module.layer_idx],) if by_type and types else ()
        cos, sin = rotary(x, positions, *extra)
        scale = (
            (cos.float().square() + sin.float().square()).mean().sqrt()
            if positions.numel()
            else 1.0
        )
        return rotated(module, x, (cos / scale).to(x.dtype), (sin / scale).to(x.dtype))

    return rotate


def real_tokens(mask: Tensor | None) -> Tensor | None:
    """Bool [B, N]: which tokens the newest one sees, from a layer's mask [B, 1, Q, N]; None:
    all.
    """
    if mask is None:
        return None
    last = mask[:, 0, -1]
    seen = last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2
    return None if bool(seen.all()) else seen
