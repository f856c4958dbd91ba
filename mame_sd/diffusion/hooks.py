"""The hook that merges around a layer, and what it shares with those that read a model's calls.

The latter are in `model_hooks.py`. The hooks share the settings, the step, and plans that two calls
of one input share.

Guidance may take two calls: the second, of the same latents at the same timestep, merges by the
plans of the first. What a batch of both is to `mame_sd.core.pairs`. Pipelines of Qwen-Image, Wan,
Chroma and Flux call the model with the prompt and then, with the very same tensor, with the
negative prompt. A call with all the same tensors is none of these: it is repeated, with other
weights perhaps.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from diffusers.hooks import ModelHook
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.cells import DRAWS
from mame_sd.core.groups import Groups
from mame_sd.diffusion.layer import NO_STEP, Layer, Step, Tokens, merged_call
from mame_sd.diffusion.threads import PerThread
from mame_sd.report import LayerStats

LEFT = "left unmerged by layers"


class Setting:
    """Settings, and whether they merge.

    Attributes:
        config: the settings.
        asked: as they were given, before the model's family decided on what they leave open.
        active: whether they merge.
        of_layer: by name those of self-attentions that have their own; None where one is left
            alone.
    """

    def __init__(
        self,
        config: MaMeConfig,
        active: bool,
        asked: MaMeConfig | None = None,
        layers: Iterable[str] = (),
    ) -> None:
        self.config = config
        self.asked = config if asked is None else asked
        self.active = active
        self.of_layer = (
            {} if config.layers is None else {name: config.of_layer(name) for name in layers}
        )


class Shared:
    """What a handle and its hooks share: the live settings, whether merging is on, and what the
    model's call says of merging.

    Attributes:
        setting: every thread's, but for those that have one of their own.
        own: each thread's own Setting.
        step: the Step of its latest call of the model.
        plans: what the call under way shares with those before it.
        learning: what is known of calls with gradients.
        applied: is told whether the hooks that merge are put on the model or taken off.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.own = PerThread()
        self.step = PerThread(latest=True)
        self.plans = PerThread()
        self.learning = Learning()
        self.applied: Callable[[bool], None] | None = None

    @property
    def now(self) -> Setting:
        """The setting in force in this thread."""
        return self.own.value or self.setting


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
        if self._found and self._of is not self._now and not _same(self._of, self._now):
            self._found.clear()
        self._of = self._now
        self._calls[layer, number] += 1  # attention may run sample by sample
        key = layer, number, self._calls[layer, number], config, shape
        found = self._found.get(key)
        if found is None:
            found = make()
            self._found[key] = found.alone()
        return found


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


class Learning:
    """Whether a block that is computed again for gradients (a checkpoint that somebody put around
    it) finds the timestep of its own call.
    """

    def __init__(self) -> None:
        self._first: tuple[Any, int] | None = None  # timestep of the first call since a backward
        self._moved = self._over = False

    def begin(self, timestep: Any) -> None:
        """To be called at the start of each call of the model."""
        if torch.is_grad_enabled() and (self._first is None or self._over):
            self._first, self._moved, self._over = _noted(timestep), False, False
        elif self._first is not None and not self._moved:
            self._moved = not _same(self._first, _noted(timestep))

    def again(self) -> None:
        """Raises RuntimeError where a call at another timestep came since."""
        self._over = True
        if self._moved:
            raise RuntimeError(
                "expected a checkpointed block to be computed again before the model's next"
                " timestep, whose partition it would take: call enable_gradient_checkpointing, or"
                " give redraw=False, share_guidance_plan=False"
            )


class Entry:
    """Replaces the `forward` that diffusers' registry gives a module with a MergeHook.

    diffusers binds a function of its own to each module. With it, a deepcopy would run the
    original's weights. `torch.compile` would also compile each repeated block by itself
    (`compile_repeated_blocks`). A method is one function for all of them.
    """

    def __init__(self, module: nn.Module, hook: MergeHook) -> None:
        self.module = module
        self.hook: MergeHook | None = hook
        self.passed: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        if self.hook is None:
            return self.passed(*args, **kwargs)
        return self.hook.around(self.module, self.hook.fn_ref.forward, *args, **kwargs)

    def pass_through(self) -> None:
        """Merges no more, but stays callable: a wrapper by hand may hold this method."""
        assert self.hook is not None
        self.passed = self.hook.fn_ref.forward
        self.hook = None


class MergeHook(ModelHook):
    """Merges around one layer, also in deepcopies of the module.

    The registry keeps the module's own forward in
    `fn_ref.forward`.

    Args:
        shared: what the hooks of a handle share.
        stats: counters of the layer.
        layer: the kind of module.
        known: how the tokens lie in each thread's latest call of the model; None: unknown.
        number: of the layer in its model, from 0. Neighbours take different draws in one step, so
            that their errors do not add up.
    """

    name = "mame"
    fn_ref: Any
    entry: Any = None  # the module's `forward` just after the hook was put on, an Entry's

    def __init__(
        self,
        shared: Shared,
        stats: LayerStats,
        layer: Layer,
        known: PerThread | None,
        number: int = 0,
    ) -> None:
        super().__init__()
        self.place = number % DRAWS
        # Of no dimension: for any device, and no constant of a compiled graph.
        self.number = torch.tensor(number)
        self.shared = shared
        self.stats = stats
        self.layer = layer
        self.known = known

    def around(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """The output of the module, whose own forward is `forward`, merged where that is sound."""
        shared, stats = self.shared, self.stats
        setting: Setting = getattr(shared.own.mine, "value", None) or shared.setting
        if not setting.active:
            return forward(*args, **kwargs)
        config: MaMeConfig | None = setting.config
        call = self.layer.call(module, forward, args, kwargs)
        known, step = self.told()
        if setting.of_layer:  # a name would be a constant of each compiled block
            config = setting.of_layer.get(stats.name, config)
        if config is None:
            stats.skipped(LEFT, self.layer.count(call, known))
            return call.run()
        return merged_call(self.layer, call, known, config, stats, step)

    def told(self) -> tuple[Tokens | None, Step]:
        """What this thread's latest call of the model says: how the tokens lie, and of the step.

        A call gives the same with gradients as without them, but for plans, which it shares with
        none. Where the model checkpoints gradients there is no step: a block that is computed
        again merges as before, whatever has run since (`StepHook`).

        Raises RuntimeError in a block that is computed again after a call at another timestep.
        """
        shared, noted = self.shared, self.known
        known = None if noted is None else getattr(noted.mine, "value", noted.latest)
        step: Step | None = getattr(shared.step.mine, "value", shared.step.latest)
        if step is None or step is NO_STEP:
            return known, NO_STEP
        learns = torch.is_grad_enabled()
        if torch.compiler.is_compiling():  # a number would be a constant of the graph
            draw = None if step.draw is None else (step.draw + self.number) % DRAWS
            return known, Step(draw, leader=step.leader)  # a graph holds no plans
        draw = None if step.draws is None else step.draws[self.place : self.place + 1]
        if learns and torch._C._current_graph_task_id() >= 0:  # in a backward pass
            shared.learning.again()
        plans = None if learns else getattr(shared.plans.mine, "value", None)
        return known, Step(draw, leader=step.leader, plans=plans)

    def put(self, module: nn.Module) -> Any:
        """Is told that it was put on `module`, whose `forward` is now what it gives."""
        if self.shared.applied is not None:
            self.shared.applied(True)
        self.entry = Entry(module, self).forward
        return self.entry

    def let_go(self) -> None:
        """Holds on to nothing of the module any more: it was taken off."""
        self.fn_ref = self.entry = None
        if self.shared.applied is not None:
            self.shared.applied(False)
