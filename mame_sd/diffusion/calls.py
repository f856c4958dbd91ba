"""Guidance in two calls: the second, of the same latents at the same timestep, merges by the plans of the first.

What a batch of both is to `mame_sd.core.pairs`. Pipelines of Qwen-Image, Wan, Chroma and Flux call the model with the prompt and then, with the
very same tensor, with the negative prompt.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mame_sd.core.plan import MergePlan, Plan
from mame_sd.diffusion.threads import PerThread

_MOST = 64  # calls of a layer in one of the model that are kept; others are blocks called by themselves, without end


class Plans:
    """Plans of a model's layers, for all calls of one input."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], Plan] = {}
        self._calls: Counter[str] = Counter()

    def begin(self) -> Plans:
        """To be called at the start of each call of the model."""
        self._calls.clear()
        return self

    def plan(self, layer: str, shape: tuple[int, ...], make: Callable[[], Plan]) -> Plan:
        """What merges in the next call of a layer: the plan that its call of the same number made in an earlier call of the model, else a new
        one. It is kept, unless it is a matrix, which all layers together have no memory for.

        Args:
            layer: its name.
            shape: of the tokens that may merge.
            make: gives a new plan.
        """
        self._calls[layer] += 1  # a feed-forward network may run chunk by chunk
        key = layer, self._calls[layer], shape
        plan = self._found.get(key) or make()
        if not isinstance(plan, MergePlan) and self._calls[layer] <= _MOST:
            self._found[key] = plan
        return plan

    def clear(self, _: Any = None) -> None:
        """Lets go of all."""
        self._found.clear()


class LatestCall:
    """A denoiser's latest call in each thread, as far as it tells whether the next one is of the same input."""

    def __init__(self) -> None:
        self._latest = PerThread()

    def plans(self, inputs: Tensor, timestep: Any, setting: Any) -> Plans | None:
        """The plans that a call shares with those before it; None where it can't be told which these are.

        The latents are the same where they are the same tensor, unchanged: nothing is compared. Of timesteps that are other tensors the values
        are, which waits for the device, in the second call of a pair alone.

        Args:
            inputs: the call's latents.
            timestep: its timestep.
            setting: the settings in force; a call under other ones begins anew.
        """
        if (
            torch.compiler.is_compiling() or inputs.is_inference() or _is_recorded(inputs)
        ):  # changes of the second are not counted
            return None
        latest = self._latest.value
        if latest is not None:
            known, version, before, seen, plans = latest
            if known() is inputs and version == inputs._version and seen is setting and _same(before, timestep):
                found: Plans = plans
                return found.begin()
        plans = Plans()
        latents = weakref.ref(inputs, plans.clear)  # with them goes what was kept for them
        self._latest.value = (latents, inputs._version, _noted(timestep), setting, plans)
        return plans


def _is_recorded(t: Tensor) -> bool:
    """Whether a CUDA graph is being captured: a replay has other values, and must look for what merges."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def _noted(timestep: Any) -> tuple[Any, int]:
    """A timestep, and how often it was changed."""
    counted = isinstance(timestep, Tensor) and not timestep.is_inference()
    return timestep, timestep._version if counted else 0


def _same(noted: tuple[Any, int], timestep: Any) -> bool:
    """Whether a timestep is the one that was noted."""
    before, version = noted
    if not isinstance(before, Tensor) or not isinstance(timestep, Tensor):
        return type(before) is type(timestep) and bool(before == timestep)
    if _noted(before) != (before, version) or before.is_inference():
        return False
    if before is timestep:
        return True
    return before.device == timestep.device and not before.is_meta and torch.equal(before, timestep)
