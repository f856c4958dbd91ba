"""What merging asks of a card: kernels launched by one layer, counted by the operations that a CPU
is asked for, at the size of SD 1.5's largest level at 512 pixels.

Of the 62 of a UNet's layer 12 are casts between 16 and 32 bits, most of which a card does without.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mame_sd import attention
from mame_sd.core.merge import draw_at, leaders
from mame_sd.diffusion.apply_denoiser import mame
from tests.builders.tiny import tiny_unet, unet_inputs

# Operations that are more than one launch on CUDA, by the name without the overload.
SEVERAL = {"topk": 4, "sort": 6, "linalg_cholesky_ex": 3, "linalg_solve_triangular": 2}
FREE = {"empty", "new_empty", "empty_like", "_unsafe_view", "detach", "promote_types"}


class Launches(TorchDispatchMode):
    """Counts operations that make new values: views and buffers launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        view = any(
            a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments
        )
        if not view and name not in FREE:
            self.names[name] += SEVERAL.get(name, 1)
        return output


@pytest.mark.parametrize(
    ("grid", "after", "fit_queries", "counted", "budget"),
    [
        ((64, 64), 0, None, True, 62),
        ((64, 64), 77, None, True, 67),
        ((64, 64), 0, 0, True, 38),
        ((61, 67), 0, None, True, 64),
        ((64, 64), 0, None, False, 79),
    ],
    ids=["UNet", "beside text", "means", "odd sides", "kernel without bias"],
)
def test_a_merging_layer_launches_few_kernels(
    grid: tuple[int, int],
    after: int,
    fit_queries: int | None,
    counted: bool,
    budget: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a card, where samples that follow a leader are compared beside it."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.randn(2, 1, grid[0] * grid[1] + after, 8).bfloat16()
    how: dict[str, Any] = {
        "fit_queries": fit_queries,
        "kernel": _nothing if counted else _without_bias,
    }
    how |= {"draw": draw_at(torch.tensor(500.0)), "leader": leaders(x)}
    with torch.no_grad():
        attention(x, x, x, grid, after=after, **how)  # the tables are made
        with Launches() as launches:
            attention(x, x, x, grid, after=after, **how)
    assert launches.names.total() <= budget, launches.names


def _nothing(q: Tensor, *others: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    return q


def _without_bias(q: Tensor, *others: Tensor) -> Tensor:
    return q


def test_a_model_whose_layers_are_all_left_whole_launches_nothing_more() -> None:
    unet, inputs = tiny_unet(), unet_inputs(tiny_unet())
    with torch.no_grad():
        with Launches() as alone:
            unet(**inputs)
        told = pytest.warns(UserWarning, match="no layer merges")
        with mame(unet, min_tokens=10**6), told, Launches() as left:
            unet(**inputs)
    assert left.names == alone.names
