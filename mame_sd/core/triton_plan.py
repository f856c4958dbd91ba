"""Merging by Triton kernels (`kernel="triton"`): no M x N matrix is ever written.

Each source of a tile goes to its most similar destination, so a plan is one row number for each source. One kernel finds
it, one program for each tile and sample: the tile's similarities stay on the chip. A second kernel sums and divides, and
writes the merged tokens to where they belong. Restoring takes rows. Products and sums are fp32 whatever the inputs.

Verified against the float64 loops in Triton's interpreter; not yet timed, nor run, on a GPU.

NaN and infinity go where PyTorch's operations put them in merging: a NaN similarity is the largest of its source, and
what is not finite spreads over its channel of the tile. Restoring spreads it no further.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.indexing import in_place, rows_of
from mame_sd.core.merge import MergePlan
from mame_sd.core.partition import Positions
from mame_sd.core.weights import by_keep, by_tau
from mame_sd.errors import MachineError

TORCH_INSTEAD = "gradients or float64: PyTorch's operations in place of the kernel"


class RowPlan(MergePlan):
    """A plan that knows one destination for each source: `weights` are made when somebody looks at them."""

    def __init__(
        self, row: Tensor, stay: Tensor, kept_rows: Tensor, pos: Positions, special: int, lead: torch.Size
    ) -> None:
        # row [B, T, n] int32: the destination of its tile that a source goes to; -1: it stays, or is padding.
        self._row = row
        self._place(stay, kept_rows, pos, special, lead)

    @property
    def _weights(self) -> Tensor:  # type: ignore[override]
        every = torch.arange(self.positions.m, device=self._row.device)
        return (self._row.unsqueeze(-2) == every.unsqueeze(-1)).float()

    @property
    def _R(self) -> Tensor:  # type: ignore[override]
        return 1 + self._weights.sum(-1)

    def merge(self, t: Tensor) -> Tensor:
        """As `MergePlan.merge`; where `t` needs gradients, by PyTorch's operations."""
        if not _served(t):
            return super().merge(t)
        t = self._checked(t, self.tokens_in, "merge")
        body = t[:, self.special :].contiguous()
        y: Tensor = torch.ops.mame_sd.merged_tokens(
            body, self.positions.slots, self.positions.gather, self._row, self.positions.M
        )
        if torch.compiler.is_compiling() or self._kept.shape[-1]:  # with tau a graph does not know how many were kept
            y = torch.cat([y, rows_of(body, self._kept_positions())], 1)
        if self.special:
            y = torch.cat([t[:, : self.special], y], 1)
        return y.reshape(*self._lead, *y.shape[1:])

    def restore(self, y: Tensor) -> Tensor:
        """As `MergePlan.restore`, without a product: each position takes the row of `y` it went to."""
        y = self._checked(y, self.tokens_kept, "restore")
        x = rows_of(y, self._source_rows())
        return x.reshape(*self._lead, *x.shape[1:])

    def _source_rows(self) -> Tensor:
        """[B, L]: the row of `merge`'s result that every position went to, or is."""
        pos, b = self.positions, self._row.shape[0]
        device = self._row.device
        dst = pos.gather[pos.dst_slots]  # [T, m] rows of the destinations
        src = dst.expand(b, -1, -1).gather(2, self._row.long().clamp(min=0)).flatten(1)
        kept = self._kept.expand(b, -1)
        src = src.scatter(1, pos.src_real[kept], pos.M + torch.arange(kept.shape[1], device=device).expand(b, -1))
        rows = torch.cat([torch.arange(pos.M, device=device).expand(b, -1), src], 1)[:, pos.gather] + self.special
        return torch.cat([torch.arange(self.special, device=device).expand(b, -1), rows], 1)


def row_plan(x: Tensor, pos: Positions, config: MaMeConfig, special: int, lead: torch.Size) -> RowPlan | None:
    """The plan of feature x [B, L, d] without special tokens; None where PyTorch's operations have to do it.

    These are gradients and float64, for the kernels compute in fp32.

    Raises:
        MachineError: `x` is not on a GPU, or Triton is missing.
    """
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
    if config.keep is None:
        leave, stay, kept = by_tau(best > config.tau, pos)
    else:
        leave, stay, kept = by_keep(best, pos, config.keep)
    return RowPlan(row.masked_fill(leave, -1), stay, kept, pos, special, lead)


def _served(t: Tensor) -> bool:
    return in_place(t) and t.dtype != torch.float64


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
