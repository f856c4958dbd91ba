"""What a call of the model tells the layers in it: how their tokens lie, which step it is, which
plans it shares with another call, and the settings in force.

The hooks of `hooks.py` write it, layers (`layer.py`) read it.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig, Method
from mame_sd.core.keys import OwnKernel
from mame_sd.core.merge import Groups
from mame_sd.diffusion.threads import PerTask, PerThread

Call = Mapping[str, Any]  # the arguments of a forward, by name


@dataclass(frozen=True)
class Tokens:
    """How the tokens of one call lie.

    Attributes:
        size: (h, w) of an image's tokens, or (t, h, w) of a video's, in row-major order; (n,) where
            rows and columns are unknown.
        before: tokens of something else, such as text, that stand before them in layers where both
            share a sequence; None: any number, another in each layer, and `after` behind them.
        after: the same, behind them (in every layer, such as a reference image's); None: any
            number, another in each layer.
        unknown: why they can't be told in this call, in which then nothing merges.
        references: the sizes of reference images that stand right behind them, in their order; the
            first of what `after` counts.
        timesteps: whether tokens or frames have each a timestep of its own.
        count: how many tokens the image or video has.
    """

    size: tuple[int, ...]
    before: int | None = 0
    after: int | None = 0
    unknown: str = ""
    references: tuple[tuple[int, ...], ...] = ()
    timesteps: bool = False
    count: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", math.prod(self.size))

    def start(self, length: int) -> int | None:
        """Where they begin in a sequence of `length`; None if they can't be in it."""
        if length == self.count:
            return 0
        if self.before is None:
            start = length - self.count - (self.after or 0)
            return start if start >= 0 else None
        if self.after is None:
            return self.before if length >= self.before + self.count else None
        if length == self.count + self.after:
            return 0
        return self.before if length == self.before + self.count + self.after else None


class Plans:
    """What merged in a model's layers, for all calls of the same latents at one timestep.

    Guidance may take two calls: the second, of the same latents at the same timestep, merges as the
    first did. Pipelines of Qwen-Image, Wan, Chroma and Flux call the model with the prompt and
    then, with the very same tensor, with the negative prompt. A call with all the same tensors is
    none of these: it is repeated, with other weights perhaps.

    Args:
        latents: the model's input; with it go the plans.

    Attributes:
        found: what merged, by layer, number of its call, settings and sizes: of each attention call
            in it the groups of each grid.
        calls: how often each layer was called in the call of the model under way.
        latents: held weakly. Where they are gone the call was interrupted, of which no hook is
            told: its plans hold for no layer any more.
        unsettled: whether no layer has asked in the call of the model under way.
    """

    def __init__(self, latents: Tensor) -> None:
        found: dict[tuple[Any, ...], dict[int, dict[int, Groups]]] = {}
        self.found, self.calls = found, Counter[str]()
        self.latents = weakref.ref(latents, lambda _: found.clear())
        self.unsettled = True
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
        return self.latents() is latents and self._version == latents._version and not same

    def begin(self, timestep: Any, others: list[Tensor]) -> Plans:
        """Begin a call of the model at a timestep, with other tensors beside the latents."""
        self.calls.clear()
        self.unsettled, self._now = True, noted(timestep)
        self._others = [weakref.ref(other) for other in others]
        return self

    def settle(self) -> None:
        """Drop what merged at another timestep, before a layer first reads `found`."""
        if self.found and not same(self._of, self._now):
            self.found.clear()
        self.unsettled, self._of = False, self._now


def noted(timestep: Any) -> tuple[Any, int]:
    """Note a timestep, and how often it was changed."""
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


class Step(NamedTuple):
    """What the call of the model around a layer says of merging in it.

    Attributes:
        draw: LongTensor [1], which of the drawn partitions it takes.
        draws: those of DRAWS layers that follow one another, [DRAWS]; None in a compiled graph.
        leader: of each sample of the batch the one whose tokens decide what merges
            (`mame_sd.core.merge`). None: each sample decides by itself.
        plans: what merged in an earlier call of the same input, and merges again in this one; None:
            this call stands alone.
    """

    draw: Tensor | None = None
    draws: Tensor | None = None
    leader: Tensor | None = None
    plans: Plans | None = None


NO_STEP = Step()  # of layers around which nothing tells of one


@dataclass(frozen=True, eq=False)
class ResolvedConfig:
    """Settings, and whether they merge.

    Attributes:
        config: the settings.
        active: whether they merge.
        asked: as they were given, before those beside the model's weights filled what they leave
            open.
        of_layer: by name those of self-attentions that have their own; None where one is left
            alone.
        methods: by which methods layers merge.
    """

    config: MaMeConfig
    active: bool
    asked: MaMeConfig
    of_layer: Mapping[str, MaMeConfig | None] = field(default_factory=dict)
    methods: frozenset[Method] = field(init=False)

    def __post_init__(self) -> None:
        every = (self.config, *self.of_layer.values())
        object.__setattr__(self, "methods", frozenset(one.method for one in every if one))


class Shared:
    """What a handle and its hooks share: the live settings, and what the model's call says of
    merging.

    Attributes:
        setting: every task's, but for those that have one of their own.
        own: the ResolvedConfigs of each task's open `using` blocks, the innermost last.
        step: the Step of its latest call of the model, or a Later one.
        learning: what is known of calls with gradients.
        kernel: computes attention over merged keys instead of the model's own.
    """

    def __init__(self, setting: ResolvedConfig, kernel: OwnKernel | None = None) -> None:
        self.setting = setting
        self.kernel = kernel
        self.own = PerTask()
        self.step = PerThread(latest=True)
        self.learning = Learning()

    @property
    def now(self) -> ResolvedConfig:
        """The setting in force in this task."""
        own = self.own.value
        return own[-1] if own else self.setting


class Later:
    """A step that is worked out when a layer first asks for it: where none merges, nothing is
    launched.

    Args:
        make: gives the step of a call with these latents.
        latents: the call's. They are held weakly: of a call that a Ctrl-C ends no hook is told, and
            it is under way for other threads as long as its latents are there (`threads.begin`).
        plans: what the call shares with those before it, while it is under way.
    """

    def __init__(
        self,
        make: Callable[[Tensor | None], Step],
        latents: Tensor | None,
        plans: Plans | None = None,
    ) -> None:
        self._make, self.plans = make, plans
        self._latents = None if latents is None else weakref.ref(latents)
        self.made: Step | None = None

    def step(self) -> Step:
        """The step."""
        if self.made is None:
            self.made = self._make(None if self._latents is None else self._latents())
        return self.made


class Learning:
    """Whether a block that is computed again for gradients (a checkpoint that somebody put around
    it) finds the timestep of its own call.
    """

    def __init__(self) -> None:
        self._first: tuple[Any, int] | None = None  # timestep of the first call since a backward
        self._moved = self._over = False

    def begin(self, timestep: Any) -> None:
        """Begin a call of the model at a timestep."""
        if torch.is_grad_enabled() and (self._first is None or self._over):
            self._first, self._moved, self._over = noted(timestep), False, False
        elif self._first is not None and not self._moved:
            self._moved = not same(self._first, noted(timestep))

    def again(self) -> None:
        """Raises RuntimeError where a call at another timestep came since."""
        self._over = True
        if self._moved:
            raise RuntimeError(
                "expected a checkpointed block to be computed again before the model's next"
                " timestep, whose partition it would take: call enable_gradient_checkpointing, or"
                " give redraw=False, share_guidance_plan=False"
            )
