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
from mame_sd.core.buffers import in_place
from mame_sd.core.indexing import rows_of
from mame_sd.core.plan import MergePlan, Plan
from mame_sd.core.tables import Positions
from mame_sd.core.weights import Fusion, preserved_by_keep, preserved_by_tau
from mame_sd.errors import MachineError

TORCH_INSTEAD = "gradients or float64: PyTorch's operations in place of the kernel"


class RowPlan(Plan):
    """A plan that knows one destination for each source; `weights` are made when somebody looks at them.

    Args:
        row: int32 [B, T, n], the destination of its tile that a source goes to; -1: it is preserved, or padding.
        pos, preserved, special, lead: as `Plan`.
    """

    def __init__(self, row: Tensor, pos: Positions, preserved: Tensor, special: int, lead: torch.Size) -> None:
        super().__init__(pos, preserved, special, lead)
        self._row = row

    @property
    def weights(self) -> Tensor:
        """See `Plan`; 0 and 1."""
        weights = self._dense_weights()
        return weights.view(*self._lead, *weights.shape[1:])

    def _dense_weights(self) -> Tensor:
        every = torch.arange(self.positions.m, device=self._row.device)
        return (self._row.unsqueeze(-2) == every.unsqueeze(-1)).float()

    def _aggregated(self, body: Tensor) -> Tensor:
        pos = self.positions
        if not _served(body):
            plan = MergePlan(Fusion(self._dense_weights(), self._preserved), pos, self.special, self._lead)
            return plan._aggregated(body)
        y: Tensor = torch.ops.mame_sd.merged_tokens(body.contiguous(), pos.slots, pos.gather, self._row, pos.M)
        return y

    def _heaviest(self) -> Tensor:
        return self._row.long().clamp(min=0)

    def _reconstructed(self, body: Tensor) -> Tensor:
        """Without a product: each position takes the row of `body` that it went to, or is."""
        return rows_of(body, self.rows[:, self.special :] - self.special)


def row_plan(x: Tensor, pos: Positions, config: MaMeConfig, special: int, lead: torch.Size) -> RowPlan | None:
    """The plan of feature x [B, L, d] without special tokens by the kernel that `config` names.

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
    if config.keep is None:
        unmerged, preserved = preserved_by_tau(best > config.tau, pos)
    else:
        unmerged, preserved = preserved_by_keep(best, pos, config.keep)
    return RowPlan(row.masked_fill(unmerged, -1), pos, preserved, special, lead)


def kernel_note(config: MaMeConfig, plan: Plan) -> str:
    """Why the kernel that `config` names did not make `plan`; "" where it did, or none is named."""
    return TORCH_INSTEAD if config.kernel is not None and not isinstance(plan, RowPlan) else ""


def _served(t: Tensor) -> bool:
    """Whether the kernels take `t`."""
    return in_place(t) and t.dtype != torch.float64


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
