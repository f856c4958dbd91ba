"""Define what the reports of all handles share, and sums over calls."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.forks import free_in_children

# Held while sums change, which several threads may do.
ADDING = free_in_children(threading.Lock())
NEVER_CALLED = "not called yet"
TOO_FEW = "fewer than "  # prefix of the reason of a layer with few tokens
NOTHING_MERGES = "no layer merges"  # prefix of the warning of a forward that merged nothing


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 layer", "2 layers"."""
    return f"{count} {noun}{'s' * (count != 1)}"


class NothingMergedError(RuntimeError):
    """A forward has run, but no layer could merge although merging was asked for."""


class Sums:
    """Sums of whole numbers over calls, of several threads and of compiled regions.

    A Python number that changed at every call would recompile every call, so that compiled regions
    add to a tensor. Shapes alone are counted, so that nothing waits for the device.

    Args:
        count: number of sums.
        device: device of the sums of compiled regions. If None, these are not counted.
    """

    def __init__(self, count: int, device: torch.device | None = None) -> None:
        self.count = count
        self._compiled: Tensor | None = None
        self.reset(device)

    def reset(self, device: torch.device | None = None) -> None:
        """Set all sums to zero. Compiled regions count on `device`; if None, where they did."""
        self.eager = (0,) * self.count
        if self._compiled is not None and device in (None, self._compiled.device):
            self._compiled.zero_()
        elif device is not None:
            with torch.inference_mode(False):  # changed in place in and out of inference mode
                self._compiled = torch.zeros(self.count, dtype=torch.int64, device=device)

    def add(self, *values: int) -> None:
        """Add one value to each sum."""
        if not torch.compiler.is_compiling():
            with ADDING:
                self.eager = tuple(map(add, self.eager, values))
        # exported graphs must not change our tensor
        elif self._compiled is not None and not torch.compiler.is_exporting():
            for place, value in enumerate(values):
                self._compiled[place].add_(value)

    def totals(self) -> tuple[int, ...]:
        """Return the sums. This waits for the device if a compiled region counted there."""
        compiled = (0,) * self.count if self._compiled is None else self._compiled.tolist()
        return tuple(map(add, self.eager, compiled))


@dataclass(frozen=True, kw_only=True)
class MeanTokens:
    """Mean numbers of tokens over calls."""

    tokens_in: float
    tokens_kept: float

    @property
    def share(self) -> float:
        """Return tokens kept / tokens in, 1 before the first call."""
        return self.tokens_kept / self.tokens_in if self.tokens_in else 1.0


@dataclass(frozen=True, kw_only=True)
class LayerTokens(MeanTokens):
    """Mean numbers of tokens before and after one layer.

    Attributes:
        name: name of the layer.
        tokens_in: tokens before it.
        tokens_kept: tokens that it kept or computed.
    """

    name: str


class Report(ABC):
    """Say what merged since the last `reset`. Every handle's `report()` returns a subclass.

    `str(report)` is for people, `to_dict()` for programs.

    Attributes:
        layers: numbers of tokens of each layer, in the order of the model.
    """

    layers: tuple[LayerTokens, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"layers": [{**asdict(layer), "share": layer.share} for layer in self.layers]}

    @abstractmethod
    def __str__(self) -> str: ...


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter, or the CPU if it has none."""
    first: Tensor | None = next(iter(module.parameters()), None)
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device
