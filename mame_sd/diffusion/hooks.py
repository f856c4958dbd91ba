"""The hooks that merging puts on a model's modules, and what they share.

A `MergeHook` merges around a layer. A `StepHook` and `SizeHook`s read the calls of the model around
it: which step it is, whether the call is the second of two of the same input, how the tokens lie.
How hooks come on and off modules is `hook_registry.py`.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from diffusers.hooks import ModelHook
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.attention import OwnKernel
from mame_sd.core.draws import DRAWS, constant, counting, draw_at
from mame_sd.core.pairs import leaders
from mame_sd.diffusion.families.unet import IMAGE_MODULES
from mame_sd.diffusion.hook_registry import CallHook, PreHook
from mame_sd.diffusion.interception import watch_kernels
from mame_sd.diffusion.layer import (
    NO_STEP,
    AttentionAdapter,
    Call,
    LayerCall,
    Step,
    Tokens,
    merged_call,
)
from mame_sd.diffusion.plans import Plans, noted, same
from mame_sd.diffusion.threads import PerThread, begin, end
from mame_sd.report import NEVER_CALLED, NOTHING_MERGES, TOO_FEW, LayerStats

LEFT = "left unmerged by layers"
TokensOf = Callable[[Any, Call], Tokens | str | None]
# Models whose pipelines put the prompt before the negative one in a batch.
_PROMPT_FIRST = {"DiTTransformer2DModel", "LuminaNextDiT2DModel"}
# What models call it.
_TIMESTEP = ("timestep", "timesteps", "t", "timestep_ratio", "vision_timesteps")
SPREAD = (
    "{} is spread over devices by enable_parallelism (Ulysses, ring or tensor parallel), where"
    " merging has no plan for all tokens: call remove_mame, or leave the model on one device"
)


class ResolvedConfig:
    """Settings, and whether they merge.

    Attributes:
        config: the settings.
        asked: as they were given, before those beside the model's weights filled what they leave
            open.
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
    """What a handle and its hooks share: the live settings, and what the model's call says of
    merging.

    Attributes:
        setting: every thread's, but for those that have one of their own.
        own: each thread's own ResolvedConfig.
        step: the Step of its latest call of the model, or a Later one.
        plans: what the call under way shares with those before it.
        learning: what is known of calls with gradients.
        kernel: computes attention over merged keys instead of the model's own.
    """

    def __init__(self, setting: ResolvedConfig, kernel: OwnKernel | None = None) -> None:
        self.setting = setting
        self.kernel = kernel
        self.own = PerThread()
        self.step = PerThread(latest=True)
        self.plans = PerThread()
        self.learning = Learning()

    @property
    def now(self) -> ResolvedConfig:
        """The setting in force in this thread."""
        return self.own.value or self.setting


class Later:
    """A step that is worked out when a layer first asks for it: where none merges, nothing is
    launched.

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

    The registry keeps the module's own forward in `fn_ref.forward`.

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
    instead: Callable[[LayerCall], Any] | None = None  # computes calls while calibration measures

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
        if self.instead is not None:
            return self.instead(self.layer.call(module, forward, args, kwargs))
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
        return merged_call(self.layer, call, self.layout(), config, stats, self.step, shared.kernel)

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
        step = step.step() if isinstance(step, Later) else step
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
        self.entry = Entry(module, self).forward
        return self.entry

    def let_go(self) -> None:
        """Holds on to nothing of the module any more: it was taken off."""
        self.fn_ref = self.entry = None


class SizeHook(PreHook):
    """Notes how the tokens lie in a forward of the model, or part of it, around merging layers."""

    name = "mame_size"

    def __init__(self, module: nn.Module, shared: Shared, tokens_of: TokensOf) -> None:
        self.names = _names(module)
        self.shared = shared
        self.tokens_of = tokens_of
        self.tokens = PerThread(latest=True)  # how they lie in its latest forward

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises ValueError beside tomesd's patch."""
        for block in getattr(module, "transformer_blocks", ()):
            if type(block).__name__ == "ToMeBlock":
                raise ValueError(
                    "expected blocks whose tokens are not merged yet, found tomesd's patch: call "
                    "tomesd.remove_patch(pipe), or remove_mame(pipe) to merge by tomesd alone"
                )
        if self.shared.now.active:
            self.read(module, {**dict(zip(self.names, args, strict=False)), **kwargs})

    def read(self, module: nn.Module, call: Call) -> None:
        """Notes how they lie in a call of the module."""
        found = self.tokens_of(module, call)
        self.tokens.value = Tokens((0,), unknown=found) if isinstance(found, str) else found


class EagerSizeHook(SizeHook):
    """A SizeHook that runs outside of compiled graphs, since it reads values of tensors.

    In an export, whose tensors have none, tokens lie as in the latest forward.
    """

    __call__ = torch.compiler.disable(SizeHook.__call__)

    def __init__(self, module: nn.Module, shared: Shared, tokens_of: TokensOf) -> None:
        super().__init__(module, shared, tokens_of)
        self._shapes = PerThread(latest=True)  # of the latest forward's arguments

    def read(self, module: nn.Module, call: Call) -> None:
        """Raises ValueError in an export of other shapes than the latest forward's."""
        shapes = {
            name: tuple(value.shape) for name, value in call.items() if isinstance(value, Tensor)
        }
        if not torch.compiler.is_exporting():
            super().read(module, call)
            self._shapes.value = shapes
        elif shapes != self._shapes.value:
            raise ValueError(
                f"expected a forward of {type(module).__name__} with the same shapes before the"
                f" export, which can't read how its tokens lie, got {self._shapes.value}: run the"
                " model once on what you export it with"
            )


class StepHook(CallHook):
    """Notes the timestep and the latents of a denoiser's latest forward.

    The timestep chooses the draw of the random partitions. The latents tell whether a batch holds
    guided and unguided samples, or whether this is the second of two calls of the same input. So
    the same call gives the same result whatever ran before, under any sampler and pipeline, with
    gradients or without.

    In a model that checkpoints gradients no step is noted while it learns: its blocks are computed
    again later, when it may be at another.
    """

    name = "mame_step"

    def __init__(self, module: nn.Module, shared: Shared) -> None:
        self.names = _names(module)
        self.shared = shared
        self.latest = PerThread()  # each thread's Plans
        self.layers: list[LayerStats] = []  # of this model
        self.warned = False  # that nothing merges, since something did
        # a ControlNet is called with the same latents for each control image
        self.calls_pair = "ControlNet" not in type(module).__name__
        # A UNet of images makes samples of a video's frames, as many at once as it likes.
        self.by_frame = any(type(part).__name__ in IMAGE_MODULES for part in module.modules())

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises RuntimeError in a model whose tokens are spread over several devices."""
        watch_kernels()
        setting, compiling = self.shared.now, torch.compiler.is_compiling()
        call = {**dict(zip(self.names, args, strict=False)), **kwargs}
        first = call.get(self.names[0])
        tensors = [t for t in map(_last_tensor, map(call.get, self.names)) if t is not None]
        if tensors and not compiling:
            begin(module, self.name, tensors[0])
        if not setting.active:
            return
        if spread(module):
            raise RuntimeError(SPREAD.format(type(module).__name__))
        timestep = next((call[name] for name in _TIMESTEP if call.get(name) is not None), None)
        again = _checkpoints(module)
        keys = setting.config.method == "keys"  # whole tokens are drawn once
        latents = _latents(first) if setting.config.share_guidance_plan and keys else None
        device = tensors[0].device if tensors else None
        drawn_by = timestep if setting.config.redraw and keys else None
        of_frames = self.by_frame and latents is not None and latents.dim() == 5
        prompt_first = type(module).__name__ in _PROMPT_FIRST

        def made(latents: Tensor | None) -> Step:
            draw = draws = leader = None
            if drawn_by is not None:
                draw = draw_at(drawn_by)
                draw = draw if device is None else draw.to(device)
                if not compiling:
                    draws = (draw + constant(counting, DRAWS, draw.device)) % DRAWS
            if latents is not None and not of_frames:
                leader = leaders(latents, prompt_first)
            return Step(draw, draws, leader)

        at_once = compiling or latents is not first  # a stack that nobody else holds
        step = NO_STEP if again else made(latents) if at_once else Later(made, latents)
        self.shared.step.value = step
        if compiling:  # a graph holds no plans
            return
        self.shared.learning.begin(timestep)
        if latents is first and latents is not None and self.calls_pair and not again:
            apart = {self.names[0], *_TIMESTEP}
            others = [v for name, v in call.items() if isinstance(v, Tensor) and name not in apart]
            self.shared.plans.value = self._plans(latents, timestep, others)
        else:
            self.latest.value = None

    def _plans(self, latents: Tensor, timestep: Any, others: list[Tensor]) -> Plans | None:
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
        plans: Plans | None = self.latest.value
        # Changes of tensors of inference mode, and of subclasses, are not counted.
        if type(latents) is not Tensor or latents.is_inference() or _is_recorded(latents):
            plans = self.latest.value = None
        elif plans is None or not plans.go_for(latents, others):
            plans = self.latest.value = Plans(latents)
        return plans if plans is None else plans.begin(timestep, others)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Blocks that are called by themselves share nothing.

        Warns where a forward merges nothing, once until something merges again.
        """
        if not torch.compiler.is_compiling():
            end(module, self.name)
            self.shared.plans.value = None
            if isinstance(step := self.shared.step.value, Later):
                step.let_go()
        if not self.shared.now.active or not self.layers:
            return
        for stats in self.layers:
            if stats.last_reason is None:
                if self.warned:
                    self.warned = False
                return
        called = [stats for stats in self.layers if stats.last_reason != NEVER_CALLED]
        if called and not self.warned:
            if not torch.compiler.is_compiling():  # which happens once
                self.warned = True
            _warn(
                type(module).__name__,
                f"{NOTHING_MERGES}: each of {len(called)} was left alone, and {_why(called)}",
            )

    def forget(self) -> None:
        """Lets go of this thread's plans."""
        self.latest.value = self.shared.plans.value = None


def _last_tensor(value: Any) -> Tensor | None:
    """Tokens or an image, or the last one of nested lists: Z-Image has a latent for each sample."""
    while isinstance(value, list) and value:
        value = value[-1]
    return value if isinstance(value, Tensor) and value.dim() > 1 else None


def _latents(value: Any) -> Tensor | None:
    """A model's first input as one tensor [B, ...], where it is one or a list of equal shapes."""
    if isinstance(value, list) and all(isinstance(part, Tensor) for part in value):
        value = torch.stack(value) if len({part.shape for part in value}) == 1 else None
    return value if isinstance(value, Tensor) and value.dim() > 1 else None


def _is_recorded(t: Tensor) -> bool:
    """Whether a CUDA graph is being captured: a replay has other values, and must look for what
    merges.
    """
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def _why(called: list[LayerStats]) -> str:
    """What to say of layers that were all left alone."""
    few = any((stats.last_reason or "").startswith(TOO_FEW) for stats in called)
    if not few or torch.compiler.is_compiling():  # where counts are tensors
        return "report() says why"
    counts = (stats.totals() for stats in called)
    largest = max(tokens_in // max(calls, 1) for calls, tokens_in, _ in counts)
    return (
        f"the largest has {largest} tokens; report() says why. Lower min_tokens or generate larger"
        " images"
    )


@torch.compiler.assume_constant_result
def _warn(model: str, text: str) -> None:
    """Also while a graph is compiled, which holds no warnings; and of each model, where PyTorch's
    line that calls this hook would be told of once.
    """
    warnings.warn_explicit(text, UserWarning, model, 1)


def spread(module: nn.Module) -> bool:
    """Whether `enable_parallelism` spreads a model of diffusers over several devices."""
    return getattr(module, "_parallel_config", None) is not None


def _checkpoints(module: nn.Module) -> bool:
    """Whether a model learns, and computes blocks again for it."""
    if not (torch.is_grad_enabled() or module.training):
        return False
    return any(getattr(part, "gradient_checkpointing", False) for part in module.modules())


def takes_timestep(module: nn.Module) -> bool:
    """Whether the module is called with a timestep, as denoisers are."""
    try:
        return not set(_TIMESTEP).isdisjoint(_names(module))
    except (AttributeError, TypeError, ValueError):  # scripted or built-in: no signature
        return False


def _names(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


watch_kernels()  # here too, for models that were saved whole, merging included
