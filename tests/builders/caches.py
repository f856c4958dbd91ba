"""What users take instead of merging, or beside it: caches that reuse parts of earlier steps.

DeepCache for UNets, diffusers' hooks.

`enable` and `disable` put one on a pipeline (DeepCache) or its denoiser and take it off. A run of
several steps goes in `one_run`. Pipelines of models that are no `CacheMixin` (UNets, Stable
Diffusion 3) do not reset a cache between two images. Nor do they tell it whose state it is to take.
So the second image would begin with the first one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import hooks
from diffusers.hooks import HookRegistry
from diffusers.models.cache_utils import CacheMixin
from torch import nn

from mame_sd.diffusion.apply_denoiser import denoiser_of

# What of a denoiser's call holds both halves of a guided batch; diffusers' own list lacks the last.
_GUIDED = (
    "hidden_states",
    "encoder_hidden_states",
    "timestep",
    "attention_mask",
    "encoder_attention_mask",
    "pooled_projections",
)
_APPLY: dict[type, Callable[[nn.Module, Any], None]] = {
    hooks.PyramidAttentionBroadcastConfig: hooks.apply_pyramid_attention_broadcast,
    hooks.FasterCacheConfig: hooks.apply_faster_cache,
    hooks.FirstBlockCacheConfig: hooks.apply_first_block_cache,
    hooks.MagCacheConfig: hooks.apply_mag_cache,
    hooks.TaylorSeerCacheConfig: hooks.apply_taylorseer_cache,
}
_HOME = {
    f"diffusers.hooks.{name}"
    for name in (
        "pyramid_attention_broadcast",
        "faster_cache",
        "first_block_cache",
        "mag_cache",
        "taylorseer_cache",
    )
}


class Timestep:
    """A forward pre-hook of a denoiser: the latest timestep, from 1000 to 0, as a call without
    arguments.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        self._value = self._largest = 0.0
        self.handle = denoiser.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = next((name for name in ("timestep", "t") if name in kwargs), None)
        given = args[1] if named is None else kwargs[named]
        self._value = float(torch.as_tensor(given).float().max())
        self._largest = max(self._largest, self._value)

    def __call__(self) -> float:
        return (
            self._value if self._largest > 1 else 1000 * self._value
        )  # Flux and its like count from 1 to 0


@dataclass
class Cache:
    """One cache.

    Args:
        name: as its authors call it.
        settings: JSON values that say how it is set.
        config: makes diffusers' settings of a call that gives the timestep.
    """

    name: str
    settings: dict[str, Any]
    config: Callable[[Timestep], Any]
    _on: list[tuple[nn.Module, Timestep]] = field(default_factory=list, repr=False)

    def enable(self, target: Any) -> None:
        """Puts the cache on the denoiser of `target`, as `enable_cache` does where the model has
        that.

        Raises what diffusers raises for models that it can't cache.
        """
        denoiser = denoiser_of(target)
        timestep = Timestep(denoiser)
        self._on.append((denoiser, timestep))
        config = self.config(timestep)
        if isinstance(denoiser, CacheMixin):
            denoiser.enable_cache(config)
            return
        registry = HookRegistry.check_if_exists_or_initialize(denoiser)
        _APPLY[type(config)](denoiser, config)
        if hasattr(registry, "invalidate_child_registries_cache"):  # of newer diffusers
            registry.invalidate_child_registries_cache()

    def disable(self, target: Any) -> None:
        """Takes it off again."""
        denoiser = denoiser_of(target)
        for module, timestep in self._on:
            if module is denoiser:
                timestep.handle.remove()
        self._on = [pair for pair in self._on if pair[0] is not denoiser]
        if isinstance(denoiser, CacheMixin):
            if denoiser.is_cache_enabled:
                denoiser.disable_cache()
            return
        for module in denoiser.modules():
            registry: Any = getattr(module, "_diffusers_hook", None)
            for name, hook in [] if registry is None else list(registry.hooks.items()):
                if type(hook).__module__ in _HOME:
                    registry.remove_hook(name, recurse=False)


@dataclass
class DeepCache:
    """DeepCache (`pip install DeepCache`) on the pipeline of a UNet: of every `interval` steps all
    but one run its outer layers alone.
    """

    interval: int
    branch: int = 0
    name: str = "DeepCache"

    @property
    def settings(self) -> dict[str, Any]:
        """JSON values that say how it is set."""
        return {"interval": self.interval, "branch": self.branch}

    def enable(self, pipe: Any) -> None:
        """Raises ImportError where the package is not installed."""
        from DeepCache import DeepCacheSDHelper

        pipe.deep_cache = DeepCacheSDHelper(pipe=pipe)
        pipe.deep_cache.set_params(cache_interval=self.interval, cache_branch_id=self.branch)
        pipe.deep_cache.enable()

    def disable(self, pipe: Any) -> None:
        """Takes it off again, if it is on."""
        if hasattr(pipe, "deep_cache"):
            pipe.deep_cache.disable()
            del pipe.deep_cache


AnyCache = Cache | DeepCache


@contextmanager
def one_run(target: Any) -> Iterator[None]:
    """The block is one run of all steps: caches start empty."""
    denoiser = denoiser_of(target)
    HookRegistry.check_if_exists_or_initialize(denoiser).reset_stateful_hooks()
    with CacheMixin.cache_context(denoiser, "run"):
        yield


def pyramid(skip_range: int = 2, timesteps: tuple[int, int] = (100, 800)) -> Cache:
    """PyramidAttentionBroadcast of self-attention (arXiv 2408.12588): within `timesteps` all but
    every `skip_range`-th call are skipped.
    """
    return Cache(
        "PyramidAttentionBroadcast",
        {"skip_range": skip_range, "timesteps": list(timesteps)},
        lambda now: hooks.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=skip_range,
            spatial_attention_timestep_skip_range=timesteps,
            current_timestep_callback=now,
        ),
    )


def faster(distilled: bool = False, weight: float = 0.3) -> Cache:
    """FasterCache (arXiv 2410.19355) of self-attention and, unless `distilled`, of the unguided
    half of each batch.
    """
    return Cache(
        "FasterCache",
        {"distilled": distilled, "weight": weight},
        lambda now: hooks.FasterCacheConfig(
            attention_weight_callback=lambda module: weight,
            tensor_format="BCHW",
            is_guidance_distilled=distilled,
            current_timestep_callback=now,
            _unconditional_conditional_input_kwargs_identifiers=list(_GUIDED),
        ),
    )


def first_block(threshold: float) -> Cache:
    """FirstBlockCache: all blocks but the first are skipped where its residual has changed by less
    than `threshold`.
    """
    return Cache(
        "FirstBlockCache",
        {"threshold": threshold},
        lambda now: hooks.FirstBlockCacheConfig(threshold=threshold),
    )


def magnitude(
    steps: int,
    ratios: Sequence[float],
    threshold: float = 0.06,
    skip: int = 3,
    retention: float = 0.2,
) -> Cache:
    """MagCache (github.com/Zehong-Ma/MagCache): all blocks are skipped while the error that
    `ratios` predict stays below `threshold`.
    """
    return Cache(
        "MagCache",
        {"steps": steps, "threshold": threshold, "skip": skip, "retention": retention},
        lambda now: hooks.MagCacheConfig(
            threshold=threshold,
            max_skip_steps=skip,
            retention_ratio=retention,
            num_inference_steps=steps,
            mag_ratios=list(ratios),
        ),
    )


def taylorseer(interval: int, before: int = 3, layers: Sequence[str] | None = None) -> Cache:
    """TaylorSeer (arXiv 2503.06923): attention is extrapolated from its last two outputs, all but
    every `interval`-th step after `before`.
    """
    return Cache(
        "TaylorSeer",
        {
            "interval": interval,
            "before": before,
            "layers": None if layers is None else list(layers),
        },
        lambda now: hooks.TaylorSeerCacheConfig(
            cache_interval=interval,
            disable_cache_before_step=before,
            taylor_factors_dtype=torch.float32,
            cache_identifiers=None if layers is None else list(layers),
        ),
    )


def sea(threshold: float = 0.25) -> Cache:
    """SeaCache (arXiv 2602.18993): all blocks are skipped while the change of their input's
    spectrum stays below `threshold`. The run tells each step's place to `cache_context`.
    """
    return Cache(
        "SeaCache", {"threshold": threshold}, lambda now: hooks.SeaCacheConfig(threshold=threshold)
    )


def text_keys() -> Cache:
    """TextKVCache: keys and values of the text are computed once for all steps."""
    return Cache("TextKVCache", {}, lambda now: hooks.TextKVCacheConfig())
