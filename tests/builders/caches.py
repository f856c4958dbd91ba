"""Caches that reuse parts of earlier steps: DeepCache for UNets, diffusers' hooks.

`one_run` resets them, which pipelines of models that are no `CacheMixin` don't do.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from DeepCache import DeepCacheSDHelper
from diffusers import hooks
from diffusers.hooks import HookRegistry
from diffusers.models.cache_utils import CacheMixin
from torch import nn

from mame_sd.diffusion.denoisers import denoiser_of

# What of a denoiser's call holds both halves of a guided batch; diffusers' own list lacks the last.
_GUIDED = (
    "hidden_states",
    "encoder_hidden_states",
    "timestep",
    "attention_mask",
    "encoder_attention_mask",
    "pooled_projections",
)


class Timestep:
    """Read a denoiser's latest timestep, from 1000 to 0, and return it when called."""

    def __init__(self, denoiser: nn.Module) -> None:
        self._value = self._largest = 0.0
        self.handle = denoiser.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = next((name for name in ("timestep", "t") if name in kwargs), None)
        given = args[1] if named is None else kwargs[named]
        self._value = float(torch.as_tensor(given).float().max())
        self._largest = max(self._largest, self._value)

    def __call__(self) -> float:
        # Flux and related models count from 1 to 0.
        return self._value if self._largest > 1 else 1000 * self._value


@dataclass(eq=False)
class Cache:
    """A cache: how the name of diffusers' class of its settings begins, and what that takes."""

    name: str
    settings: dict[str, Any]

    def enable(self, target: Any) -> None:
        """Put the cache on the denoiser of `target`, which becomes a CacheMixin."""
        denoiser: Any = denoiser_of(target)
        kind = type(denoiser)
        if not isinstance(denoiser, CacheMixin):
            denoiser.__class__ = type(kind.__name__, (kind, CacheMixin), {})
        denoiser.cached_at = timestep = Timestep(denoiser)
        settings = getattr(hooks, f"{self.name}Config", None) or getattr(
            hooks, f"{self.name}CacheConfig"
        )
        timed = "current_timestep_callback" in inspect.signature(settings).parameters
        clock = {"current_timestep_callback": timestep} if timed else {}
        denoiser.enable_cache(settings(**self.settings, **clock))

    def disable(self, target: Any) -> None:
        """Take the cache off again."""
        denoiser: Any = denoiser_of(target)
        denoiser.cached_at.handle.remove()
        denoiser.disable_cache()


class DeepCache:
    """DeepCache on the pipeline of a UNet: every other step runs its outermost layers alone."""

    name = "DeepCache"

    def enable(self, pipe: Any) -> None:
        pipe.deep_cache = DeepCacheSDHelper(pipe=pipe)
        pipe.deep_cache.set_params(cache_interval=2, cache_branch_id=0)
        pipe.deep_cache.enable()

    def disable(self, pipe: Any) -> None:
        pipe.deep_cache.disable()


@contextmanager
def one_run(target: Any) -> Iterator[None]:
    """Make the `with` block one run of all steps, so that caches start empty."""
    denoiser = denoiser_of(target)
    HookRegistry.check_if_exists_or_initialize(denoiser).reset_stateful_hooks()
    with CacheMixin.cache_context(denoiser, "run"):
        yield


# PyramidAttentionBroadcast of self-attention (arXiv 2408.12588): within the timesteps all but every
# other call are skipped.
PYRAMID = Cache(
    "PyramidAttentionBroadcast",
    {
        "spatial_attention_block_skip_range": 2,
        "spatial_attention_timestep_skip_range": (100, 800),
    },
)


def faster(distilled: bool = False) -> Cache:
    """Cache self-attention and, unless `distilled`, the unguided half (arXiv 2410.19355)."""
    settings = {
        "attention_weight_callback": lambda module: 0.3,
        "tensor_format": "BCHW",
        "is_guidance_distilled": distilled,
        "_unconditional_conditional_input_kwargs_identifiers": list(_GUIDED),
    }
    return Cache("FasterCache", settings)


# All blocks but the first are skipped where its residual has changed by less than the threshold.
FIRST = Cache("FirstBlockCache", {"threshold": 10.0})


def magnitude(steps: int) -> Cache:
    """Skip all blocks every other step after a quarter (github.com/Zehong-Ma/MagCache)."""
    ratios = {"num_inference_steps": steps, "mag_ratios": [1.0] * steps}
    return Cache("MagCache", {"max_skip_steps": 1, "retention_ratio": 0.25, **ratios})


def taylorseer(layers: str) -> Cache:
    """Extrapolate attention of these layers every other step (arXiv 2503.06923)."""
    every = {"cache_interval": 2, "disable_cache_before_step": 2}
    own = {"taylor_factors_dtype": torch.float32, "cache_identifiers": [layers]}
    return Cache("TaylorSeer", {**every, **own})


# SeaCache (arXiv 2602.18993): all blocks are skipped while the change of their input's spectrum
# stays below the threshold. The run tells each step's place to `cache_context`.
SEA = Cache("SeaCache", {"threshold": 10.0})
# Keys and values of the text are computed once for all steps.
TEXT_KEYS = Cache("TextKVCache", {})
