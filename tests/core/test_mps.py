"""Test by PyTorch's own table that MPS has every operation that merging calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml

from mame_sd import attention, plan_tokens
from mame_sd.core.guidance import guidance_leaders, partition_index
from tests.builders.trace import Operations

TABLE = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"


@cache
def table() -> dict[str, Any]:
    """Return PyTorch's operations by name."""
    every = yaml.load(TABLE.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return {entry["func"].partition("(")[0]: entry for entry in every}


def on_mps(name: str) -> bool:
    """Return True if MPS has a kernel for the operation, or the operation is composed of others."""
    entry = table()[name]
    of_delegate = table().get(entry.get("structured_delegate"), {})
    keys = ",".join([*entry.get("dispatch", {}), *of_delegate.get("dispatch", {})])
    return not keys or "MPS" in keys.replace(" ", "").split(",") or "Composite" in keys


def keys_merge(dtype: torch.dtype) -> None:
    x = torch.randn(2, 2, 16 * 17, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    draw, leader = partition_index(torch.tensor(500.0)), guidance_leaders(x)
    attention(x, x, x, (16, 17), draw=draw, leader=leader, kernel=lambda q, *_, **__: q)


def tokens_merge(**fields: Any) -> None:
    x = torch.randn(2, 256, 16, generator=torch.Generator().manual_seed(0))
    plan = plan_tokens(x, **fields)
    plan.restore(plan.merge(x))


@pytest.mark.parametrize(
    "run",
    [
        *(partial(keys_merge, dtype) for dtype in (torch.float32, torch.bfloat16)),
        partial(tokens_merge, tau=0.3),
        partial(tokens_merge, tau=-0.5, metric="euclidean"),
        partial(tokens_merge, tau=0.01, metric="softmax"),
    ],
)
def test_mps_has_every_operation(run: Callable[[], None]) -> None:
    """Leave attention out, which has a kernel of its own on each device."""
    with torch.no_grad(), Operations() as recorded:
        run()
    names = {name.removeprefix("aten.").removesuffix(".default") for name in recorded.names}
    assert len(names) > 5
    assert all(n.startswith("_scaled_dot_product") or on_mps(n) for n in names), names
