"""MaMe and MaRe: training-free token merging for diffusion models and vision transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mame_sd.apply import apply_mame as apply_mame
    from mame_sd.apply import mame as mame
    from mame_sd.apply import remove_mame as remove_mame
    from mame_sd.config import MaMeConfig as MaMeConfig
    from mame_sd.core.attention import attention as attention
    from mame_sd.core.paper import plan_tokens as plan_tokens
    from mame_sd.diffusion.handle import MaMeHandle as MaMeHandle
    from mame_sd.diffusion.processor import MaMeAttnProcessor as MaMeAttnProcessor
    from mame_sd.embedded.model import embedded_model_path as embedded_model_path
    from mame_sd.embedded.pipeline import embedded_pipeline as embedded_pipeline
    from mame_sd.errors import MachineError as MachineError
    from mame_sd.errors import UserError as UserError
    from mame_sd.report import MaMeReport as MaMeReport
    from mame_sd.report import NothingMergedError as NothingMergedError

# Loaded on first use: torch and diffusers take seconds.
_LAZY = {
    "MaMeAttnProcessor": "mame_sd.diffusion.processor",
    "MaMeConfig": "mame_sd.config",
    "MaMeHandle": "mame_sd.diffusion.handle",
    "MaMeReport": "mame_sd.report",
    "MachineError": "mame_sd.errors",
    "NothingMergedError": "mame_sd.report",
    "UserError": "mame_sd.errors",
    "apply_mame": "mame_sd.apply",
    "attention": "mame_sd.core.attention",
    "embedded_model_path": "mame_sd.embedded.model",
    "embedded_pipeline": "mame_sd.embedded.pipeline",
    "mame": "mame_sd.apply",
    "plan_tokens": "mame_sd.core.paper",
    "remove_mame": "mame_sd.apply",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
