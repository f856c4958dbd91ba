"""MaMe and MaRe: training-free token merging for diffusion models, by matrix operations alone."""

from __future__ import annotations

from mame_sd.config import MaMeConfig
from mame_sd.errors import MachineError, UserError
from mame_sd.merge import MergePlan, plan_merge

__all__ = [
    "MaMeConfig",
    "MachineError",
    "MergePlan",
    "UserError",
    "plan_merge",
]
