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

from mame_sd import MaMeConfig, plan_merge
from mame_sd.core.partition import draw_at
from tests.builders.settings import nested
from tests.builders.tokens import detail_of

TABLE = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
SETTINGS: tuple[dict[str, Any], ...] = (
    {"keep": 0.5},
    {"keep": 0.25},
    {"tau": 0.3},
    {"preset": "plain", "tau": 0.3},
    {"preset": "plain", "keep": 0.6},
    {"preset": "plain", "keep": 0.6, "partition": "random"},
    {"preset": "plain", "keep": 0.6, "partition": "random-grid"},
    {"keep": 0.6, "weights": "pick", "partition": "grid", "tiles": 0},
    {"tau": -0.5, "metric": "euclidean"},
    {"tau": 0.01, "metric": "softmax"},
    {"tau": 0.5, "metric": "dot"},
    {"tau": 0.3, "variant": "paper"},
)


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
        for entry in yaml.safe_load(TABLE.read_text(encoding="utf-8"))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fields", SETTINGS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_every_operation_is_there(
    fields: dict[str, Any], dtype: torch.dtype, kernels: dict[str, set[str]]
) -> None:
    config = MaMeConfig(**nested(fields))
    x = torch.randn(2, 256, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad(), Recorded() as recorded:
        draw = draw_at(torch.tensor(500.0)) if config.redraw else None
        plan = plan_merge(x, config, (16, 16), draw=draw)
        merged = plan.merge(x)
        if config.weights != "pick":
            plan.restore(merged, detail_of(x, config, (16, 16)))
    assert recorded.names
    lacking = [
        n
        for n in recorded.names
        if not any(k == "MPS" or k.startswith("Composite") for k in kernels[n])
    ]
    assert not lacking
