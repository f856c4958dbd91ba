"""Real decoder classes at tiny size, with random weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": None}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", {}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", {}),
    "cohere": ("CohereForCausalLM", "CohereConfig", {"use_qk_norm": True}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {"no_rope_layer_interval": 2}),
}


@cache
def tiny(name: str, attention: str = "sdpa") -> nn.Module:
    """One of `MODELS`, in fp32."""
    cls, config, fields = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**{**SHAPE, **fields})).eval()
    model.set_attn_implementation(attention)
    return model


def prompt(length: int = 48, samples: int = 1, seed: int = 0) -> Tensor:
    """Token ids [samples, length]."""
    return torch.randint(2, 64, (samples, length), generator=torch.Generator().manual_seed(seed))


def padded(ids: Tensor, left: int, length: int) -> tuple[Tensor, Tensor]:
    """Return ids [1, n] after `left` tokens of padding, padded to `length`, and their mask."""
    sides = (left, length - left - ids.shape[1])
    return F.pad(ids, sides), F.pad(torch.ones_like(ids), sides)
