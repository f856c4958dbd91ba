"""Pass information about a call of the model to its layers.

The information is the layout of the tokens, the step, the plans that the call shares with another
call, and the settings in force. The hooks of `hooks.py` write it, and layers (`layer.py`) read it.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig, Method
from mame_sd.core.groups import Groups
from mame_sd.core.intercept import KernelAdapter
from mame_sd.diffusion.threads import Nested, PerTask, PerThread

Call = Mapping[str, Any]  # the arguments of a forward, by name


@dataclass(frozen=True)
class Tokens:
    """Layout of the tokens of one call.

    Attributes:
        size: (h, w) of an image's tokens, or (t, h, w) of a video's, in row-major order. (n,) if
            rows and columns are unknown.
        before: number of other tokens, such as text, that precede them in layers where both share a
            sequence. If None, any number that may differ between layers, followed by
            `after` tokens.
        after: number of other tokens that follow them in every layer, such as a reference image's.
            If None, any number that may differ between layers.
        unknown: reason why the layout of this call is unknown. If not empty, nothing merges.
        references: sizes of reference images that directly follow the tokens, in their order. They
            are the first of the tokens that `after` counts.
        timesteps: if True, each token or frame has its own timestep.
        count: number of tokens of the image or video.
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
        """Return the position of the first token in a sequence of `length`.

        It is None if the tokens can't be in such a sequence.
        """
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
    """Groups of a model's layers, shared by all calls of the same latents at one timestep.

    Guidance may take two calls. The second, of the same latents at the same timestep, merges as the
    first did: pipelines of Qwen-Image, Wan, Chroma and Flux call the model with the prompt, and
    then with the same latents object and the negative prompt. A call whose other tensors are the
    same objects too does not share plans, since it is a repetition, perhaps with other weights.

    Args:
        latents: the model's input. The plans are dropped when it is freed.

    Attributes:
        groups: by layer, number of its call, settings and sizes: for each attention call in it, the
            groups of each grid.
        calls: number of calls of each layer in the current call of the model.
        latents: weak reference to the latents. If they were freed, the call was interrupted, which
            no hook sees, and its plans are void.
        unsettled: True until a layer asks for plans in the current call of the model.
    """

    def __init__(self, latents: Tensor) -> None:
        groups: dict[tuple[Any, ...], dict[int, dict[int, Groups]]] = {}
        self.groups, self.calls = groups, Counter[str]()
        self.latents = weakref.ref(latents, lambda _: groups.clear())
        self.unsettled = True
        self._version = latents._version
        self._others: list[weakref.ref[Tensor]] = []  # the latest call's other tensors
        self._of = self._now = snapshot(None)  # timesteps of the plans and of the current call

    def matches(self, latents: Tensor, others: list[Tensor]) -> bool:
        """Return True if these groups can be reused for a call.

        The latents must be the same object with the same `_version`, and other inputs must differ.
        """
        same = len(others) == len(self._others) and all(
            reference() is other for reference, other in zip(self._others, others, strict=True)
        )
        return self.latents() is latents and self._version == latents._version and not same

    def begin(self, timestep: Any, others: list[Tensor]) -> Plans:
        """Begin a call of the model at a timestep, and return these plans.

        `others` are all tensors of the call except the latents.
        """
        self.calls.clear()
        self.unsettled, self._now = True, snapshot(timestep)
        self._others = [weakref.ref(other) for other in others]
        return self

    def drop_stale(self) -> None:
        """Drop groups of another timestep, before a layer first reads `groups`."""
        if self.groups and not unchanged(self._of, self._now):
            self.groups.clear()
        self.unsettled, self._of = False, self._now


def snapshot(timestep: Any) -> tuple[Any, int]:
    """Return a timestep and its version, the number of changes of the tensor in place."""
    counted = isinstance(timestep, Tensor) and not timestep.is_inference()
    return timestep, timestep._version if counted else 0


def unchanged(before: tuple[Any, int], now: tuple[Any, int]) -> bool:
    """Return True if the timestep of `before` equals that of `now`, and hasn't changed in place.

    Both are results of `snapshot`. If this can't be known, return False.
    """
    (first, version), (second, _) = before, now
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and bool(first == second)
    if snapshot(first) != (first, version) or first.is_inference():
        return False
    if first is second:
        return True
    return first.device == second.device and not first.is_meta and torch.equal(first, second)


class Step(NamedTuple):
    """Settings of merging that follow from the model's call around a layer.

    Attributes:
        draw: LongTensor [1], the index of the random partition.
        draws: LongTensor [DRAWS], the indices for DRAWS consecutive layers. None in a compiled
            graph.
        leader: LongTensor [B], for each sample the sample whose tokens decide what merges
            (`mame_sd.core.guidance`). If None, each sample decides for itself.
        plans: groups of an earlier call of the same input, which merge again in this call. If None,
            this call stands alone.
    """

    draw: Tensor | None = None
    draws: Tensor | None = None
    leader: Tensor | None = None
    plans: Plans | None = None


NO_STEP = Step()  # for layers of models without a step


@dataclass(frozen=True, eq=False)
class ResolvedConfig:
    """Settings, completed for a model, and whether they are active.

    Attributes:
        config: the settings.
        active: if False, nothing merges.
        asked: the settings as given, before settings saved with the model's weights filled in the
            fields that were left out.
        of_layer: settings of self-attentions that have their own, by name. None if one is not
            merged.
        methods: the methods by which layers merge.
    """

    config: MaMeConfig
    active: bool
    asked: MaMeConfig
    of_layer: Mapping[str, MaMeConfig | None] = field(default_factory=dict)
    methods: frozenset[Method] = field(init=False)

    def __post_init__(self) -> None:
        every = (self.config, *self.of_layer.values())
        object.__setattr__(self, "methods", frozenset(one.method for one in every if one))


class HandleState:
    """State that a handle and its hooks share: live settings, and the step of the model's call.

    Attributes:
        setting: the setting of all tasks without a setting of their own.
        own: for each task the ResolvedConfigs of its open `using` blocks.
        estimating: for each task the names of the layers that have estimated their errors in its
            open `estimating_errors` block. None outside such a block.
        step: for each thread the Step or LazyStep of its latest call of the model.
        learning: checks calls with gradients.
        kernel: computes attention over merged keys instead of the model's own kernel.
        restores_blocks: True once the hooks that restore blocks are on the model.
    """

    restores_blocks = False

    def __init__(self, setting: ResolvedConfig, kernel: KernelAdapter | None = None) -> None:
        self.setting = setting
        self.kernel = kernel
        self.own = Nested()
        self.estimating = PerTask()
        self.step = PerThread()
        self.learning = CheckpointGuard()

    @property
    def now(self) -> ResolvedConfig:
        """Return the setting in force in this task."""
        setting: ResolvedConfig = self.own.innermost(self.setting)
        return setting

    def using(self, setting: ResolvedConfig) -> AbstractContextManager[None]:
        """Use a setting in this task alone, for a `with` block."""
        return self.own.using(setting)


class LazyStep:
    """A step that is computed when a layer first asks for it.

    If no layer merges, nothing is computed.

    Args:
        make: returns the step of a call with these latents.
        latents: the call's latents, held weakly. A call that Ctrl-C ends is not reported to any
            hook. Other threads regard it as running as long as its latents exist (`threads.begin`).
        plans: groups that the call shares with earlier calls, while it runs.
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
        """Return the step. It is computed once."""
        if self.made is None:
            self.made = self._make(None if self._latents is None else self._latents())
        return self.made


class CheckpointGuard:
    """Check that a block that is recomputed for gradients finds the timestep of its own call.

    Blocks are recomputed under a checkpoint that the user put around them.
    """

    def __init__(self) -> None:
        self._first: tuple[Any, int] | None = None  # first timestep since a backward pass
        self._moved = self._over = False

    def begin(self, timestep: Any) -> None:
        """Begin a call of the model at a timestep."""
        if torch.is_grad_enabled() and (self._first is None or self._over):
            self._first, self._moved, self._over = snapshot(timestep), False, False
        elif self._first is not None and not self._moved:
            self._moved = not unchanged(self._first, snapshot(timestep))

    def again(self) -> None:
        """Check a block that is recomputed.

        Raises:
            RuntimeError: the model was called at another timestep in between.
        """
        self._over = True
        if self._moved:
            raise RuntimeError(
                "expected a checkpointed block to be computed again before the model's next"
                " timestep, whose partition it would take: call enable_gradient_checkpointing, or"
                " give redraw=False, share_guidance_plan=False"
            )
