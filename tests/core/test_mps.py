"""MPS can't be had in tests; PyTorch's own table says which operations it has.

Every one that merging calls is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from mame_sd import MaMeConfig, attention, plan_tokens
from mame_sd.core.merge import draw_at, leaders

TABLE = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"


class Recorded(TorchDispatchMode):
    """The operations that run inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.add(str(function).removeprefix("aten.").removesuffix(".default"))
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def kernels() -> dict[str, set[str]]:
    """By operation, the dispatch keys that have a kernel; "Composite" alone for one that is built
    from others.
    """
    entries = {
        entry["func"].partition("(")[0]: entry
        for entry in yaml.load(TABLE.read_text(encoding="utf-8"), yaml.CSafeLoader)
    }
    found = {}
    for name, entry in entries.items():
        table = {
            **entry.get("dispatch", {}),
            **entries.get(entry.get("structured_delegate"), {}).get("dispatch", {}),
        }
        found[name] = {key.strip() for keys in table for key in keys.split(",")} or {
            "CompositeImplicitAutograd"
        }
    return found


def lacking(recorded: Recorded, kernels: dict[str, set[str]]) -> list[str]:
    """The operations that MPS has no kernel of; attention has one for each device."""
    return [
        n
        for n in recorded.names
        if not n.startswith("_scaled_dot_product")
        and not any(k == "MPS" or k.startswith("Composite") for k in kernels[n])
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_attention_has_every_operation(
    dtype: torch.dtype, kernels: dict[str, set[str]]
) -> None:
    x = torch.randn(2, 2, 16 * 17, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad(), Recorded() as recorded:
        draw, leader = draw_at(torch.tensor(500.0)), leaders(x)
        attention(x, x, x, (16, 17), draw=draw, leader=leader, kernel=lambda q, *_, **__: q)
    assert not lacking(recorded, kernels)


@pytest.mark.parametrize(
    "fields",
    [{"tau": 0.3}, {"tau": -0.5, "metric": "euclidean"}, {"tau": 0.01, "metric": "softmax"}],
    ids=str,
)
def test_merged_tokens_have_every_operation(
    fields: dict[str, Any], kernels: dict[str, set[str]]
) -> None:
    x = torch.randn(2, 256, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), Recorded() as recorded:
        plan = plan_tokens(x, MaMeConfig(**fields))
        plan.restore(plan.merge(x))
    assert not lacking(recorded, kernels)
