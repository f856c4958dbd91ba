"""Whether our Triton kernels run: on CUDA devices where they were found to be right, for tensors of
which no gradient is needed.

A device is asked once for each dtype: all kernels run on a small example there, beside PyTorch's
operations. Where one does not compile, or gives other numbers, PyTorch's operations run from then
on, and one warning says so. Never on ROCm, whose Triton (3.9) does not compile them in fp32, and
never on other devices.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mame_sd.config import MaMeConfig
from mame_sd.core.buffers import in_place
from mame_sd.core.detail import Detail, directions
from mame_sd.core.partition import Positions, constant, is_captured
from mame_sd.core.similarity import merged_by_keep

INTERPRETED = (
    os.environ.get("TRITON_INTERPRET") == "1"
)  # Triton's interpreter: the kernels run on the CPU
DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)  # where they may run
LARGEST_TILE = 128  # destinations of one tile that the kernels hold on the chip
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_found: dict[tuple[str, torch.dtype], bool] = {}
_forced: list[bool] = []  # what `only` says, the innermost last


def on(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors, all on the device of the first."""
    first = tensors[0]
    if first.device.type not in DEVICES:
        return False
    if not all(t.dtype in DTYPES and in_place(t) for t in tensors) or (
        _TRITON_MISSING and not _forced
    ):
        return False
    return _forced[-1] if _forced else _ready(str(first.device), str(first.dtype))


@contextmanager
def only(kernels: bool) -> Iterator[None]:
    """For the block, kernels run wherever they could, or never; nothing is checked."""
    _forced.append(kernels)
    try:
        yield
    finally:
        _forced.pop()


def launched(operator: Callable[..., Any], *args: Any) -> Any:
    """What one of our operators gives (True of nothing); None where it failed, and PyTorch's
    operations have to do it from now on.
    """
    if torch.compiler.is_compiling() or _forced:
        found = operator(*args)
        return True if found is None else found
    try:
        found = operator(*args)
        return True if found is None else found
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        first: Tensor = args[0]
        _turn_off(str(first.device), first.dtype, error)
        return None


def state() -> dict[str, bool]:
    """Whether the kernels run, by device and dtype, as far as that was asked for."""
    return {
        f"{device} {str(dtype).removeprefix('torch.')}": right
        for (device, dtype), right in _found.items()
    }


_TRITON_MISSING = find_spec("triton") is None or torch.version.hip is not None


@torch.compiler.assume_constant_result
def _ready(device: str, dtype: str) -> bool:
    """Whether the kernels are right on a device; found out where it was not asked before.

    Nothing below is traced.
    """
    key = device, getattr(torch, dtype.removeprefix("torch."))
    if key not in _found:
        if is_captured():  # no check can run then
            return False
        _found[key] = False  # for whoever asks meanwhile
        _found[key] = _right(*key)
    return _found[key]


def _right(device: str, dtype: torch.dtype) -> bool:
    example: Any = import_module("mame_sd.core.example")  # by name: it runs what asks here

    if not INTERPRETED:
        index = torch.device(device).index or 0
        if index >= torch.cuda.device_count():  # tensors without values: nothing runs
            return True
        if dtype == torch.bfloat16 and torch.cuda.get_device_capability(index) < (8, 0):
            return False
    try:
        with (
            _disable_current_modes(),
            torch.inference_mode(False),
            torch.no_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter(
                "ignore"
            )  # where warnings are errors, one is no reason against a kernel
            with only(True):
                found = example.results(device, dtype)
            with only(False):
                expected = example.results(device, dtype)
        for name, value in expected.items():
            apart = (
                found[name].double() - value.double()
            ).abs().max() / value.double().abs().max().clamp(min=1e-3)
            if not apart <= example.TOLERANCE[dtype]:
                raise ArithmeticError(f"{name} is {apart:.1e} of its largest value off")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _turn_off(device, dtype, error)
        return False
    return True


def _turn_off(device: str, dtype: torch.dtype, error: Exception) -> None:
    _found[device, dtype] = False
    reason = str(error).strip().splitlines() or [""]
    warnings.warn(
        f"merging runs by PyTorch's operations on {device} for {dtype}, and not by its Triton"
        f" kernels: {type(error).__name__}: {reason[-1][:200]}",
        RuntimeWarning,
        stacklevel=2,
    )


def groups_and_preserved(
    x: Tensor,
    pos: Positions,
    config: MaMeConfig,
    special: int,
    leader: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """Of a RowPlan of feature x [B, L, d] without special tokens its `rows` and the preserved
    sources. None where PyTorch's operations have to find them.
    """
    if config.keep is None or config.metric != "cosine" or pos.m > LARGEST_TILE or not on(x):
        return None
    from mame_sd.core import triton_groups as kernels
    from mame_sd.core.triton_common import table_of

    merged, table = merged_by_keep(pos, config.keep), table_of(pos)
    ranked = merged < pos.N
    if not merged or (ranked and pos.N > kernels.LARGEST_RANKING):
        return None
    found = launched(kernels.nearest, x, *table, leader, special, ranked)
    if found is None:
        return None
    if not ranked:
        preserved = x.new_empty((x.shape[0], 0), dtype=torch.long)
        return found[1], preserved
    merges = launched(kernels.merging, found[0], *table, merged)
    if merges is None:
        return None
    rows: tuple[Tensor, Tensor] | None = launched(
        kernels.ranked_rows, merges, found[1], *table, special, pos.N - merged
    )
    return rows


def means(
    plan: Any,
    t: Tensor,
    size: tuple[int, ...] = (),
    around: tuple[int, int] | None = None,
    sampled: bool = False,
    proportional: bool = False,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """See `mame_sd.core.triton_groups.group_means`, of a RowPlan and tokens [B, H, .., D]; None
    where PyTorch has to do it.
    """
    pos = plan.positions
    if pos.m > LARGEST_TILE:
        return None
    from mame_sd.core.triton_common import table_of
    from mame_sd.core.triton_groups import group_means

    plane = size if len(size) == 3 else (1, 1, pos.L)
    unmerged = (plan.special, 0) if around is None else around
    groups, drawn = plan.tokens_kept - plan.special, pos.samples if sampled else 0
    found: tuple[Tensor, Tensor, Tensor] | None = launched(
        group_means,
        t,
        plan.rows,
        *table_of(pos),
        plane,
        plan.special,
        unmerged,
        groups,
        drawn,
        proportional,
    )
    if found is not None and around is None:
        plan._sizes = found[1]
    return found


def restored_with_detail(plan: Any, y: Tensor, detail: Detail, count: int) -> Tensor | None:
    """Merged tokens y [B, L', C] restored by a RowPlan with detail; None where PyTorch has to."""
    if plan.positions.m > LARGEST_TILE:
        return None
    from mame_sd.core import triton_detail as kernels
    from mame_sd.core.triton_common import table_of

    feature, plane = detail.feature, detail.plane
    seen = launched(
        kernels.seen, feature, constant(directions, feature.shape[2], count, feature.device)
    )
    merged = None if seen is None else means(plan, seen.unsqueeze(1))
    if merged is None:
        return None
    of_inputs, sizes = merged[0].squeeze(1), merged[1]
    found = launched(
        kernels.unexplained,
        y,
        of_inputs,
        plan.rows,
        sizes,
        *table_of(plan.positions),
        list(plane),
    )
    follow = None if found is None else launched(kernels.follows, *found, sizes, plan.positions.L)
    if found is None or follow is None:
        return None
    x: Tensor | None = launched(
        kernels.restored,
        y,
        found[0],
        of_inputs,
        found[1],
        seen,
        *follow,
        plan.rows,
        list(plane),
    )
    return x
