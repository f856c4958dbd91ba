"""The paper's block in plain loops: x' = MSA(LN(x)) + x, x'' = MaMe(x'), MLP(LN(x'')) + x'', from the block's own forward.

The first half is what the block's second norm is given, the second what the block gives with its attention silenced: nothing is
assumed of the modules between. Merging is that of `mame_sd.core.reference`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.reference import reference_plan
from tests.builders.perception import Row


def blocks_of(model: nn.Module, row: Row) -> list[Any]:
    """The blocks of the vision transformer: modules that have the row's norm and attention, of images' half."""
    named = [
        (name, module)
        for name, module in model.named_modules()
        if {row.norm, row.attention} <= {child for child, _ in module.named_children()} and "text" not in name
    ]
    return [module for _, module in named]


def merged_oracle(model: nn.Module, row: Row, configs: dict[int, MaMeConfig]) -> nn.Module:
    """A copy of `model` in float64 in which the blocks `configs` merge."""
    model = copy.deepcopy(model).double()
    for number, block in enumerate(blocks_of(model, row)):
        if number in configs:
            block.forward = _forward(block, row, configs[number])
    return model


def _forward(block: Any, row: Row, config: MaMeConfig) -> Any:
    norm, attention = block.get_submodule(row.norm), block.get_submodule(row.attention)

    def silenced(module: nn.Module, args: Any, output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen: list[Tensor] = []
        hook = norm.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        type(block).forward(block, x, *args, **kwargs)
        hook.remove()
        merged = reference_plan(seen[0], config, special=row.special).merge(seen[0])
        hook = attention.register_forward_hook(silenced)
        y = type(block).forward(block, merged, *args, **kwargs)
        hook.remove()
        return y

    return forward
