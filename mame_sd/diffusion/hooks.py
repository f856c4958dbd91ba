"""The hook that merges around a layer, and what it shares with those that read a model's calls.

The latter are in `model_hooks.py`. The hooks share the settings, the step, and plans that two calls
of one input share (`plans.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from diffusers.hooks import ModelHook
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.cells import DRAWS
from mame_sd.diffusion.interception import watch_kernels
from mame_sd.diffusion.layer import NO_STEP, AttentionAdapter, Step, Tokens, merged_call
from mame_sd.diffusion.plans import noted, same
from mame_sd.diffusion.threads import PerThread
from mame_sd.report import LayerStats

LEFT = "left unmerged by layers"


class ResolvedConfig:
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
        own: each thread's own ResolvedConfig.
        step: the Step of its latest call of the model, or a Later one.
        plans: what the call under way shares with those before it.
        learning: what is known of calls with gradients.
        applied: is told whether the hooks that merge are put on the model or taken off.
    """

    def __init__(self, setting: ResolvedConfig) -> None:
        self.setting = setting
        self.own = PerThread()
        self.step = PerThread(latest=True)
        self.plans = PerThread()
        self.learning = Learning()
        self.applied: Callable[[bool], None] | None = None

    @property
    def now(self) -> ResolvedConfig:
        """The setting in force in this thread."""
        return self.own.value or self.setting


class Later:
    """A step that is worked out when a layer first asks for it: where none merges, nothing is.

    Args:
        make: gives the step of a call with these latents.
        latents: the call's. They are held weakly: of a call that a Ctrl-C ends no hook is told, and
            it is under way for other threads as long as its latents are there (`threads.begin`).
    """

    def __init__(self, make: Callable[[Tensor | None], Step], latents: Tensor | None) -> None:
        self._make: Callable[[Tensor | None], Step] | None = make
        self._latents = None if latents is None else weakref.ref(latents)
        self._made = NO_STEP

    def step(self) -> Step:
        """The step."""
        make = self._make  # another thread may let go of it meanwhile
        if make is not None:
            latents = None if self._latents is None else self._latents()
            self._made, self._make = make(latents), None
        return self._made

    def let_go(self) -> None:
        """Holds on to nothing of the call any more: it is over."""
        self._make = None


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
        layer: AttentionAdapter,
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
        setting: ResolvedConfig = getattr(shared.own.mine, "value", None) or shared.setting
        if not setting.active:
            return forward(*args, **kwargs)
        config: MaMeConfig | None = setting.config
        call = self.layer.call(module, forward, args, kwargs)
        if setting.of_layer:  # a name would be a constant of each compiled block
            config = setting.of_layer.get(stats.name, config)
        if config is None:
            stats.skipped(LEFT, self.layer.count(call, self.layout()))
            return call.run()
        return merged_call(self.layer, call, self.layout(), config, stats, self.step)

    def layout(self) -> Tokens | None:
        """How the tokens lie in this thread's latest call of the model; None: unknown."""
        known = self.known
        return None if known is None else getattr(known.mine, "value", known.latest)

    def step(self) -> Step:
        """What this thread's latest call of the model says of the step.

        A call gives the same with gradients as without them, but for plans, which it shares with
        none. Where the model checkpoints gradients there is no step: a block that is computed
        again merges as before, whatever has run since (`StepHook`).

        Raises RuntimeError in a block that is computed again after a call at another timestep.
        """
        shared = self.shared
        step: Step | Later | None = getattr(shared.step.mine, "value", shared.step.latest)
        if isinstance(step, Later):
            step = step.step()
        if step is None or step is NO_STEP:
            return NO_STEP
        learns = torch.is_grad_enabled()
        if torch.compiler.is_compiling():  # a number would be a constant of the graph
            draw = None if step.draw is None else (step.draw + self.number) % DRAWS
            return Step(draw, leader=step.leader)  # a graph holds no plans
        draw = None if step.draws is None else step.draws[self.place : self.place + 1]
        if learns and torch._C._current_graph_task_id() >= 0:  # in a backward pass
            shared.learning.again()
        plans = None if learns else getattr(shared.plans.mine, "value", None)
        return Step(draw, leader=step.leader, plans=plans)

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


watch_kernels()  # here too, for models that were saved whole, merging included
