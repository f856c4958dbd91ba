"""What a short cache costs and saves, at the shapes of a model of 1B parameters (Llama 3.2 1B) with random weights."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from mame_sd.caches import merge_cache
from mame_sd.errors import UserError

HIDDEN, HEADS, KEY_HEADS, HEAD, INNER, DEPTH = 2048, 32, 8, 64, 8192, 16
METHODS = ("snapkv", "h2o", "expected-attention", "default", "paper")
_STEPS = 8


def cost_table(lengths: str, keep: float, layers: int) -> str:
    """Markdown: a row for each length and method.

    Raises:
        UserError: bad numbers.
    """
    try:
        sizes = [int(part) for part in lengths.split(",")]
    except ValueError:
        raise UserError(
            f"--lengths: expected numbers with commas between, got {lengths!r}"
        ) from None
    if min(sizes) < 64:
        raise UserError(f"--lengths: expected at least 64 tokens, got {min(sizes)}")
    if not 0 < keep < 1:
        raise UserError(f"--keep: expected a share above 0 and below 1, got {keep}")
    if layers < 1:
        raise UserError(f"--layers: expected at least 1, got {layers}")
    model = _model(layers)
    lines = [
        "| tokens | method | compressing / prefill | decoding / full | MiB of cache | M multiply-adds of attention a token |",
        "|---|---|---|---|---|---|",
    ]
    for size in sizes:
        lines += _rows(model, size, keep)
    return "\n".join(lines)


def _model(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD,
        max_position_embeddings=131072,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def _rows(model: Any, size: int, keep: float) -> list[str]:
    ids = torch.randint(0, 256, (1, size), generator=torch.Generator().manual_seed(0))

    def run(tokens: Tensor, cache: DynamicCache) -> float:
        """CPU seconds of one forward."""
        start = time.process_time()
        model(tokens, past_key_values=cache, logits_to_keep=1)
        return time.process_time() - start

    full: Any = DynamicCache()
    prefill = run(ids, full)
    layers = len(full.layers)
    whole = sum(layer.keys.nbytes + layer.values.nbytes for layer in full.layers)
    lines = [_line(size, "full", 0.0, 1.0, whole, size, layers)]
    for name in METHODS:
        cache: Any = DynamicCache()
        with merge_cache(model, keep, name):
            both = run(ids, cache)
            # In turns, so that a busy machine slows both.
            ratios = [run(ids[:, :1], cache) / run(ids[:, :1], full) for _ in range(_STEPS)]
        full.crop(-_STEPS)
        held = sum(layer.nbytes for layer in cache.layers)
        keys = max(layer.slots.shape[2] for layer in cache.layers)
        lines.append(
            _line(size, name, both / prefill - 1, sorted(ratios)[_STEPS // 2], held, keys, layers)
        )
    return lines


def _line(
    size: int, name: str, extra: float, ratio: float, held: int, keys: int, layers: int
) -> str:
    mebibytes = held / 2**20 / layers * DEPTH
    adds = 2 * HEADS * HEAD * keys * DEPTH / 1e6
    return f"| {size} | {name} | {extra:.2f} | {ratio:.2f} | {mebibytes:.0f} | {adds:.0f} |"
