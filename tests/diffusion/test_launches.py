"""What merging asks of a card: kernels launched and bytes moved by one layer, counted on tensors
that have sizes alone.

The budgets are pinned. Where one is exceeded the message says which calls there are.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks.layer_launches import sd3, unet, work_of


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "PyTorch"])
@pytest.mark.parametrize(
    ("build", "fields", "budget", "without"),
    [
        (unet, {}, 4, 33),
        (unet, {"keep": 0.5, "merge": "qkv"}, 9, 63),
        (unet, {"weights": "pick", "correct": False}, 2, 2),
        (sd3, {"keep": 0.25, "merge": "kv"}, 6, 31),
        (sd3, {}, 11, 63),
        (sd3, {"weights": "pick", "correct": False}, 6, 6),
    ],
    ids=["UNet", "UNet-qkv", "UNet-picks", "SD3-keys", "SD3", "SD3-picks"],
)
def test_launches_and_bytes_stay_within_their_budgets(
    build: Any,
    fields: dict[str, Any],
    budget: int,
    without: int,
    kernels: bool,
) -> None:
    pytest.importorskip("triton")
    plain, merged = work_of(build, None), work_of(build, fields, kernels)
    more = Counter({work.name: 0 for work in merged})
    for sign, works in ((1, merged), (-1, plain)):
        for work in works:
            more[work.name] += sign * work.launches
    added = {name: count for name, count in more.items() if count}
    assert any(work.name == "attention" for work in merged)
    assert (("nearest" in added) == kernels) or fields.get("weights") == "pick"
    assert sum(added.values()) <= (budget if kernels else without), added
    if kernels:
        attention = sum(work.bytes for work in plain if work.name == "attention")
        moved = sum(work.bytes for work in merged) - sum(work.bytes for work in plain)
        assert moved <= 2 * attention, f"{moved / 1e6:.0f} MB, attention {attention / 1e6:.0f} MB"
