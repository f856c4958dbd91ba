"""What merging asks of a card: kernels launched by one layer, counted on tensors that pretend to
lie on one (`benchmarks/launches.py`), at the size of SD 1.5's largest level at 512 pixels. They
have no values: what waits for one raises.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.launches import META, counted, pretended
from mame_sd import attention, mame
from tests.builders.tiny import tiny_unet, unet_inputs
from tests.builders.trace import Operations


def biased(q: Tensor, *others: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    return q


def without_bias(q: Tensor, *others: Tensor) -> Tensor:
    return q


MASK = torch.empty(2, 1, 1, 64 * 64 + 77, dtype=torch.bool, device=META)
# Of each way the grid, tokens of text behind it, further arguments and the most launches in 16
# bits, the layer's own kernel not among them.
WAYS: dict[str, tuple[tuple[int, int], int, dict[str, Any], int]] = {
    "UNet": ((64, 64), 0, {"kernel": biased}, 51),
    "beside text": ((64, 64), 77, {"kernel": biased}, 53),
    "means": ((64, 64), 0, {"kernel": biased, "fit_queries": 0}, 27),
    "odd sides": ((61, 67), 0, {"kernel": biased}, 55),
    "masked": ((64, 64), 77, {"kernel": biased, "attn_mask": MASK}, 63),
    "kernel without bias": ((64, 64), 0, {"kernel": without_bias}, 63),
}


@pytest.mark.parametrize(("grid", "after", "how", "budget"), WAYS.values(), ids=WAYS)
def test_a_merging_layer_launches_few_kernels(
    grid: tuple[int, int], after: int, how: dict[str, Any], budget: int
) -> None:
    x = torch.empty(2, 8, grid[0] * grid[1] + after, 40, dtype=torch.bfloat16, device=META)
    draw, leader = (torch.zeros(n, dtype=torch.long, device=META) for n in (1, 2))

    def run() -> Tensor:
        return attention(x, x, x, grid, after=after, draw=draw, leader=leader, **how)

    with pretended():
        run()  # the tables are made
        work = counted(run)
    assert sum(one.launches for one in work) <= budget, [one.name for one in work]


def test_a_model_whose_layers_are_all_left_whole_launches_nothing_more() -> None:
    unet, inputs = tiny_unet(), unet_inputs(tiny_unet())
    with torch.no_grad():
        with Operations() as alone:
            unet(**inputs)
        told = pytest.warns(UserWarning, match="no layer merges.* 256 tokens: lower min_tok")
        with mame(unet, min_tokens=10**6), told, Operations() as left:
            unet(**inputs)
    assert left.names == alone.names
