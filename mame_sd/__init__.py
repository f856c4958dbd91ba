"""Make diffusion models, vision transformers and language models faster without training.

Attention reads merged keys, and MLPs and blocks are computed on a few tokens. The package also has
the paper's token merging (MaMe and MaRe).
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mame_sd.apply import apply_mame as apply_mame
    from mame_sd.apply import remove_mame as remove_mame
    from mame_sd.caches.handle import compress_cache as compress_cache
    from mame_sd.config import MaMeConfig as MaMeConfig
    from mame_sd.core.attention import attention as attention
    from mame_sd.core.paper import plan_tokens as plan_tokens
    from mame_sd.core.restore import restored as restored
    from mame_sd.diffusion.families.family import register_family as register_family
    from mame_sd.diffusion.handle import MaMeHandle as MaMeHandle
    from mame_sd.diffusion.processor import MaMeAttnProcessor as MaMeAttnProcessor
    from mame_sd.diffusion.report import MaMeReport as MaMeReport
    from mame_sd.embedded.model import embedded_model_path as embedded_model_path
    from mame_sd.embedded.pipeline import embedded_pipeline as embedded_pipeline
    from mame_sd.errors import MachineError as MachineError
    from mame_sd.errors import UserError as UserError
    from mame_sd.perception.encoder_registry import register_encoder as register_encoder
    from mame_sd.pipelines.stable_diffusion_mame import (
        StableDiffusionMaMePipeline as StableDiffusionMaMePipeline,
    )
    from mame_sd.report import NothingMergedError as NothingMergedError

    __version__: str

# Loaded on first use: torch and diffusers take seconds.
_LAZY = {
    "MaMeAttnProcessor": "mame_sd.diffusion.processor",
    "MaMeConfig": "mame_sd.config",
    "MaMeHandle": "mame_sd.diffusion.handle",
    "MaMeReport": "mame_sd.diffusion.report",
    "MachineError": "mame_sd.errors",
    "NothingMergedError": "mame_sd.report",
    "StableDiffusionMaMePipeline": "mame_sd.pipelines.stable_diffusion_mame",
    "UserError": "mame_sd.errors",
    "apply_mame": "mame_sd.apply",
    "attention": "mame_sd.core.attention",
    "compress_cache": "mame_sd.caches.handle",
    "embedded_model_path": "mame_sd.embedded.model",
    "embedded_pipeline": "mame_sd.embedded.pipeline",
    "plan_tokens": "mame_sd.core.paper",
    "register_encoder": "mame_sd.perception.encoder_registry",
    "register_family": "mame_sd.diffusion.families.family",
    "remove_mame": "mame_sd.apply",
    "restored": "mame_sd.core.restore",
}

__all__ = sorted([*_LAZY, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("mame-sd")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
