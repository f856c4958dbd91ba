"""What `compress_cache` costs a prefill on the CPU: time, bytes of the cache, most bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from mame_sd.caches import compress_cache
from mame_sd.errors import UserError
from mame_sd.runs.model_files import ModelChoice
from mame_sd.upstream import with_cache

from ..memory import allocations, most
from ..tables import markdown_table
from ..timing import seconds_of
from .run import load_language_model

_TIMES = 3


@torch.no_grad()
def cost_table(lengths: str, keep: float, name: str) -> str:
    """Markdown: what `compress_cache` adds to the prefill of a model, and most bytes at once.

    Raises:
        UserError: bad numbers, no model.
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
    model = load_language_model(ModelChoice(model=name, device="cpu"))[0]
    rows: list[list[str]] = []
    for size in sizes:
        ids = torch.randint(9, 9999, (1, size), generator=torch.Generator().manual_seed(0))

        def run(share: float, ids: torch.Tensor = ids) -> Any:
            cache = DynamicCache()
            with compress_cache(model, share):
                model(ids, **with_cache(model, cache), use_cache=True, logits_to_keep=1)
            return cache

        def seconds(share: float) -> float:
            return seconds_of(lambda: run(share), model.device)[1]

        run(keep)
        pairs = [(seconds(1.0), seconds(keep)) for _ in range(_TIMES)]  # in turns
        plain = sorted(p for p, _ in pairs)[_TIMES // 2]
        extra = sorted(s / p - 1 for p, s in pairs)[_TIMES // 2]
        full = sum(layer.keys.nbytes + layer.values.nbytes for layer in run(1.0).layers)
        short = sum(layer.nbytes for layer in run(keep).layers)
        for method, share, held, more in (("full", 1.0, full, 0.0), ("ours", keep, short, extra)):
            peak = most(allocations(partial(run, share))) / full
            figures = f"{plain:.2f}", f"{more:.2f}", f"{held / 2**20:.1f}", f"{peak:.2f}"
            rows.append([str(size), method, *figures])
    heads = "tokens", "method", "prefill, s", "compressing / prefill", "MiB of cache"
    return markdown_table([*heads, "peak / full"], rows)
