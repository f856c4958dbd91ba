"""Guidance in two calls: the second, of the same latents at the same timestep, merges by the plans
of the first.

What a batch of both is to `mame_sd.core.pairs`. Pipelines of Qwen-Image, Wan, Chroma and Flux call
the model with the prompt and then, with the very same tensor, with the negative prompt. A call with
all the same tensors is none of these: it is repeated, with other weights perhaps.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.matrix_plan import MergePlan
from mame_sd.core.plan import Plan
from mame_sd.diffusion.threads import PerThread


class Plans:
    """Plans of a model's layers, for all calls of the same latents at one timestep.

    Args:
        latents: the model's input; with it go the plans.
    """

    def __init__(self, latents: Tensor) -> None:
        found: dict[tuple[Any, ...], Plan] = {}
        self._found = found
        self._calls: Counter[str] = Counter()
        self._latents = weakref.ref(latents, lambda _: found.clear())
        self._version = latents._version
        self._others: list[weakref.ref[Tensor]] = []  # of the latest call
        self._of = self._now = _noted(None)  # the timesteps of the plans and of the call under way

    def go_for(self, latents: Tensor, others: list[Tensor]) -> bool:
        """Whether they go for a call with this very tensor, unchanged since as PyTorch counts it,
        and other tensors than the latest call's.
        """
        same = len(others) == len(self._others) and all(
            known() is other for known, other in zip(self._others, others, strict=True)
        )
        return self._latents() is latents and self._version == latents._version and not same

    def begin(self, timestep: Any, others: list[Tensor]) -> Plans:
        """To be called at the start of each call of the model."""
        self._calls.clear()
        self._now = _noted(timestep)
        self._others = [weakref.ref(other) for other in others]
        return self

    def plan(
        self, layer: str, config: MaMeConfig, shape: tuple[int, ...], make: Callable[[], Plan]
    ) -> Plan:
        """What merges in the next call of a layer: the plan that its call of the same number made
        in an earlier call of the model, else a new one. It is kept, unless it is a matrix, which
        all layers together have no memory for.

        Args:
            layer: its name.
            config: its settings.
            shape: of the tokens that may merge.
            make: gives a new plan.
        """
        if (
            self._latents() is None
        ):  # a call of the model that was interrupted, of which no hook is told
            return make()
        if self._found and self._of is not self._now and not _same(self._of, self._now):
            self._found.clear()
        self._of = self._now
        self._calls[layer] += 1  # a feed-forward network may run chunk by chunk
        key = layer, self._calls[layer], config, shape
        plan = self._found.get(key) or make()
        if not any(isinstance(part, MergePlan) for part in getattr(plan, "parts", (plan,))):
            self._found[key] = plan
        return plan


class LatestCall:
    """A denoiser's latest call in each thread, as far as it tells whether the next one is of the
    same input.
    """

    def __init__(self) -> None:
        self._latest = PerThread()

    def plans(self, latents: Tensor, timestep: Any, others: list[Tensor]) -> Plans | None:
        """The plans that a call shares with those before it; None where it can't be told which
        these are.

        The latents are the same where they are the same tensor, unchanged: nothing is compared. Of
        timesteps that are other tensors the values are, which waits for the device, where a second
        call has plans to share.

        Args:
            latents: the call's first input.
            timestep: its timestep.
            others: its other tensors, such as the prompt's embeddings.
        """
        # changes of tensors of inference mode, and of subclasses, are not counted, or have no
        # values
        if type(latents) is not Tensor or latents.is_inference() or _is_recorded(latents):
            self.forget()
            return None
        plans: Plans | None = self._latest.value
        if plans is None or not plans.go_for(latents, others):
            plans = self._latest.value = Plans(latents)
        return plans.begin(timestep, others)

    def forget(self) -> None:
        """Lets go of this thread's plans."""
        self._latest.value = None


def _is_recorded(t: Tensor) -> bool:
    """Whether a CUDA graph is being captured: a replay has other values, and must look for what
    merges.
    """
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def _noted(timestep: Any) -> tuple[Any, int]:
    """A timestep, and how often it was changed."""
    counted = isinstance(timestep, Tensor) and not timestep.is_inference()
    return timestep, timestep._version if counted else 0


def _same(before: tuple[Any, int], now: tuple[Any, int]) -> bool:
    """Whether two timesteps that were noted are the same, and neither has changed since."""
    (first, version), (second, _) = before, now
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and bool(first == second)
    if _noted(first) != (first, version) or first.is_inference():
        return False
    if first is second:
        return True
    return first.device == second.device and not first.is_meta and torch.equal(first, second)
