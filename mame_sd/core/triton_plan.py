"""Destinations by a Triton kernel (`kernel="triton"`): no M x N matrix is ever written.

It finds each source's most similar destination, one program for each tile and sample: the tile's similarities stay
on the chip. Products and sums are fp32 whatever the inputs. Merging and restoring are those of `row_plan.py`.

Verified against the float64 loops in Triton's interpreter; not yet timed, nor run, on a GPU.

A NaN similarity is the largest of its source.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.buffers import in_place
from mame_sd.core.plan import Plan
from mame_sd.core.row_plan import RowPlan, row_plan
from mame_sd.core.tables import Positions
from mame_sd.errors import MachineError

TORCH_INSTEAD = "gradients or float64: PyTorch's operations instead of the kernel"


def kernel_plan(
    x: Tensor, pos: Positions, config: MaMeConfig, special: int, lead: torch.Size, leader: Tensor | None = None
) -> RowPlan | None:
    """The plan of feature x [B, L, d] without special tokens by the kernel that `config` names; `leader` as in `plan_merge`.

    None where it names none, and where PyTorch's operations have to do it: these are gradients and float64, for the kernels
    compute in fp32.

    Raises:
        MachineError: `x` is not on a GPU, or Triton is missing.
    """
    if config.kernel is None:
        return None
    try:
        from mame_sd.core.triton_kernels import best_destination
    except ImportError as error:
        raise MachineError(
            f"expected the package triton for kernel='triton', got {error}: pip install triton, or leave kernel out"
        ) from None
    if not x.is_cuda and not _interpreted():
        raise MachineError(
            f"expected tokens on a CUDA device for kernel='triton', got {x.device}: move the model there, or leave "
            "kernel out"
        )
    if not _served(x):
        return None
    best, row = best_destination(x.contiguous(), pos.slots, pos.m)
    if leader is not None:
        best, row = best.index_select(0, leader), row.index_select(0, leader)
    return row_plan(best, row, pos, config, special, lead, by_kernel=True)


def kernel_note(config: MaMeConfig, plan: Plan) -> str:
    """Why the kernel that `config` names did not make `plan`; "" where it did, or none is named."""
    found = isinstance(plan, RowPlan) and plan.by_kernel
    return TORCH_INSTEAD if config.kernel is not None and not found else ""


def _served(t: Tensor) -> bool:
    """Whether the kernels take `t`."""
    return in_place(t) and t.dtype != torch.float64


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
