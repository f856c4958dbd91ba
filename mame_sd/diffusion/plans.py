"""Plans that two calls of a model share.

Guidance may take two calls: the second, of the same latents at the same timestep, merges by the
plans of the first. What a batch of both is to `mame_sd.core.pairs`. Pipelines of Qwen-Image, Wan,
Chroma and Flux call the model with the prompt and then, with the very same tensor, with the
negative prompt. A call with all the same tensors is none of these: it is repeated, with other
weights perhaps.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.groups import Groups


class Plans:
    """Plans of a model's layers, for all calls of the same latents at one timestep.

    Args:
        latents: the model's input; with it go the plans.
    """

    def __init__(self, latents: Tensor) -> None:
        found: dict[tuple[Any, ...], Groups] = {}
        self._found = found
        self._calls: Counter[tuple[str, int]] = Counter()
        self._latents = weakref.ref(latents, lambda _: found.clear())
        self._version = latents._version
        self._others: list[weakref.ref[Tensor]] = []  # of the latest call
        self._of = self._now = noted(None)  # the timesteps of the plans and of the call under way

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
        self._now = noted(timestep)
        self._others = [weakref.ref(other) for other in others]
        return self

    def groups(
        self,
        layer: str,
        config: MaMeConfig,
        shape: tuple[int, ...],
        number: int,
        make: Callable[[], Groups],
    ) -> Groups:
        """What merges in a grid of the next call of a layer.

        These are the groups that its call of the same number made in an earlier call of the model,
        else new ones, which are kept.

        Args:
            layer: its name.
            config: its settings.
            shape: of the grids that merge.
            number: of the grid, from 0.
            make: gives new groups.
        """
        if self._latents() is None:  # a call that was interrupted, of which no hook is told
            return make()
        if self._found and self._of is not self._now and not same(self._of, self._now):
            self._found.clear()
        self._of = self._now
        self._calls[layer, number] += 1  # attention may run sample by sample
        key = layer, number, self._calls[layer, number], config, shape
        found = self._found.get(key)
        if found is None:
            found = make()
            self._found[key] = found
        return found


def noted(timestep: Any) -> tuple[Any, int]:
    """A timestep, and how often it was changed."""
    counted = isinstance(timestep, Tensor) and not timestep.is_inference()
    return timestep, timestep._version if counted else 0


def same(before: tuple[Any, int], now: tuple[Any, int]) -> bool:
    """Whether two timesteps that were noted are the same, and neither has changed since."""
    (first, version), (second, _) = before, now
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and bool(first == second)
    if noted(first) != (first, version) or first.is_inference():
        return False
    if first is second:
        return True
    return first.device == second.device and not first.is_meta and torch.equal(first, second)
