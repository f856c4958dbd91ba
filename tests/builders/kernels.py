"""Launches of our Triton kernels, recorded where no card is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mame_sd import MaMeConfig
from mame_sd.core.partition import positions

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int8: "*i8",
}


def every_launch(dtype: torch.dtype) -> None:
    """Calls what each of our operators runs on tensors without values, of the sizes of SD 1.5's
    largest layer.
    """
    from mame_sd.core import triton_detail, triton_groups, triton_moments  # noqa: F401
    from mame_sd.core.triton_common import LAUNCHES as launch
    from mame_sd.core.triton_common import table_of

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    side, length, width = [64, 64], 4096, 320
    pos = positions(length, MaMeConfig(), (64, 64), draw=torch.tensor([3]))
    table, _, sizes = table_of(pos)
    given: Any = table.to("meta"), empty(1, of=torch.int64), sizes
    x, leader, plane = empty(2, length, width), empty(2, of=torch.int64), [1, 1, length]
    _, rows = launch["nearest"](x, *given, leader, 0, False)
    best, group = launch["nearest"](x, *given, None, 0, True)
    merges = launch["merging"](best, *given, 1000)
    launch["ranked_rows"](merges, group, *given, 0, pos.N - 1000)
    keys = empty(2, 8, length + 77, 40)
    means, counts, _ = launch["group_means"](keys, rows, *given, plane, 0, [0, 77], pos.M, 0, True)
    drawn = keys, keys, rows, counts, *given, plane, pos.samples, [0, 0, 0], pos.M, False
    lacks = launch["lacking"](
        *launch["partial_moments"](means, means, *drawn), pos.M, pos.samples, 0.1, False
    )
    launch["add_lacking"](keys, keys, *lacks)
    seen = launch["seen"](x, empty(width, 32, of=torch.float32))
    merged, counts, _ = launch["group_means"](
        seen.unsqueeze(1), rows, *given, plane, 0, [0, 0], pos.M, 0, False
    )
    y, inputs = empty(2, pos.M, width), merged.squeeze(1)
    left = launch["unexplained"](y, inputs, rows, counts, *given, side)
    follows = launch["follows"](*left, counts, length)
    launch["restored"](y, left[0], inputs, left[1], seen, *follows, rows, side)


def signature_of(
    kernel: Any, args: tuple[Any, ...], more: dict[str, Any]
) -> tuple[dict[str, str], Any, Any]:
    """Types, constants and attributes of a launch's arguments, as Triton tells them."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        n: v for n, v in more.items() if n in kernel.arg_names
    }
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(kernel.arg_names):
        value = values[name]
        if kernel.params[i].is_constexpr or (type(value) is int and value == 1):
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            types[name], divisible[(i,)] = _TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            types[name] = "i32"
            if value % 16 == 0:
                divisible[(i,)] = [["tt.divisibility", 16]]
    return types, constants, divisible
