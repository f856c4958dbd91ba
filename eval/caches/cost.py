"""What a short cache costs and saves, at the shapes of a model of 1B parameters (Llama 3.2 1B) with
random weights.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from mame_sd.caches import CacheView, compress_cache
from mame_sd.errors import UserError
from mame_sd.upstream import with_cache

from ..memory import allocations, most
from .measure import Meter, cache_of
from .model import load_language_model
from .rows import all_rows

HIDDEN, HEADS, KEY_HEADS, HEAD, INNER, DEPTH = 2048, 32, 8, 64, 8192, 16
METHODS = ("snapkv", "h2o", "expected-attention", "ours", "paper")
SQUARE = ("h2o", "paper")  # work and memory that grow with the square of the tokens
# tokens of a prompt that is run; of a longer one keys, values and queries are drawn at random
LONGEST = 8192
_STEPS = 8
_TIMES = 3


def cost_table(lengths: str, keep: float, layers: int, model: str | None = None) -> str:
    """Markdown: a row for each length and method, or, of a `model` with weights, time and memory.

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
    if model is not None:
        return _table_of(model, sizes, keep)
    shape = _model(layers)
    lines = [
        "| tokens | method | compressing / prefill | decoding / full | MiB of cache | M"
        " multiply-adds a token |",
        "|---|---|---|---|---|---|",
    ]
    for size in sizes:
        lines += _rows(shape, size, keep)
    return "\n".join(lines)


@torch.no_grad()
def _table_of(name: str, sizes: list[int], keep: float) -> str:
    """Of a model with weights: what `compress_cache` adds to a prefill, and most bytes at once."""
    model: Any = load_language_model(name)[0]
    lines = [
        "| tokens | method | prefill, s | compressing / prefill | MiB of cache | peak / full |",
        "|---|---|---|---|---|---|",
    ]
    for size in sizes:
        ids = torch.randint(9, 9999, (1, size), generator=torch.Generator().manual_seed(0))

        def run(share: float, ids: torch.Tensor = ids) -> Any:
            cache = DynamicCache()
            with compress_cache(model, share):
                model(ids, **with_cache(model, cache), use_cache=True, logits_to_keep=1)
            return cache

        def seconds(share: float) -> float:
            start = time.process_time()
            run(share)
            return time.process_time() - start

        run(keep)
        pairs = [(seconds(1.0), seconds(keep)) for _ in range(_TIMES)]  # in turns
        plain = sorted(p for p, _ in pairs)[_TIMES // 2]
        extra = sorted(s / p - 1 for p, s in pairs)[_TIMES // 2]
        full = sum(layer.keys.nbytes + layer.values.nbytes for layer in run(1.0).layers)
        short = sum(layer.nbytes for layer in run(keep).layers)
        for method, share, held, more in (("full", 1.0, full, 0.0), ("ours", keep, short, extra)):
            peak = most(allocations(partial(run, share))) / full
            figures = f"{plain:.2f} | {more:.2f} | {held / 2**20:.1f} | {peak:.2f}"
            lines.append(f"| {size} | {method} | {figures} |")
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
    methods = {row.name: row.method for row in all_rows()}
    ids = torch.randint(0, 256, (1, size), generator=torch.Generator().manual_seed(0)).tolist()[0]
    token = torch.tensor([ids[:1]])

    def step(cache: Any) -> float:
        start = time.process_time()
        model(token, **with_cache(model, cache))
        return time.process_time() - start

    with Meter(model) as meter:
        start = time.process_time()
        views = meter.prefill(ids if size <= LONGEST else ids[:64]).views
        prefill = time.process_time() - start
        if size > LONGEST:
            views = [_longer(view, size) for view in views]
        full: Any = DynamicCache()
        for view in views:
            full.update(view.keys, view.values, view.layer)
        layers = len(views)
        whole = sum(layer.keys.nbytes + layer.values.nbytes for layer in full.layers)
        lines = [_line(size, "full", 0.0, 1.0, whole, size, layers)]
        for name in METHODS:
            if name in SQUARE and size > LONGEST:
                continue
            start = time.process_time()
            cache: Any = cache_of(methods[name].compress_all(views, keep), size)
            spent = time.process_time() - start
            extra = spent / prefill if size <= LONGEST else None
            ratios = [
                step(cache) / step(full) for _ in range(_STEPS)
            ]  # in turns, for a busy machine
            full.crop(-_STEPS)
            held = sum(layer.nbytes for layer in cache.layers)
            keys = max(layer.slots.shape[2] for layer in cache.layers)
            lines.append(_line(size, name, extra, sorted(ratios)[_STEPS // 2], held, keys, layers))
    return lines


def _longer(view: CacheView, size: int) -> CacheView:
    """The same layer after `size` tokens, whose keys, values and inputs are random."""
    g = torch.Generator().manual_seed(view.layer)
    b, h, _, d = view.keys.shape
    return replace(
        view,
        keys=torch.randn(b, h, size, d, generator=g),
        values=torch.randn(b, h, size, d, generator=g),
        hidden_states=torch.randn(b, size, view.hidden_states.shape[2], generator=g),
        slots=torch.arange(size).expand(b, h, size),
        seen=size,
        next=torch.full((b,), size),
    )


def _line(
    size: int, name: str, extra: float | None, ratio: float, held: int, keys: int, layers: int
) -> str:
    mebibytes = held / 2**20 / layers * DEPTH
    adds = 2 * HEADS * HEAD * keys * DEPTH / 1e6
    more = "" if extra is None else f"{extra:.2f}"
    return f"| {size} | {name} | {more} | {ratio:.2f} | {mebibytes:.0f} | {adds:.0f} |"
