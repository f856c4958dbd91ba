"""MaMe and MaRe: training-free token merging for diffusion models and vision transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mame_sd.apply import apply_mame, mame, remove_mame
    from mame_sd.config import MaMeConfig, Study
    from mame_sd.core.matrix_plan import MergePlan
    from mame_sd.core.merge import plan_merge
    from mame_sd.diffusion.handle import MaMeHandle
    from mame_sd.diffusion.processor import MaMeAttnProcessor
    from mame_sd.embedded.model import embedded_model_path
    from mame_sd.embedded.pipeline import embedded_pipeline
    from mame_sd.errors import MachineError, UserError
    from mame_sd.report import MaMeReport, NothingMergedError

# Loaded on first use: torch and diffusers take seconds.
_LAZY = {
    "MaMeAttnProcessor": "mame_sd.diffusion.processor",
    "MaMeConfig": "mame_sd.config",
    "MaMeHandle": "mame_sd.diffusion.handle",
    "MaMeReport": "mame_sd.report",
    "MachineError": "mame_sd.errors",
    "MergePlan": "mame_sd.core.plan",
    "NothingMergedError": "mame_sd.report",
    "Study": "mame_sd.config",
    "UserError": "mame_sd.errors",
    "apply_mame": "mame_sd.apply",
    "embedded_model_path": "mame_sd.embedded.model",
    "embedded_pipeline": "mame_sd.embedded.pipeline",
    "mame": "mame_sd.apply",
    "plan_merge": "mame_sd.core.merge",
    "remove_mame": "mame_sd.apply",
}

__all__ = [
    "MaMeAttnProcessor",
    "MaMeConfig",
    "MaMeHandle",
    "MaMeReport",
    "MachineError",
    "MergePlan",
    "NothingMergedError",
    "Study",
    "UserError",
    "apply_mame",
    "embedded_model_path",
    "embedded_pipeline",
    "mame",
    "plan_merge",
    "remove_mame",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
