"""The three hooks that `apply_mame` puts on a model: one merges around a layer, one reads how the
tokens lie, one the step.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.config import PARTS, MaMeConfig
from mame_sd.core.pairs import leaders
from mame_sd.core.partition import DRAWS, constant, counting, draw_at
from mame_sd.diffusion.calls import LatestCall
from mame_sd.diffusion.hook_registry import AroundHook, CallHook, PreHook
from mame_sd.diffusion.layer import NO_STEP, Layer, Step, merged_call
from mame_sd.diffusion.threads import PerThread, begin, end
from mame_sd.diffusion.tokens import Call, Tokens
from mame_sd.diffusion.worth import leaves_open
from mame_sd.report import NOTHING_MERGES, LayerStats

LEFT = "left unmerged by layers"
# Models whose pipelines put the prompt before the negative one in a batch.
_PROMPT_FIRST = {"DiTTransformer2DModel", "LuminaNextDiT2DModel"}


TokensOf = Callable[[Any, Call], Tokens | str | None]
_TIMESTEP = (
    "timestep",
    "timesteps",
    "t",
    "timestep_ratio",
    "vision_timesteps",
)  # what models call it


class Setting:
    """Settings, and whether they merge.

    Attributes:
        config: the settings.
        asked: as they were given, before the model's family decided on what they leave open.
        active: whether they merge.
        of_part: the settings for "attention" and "mlp"; None where that is off.
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
        self.may_leave = leaves_open(self.asked)
        self.of_part = {"attention": config, **{name: config.of_part(name) for name in PARTS}}
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
        applied: is told whether the hooks that merge are put on the model or taken off.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.own = PerThread()
        self.step = PerThread(latest=True)
        self.plans = PerThread()
        self.applied: Callable[[bool], None] | None = None

    @property
    def now(self) -> Setting:
        """The setting in force in this thread."""
        return self.own.value or self.setting


class MergeHook(AroundHook):
    """Merges around one layer, while the settings in force merge what it computes (`stats.part`).

    `number` counts a model's layers from 0: in one step neighbours take different draws, so that
    their errors do not add up.
    """

    name = "mame"

    def __init__(
        self,
        shared: Shared,
        stats: LayerStats,
        layer: Layer,
        image: SizeHook | None,
        number: int = 0,
    ) -> None:
        super().__init__()
        self.place = number % DRAWS
        self.number = torch.tensor(
            number
        )  # of no dimension: for any device, and no constant of a compiled graph
        self.shared = shared
        self.stats = stats
        self.layer = layer
        self.image = image

    @property
    def on(self) -> bool:
        """Whether the settings in force merge this layer."""
        return self.shared.now.of_part[self.stats.part] is not None

    def around(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's output, merged where that is sound."""
        shared, stats = self.shared, self.stats
        setting: Setting = shared.own.value or shared.setting
        config = setting.of_part[stats.part]
        if config is None or not setting.active:
            return forward(*args, **kwargs)
        call = self.layer.call(module, forward, args, kwargs)
        known, step = self.told()
        if setting.of_layer:  # a name would be a constant of each compiled block
            config = setting.of_layer.get(stats.name, config)
        if config is None:
            stats.skipped(LEFT, self.layer.count(call, known))
            return call.run()
        return merged_call(self.layer, call, known, config, stats, step, setting.may_leave)

    def put(self) -> None:
        """See `AroundHook`."""
        if self.shared.applied is not None:
            self.shared.applied(True)

    def let_go(self) -> None:
        """See `AroundHook`."""
        super().let_go()
        if self.shared.applied is not None:
            self.shared.applied(False)

    def told(self) -> tuple[Tokens | None, Step]:
        """What this thread's latest call of the model says: how the tokens lie, and of the step.

        Nothing of the step where gradients are on: a block that is computed again for them
            (checkpointing) merges as before,
        whatever has run since, and no sample's timestep decides on its neighbours in a training
        batch.
        """
        known = None if self.image is None else self.image.tokens.value
        step: Step = (None if torch.is_grad_enabled() else self.shared.step.value) or NO_STEP
        if step is NO_STEP:
            return known, step
        if (
            torch.compiler.is_compiling()
        ):  # a number would be a constant of the graph, which holds no plans
            draw = None if step.draw is None else step.draw + self.number
            return known, Step(draw, leader=step.leader)
        draw = None if step.draws is None else step.draws[self.place : self.place + 1]
        return known, Step(draw, leader=step.leader, plans=self.shared.plans.value)


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
    """Notes what the latest forward of a denoiser says: its timestep, which draw of the random
    partitions it takes; its first input, the latents, whether guided and unguided samples stand in
    it, or it is the second call of two of the same input.

    So the same call gives the same result, whatever ran before it with other latents, and neither
    sampler nor pipeline needs to be known.
    """

    name = "mame_step"

    def __init__(self, module: nn.Module, shared: Shared) -> None:
        self.names = _names(module)
        self.shared = shared
        self.latest = LatestCall()
        self.watched: list[LayerStats] = []  # layers whose first forward has not been looked at
        # a ControlNet is called with the same latents for each control image
        self.calls_pair = "ControlNet" not in type(module).__name__

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = {**dict(zip(self.names, args, strict=False)), **kwargs}
        setting, timestep = (
            self.shared.now,
            next((call[name] for name in _TIMESTEP if call.get(name) is not None), None),
        )
        parts = call.get(self.names[0])
        if isinstance(parts, list) and all(isinstance(part, Tensor) for part in parts):
            alike = len({part.shape for part in parts}) == 1
            call[self.names[0]] = (
                torch.stack(parts) if alike else parts
            )  # Z-Image: a latent for each sample
        inputs = [
            value
            for name in self.names
            if isinstance(value := call.get(name), Tensor) and value.dim() > 1
        ]
        draw = draw_at(timestep) if timestep is not None and setting.config.redraw else None
        if inputs and draw is not None:
            draw = draw.to(inputs[0].device)
        pairs = setting.config.pairs and bool(inputs) and inputs[0] is call.get(self.names[0])
        leader = leaders(inputs[0], type(module).__name__ in _PROMPT_FIRST) if pairs else None
        compiling = torch.compiler.is_compiling()
        draws = None if compiling or draw is None else draw + constant(counting, DRAWS, draw.device)
        self.shared.step.value = Step(draw, draws, leader)
        if compiling:  # a graph holds no plans
            return
        if inputs:
            begin(module, self.name, inputs[0])
        if pairs and self.calls_pair:
            apart = {self.names[0], *_TIMESTEP}
            others = [
                value
                for name, value in call.items()
                if isinstance(value, Tensor) and name not in apart
            ]
            self.shared.plans.value = self.latest.plans(inputs[0], timestep, others)
        else:
            self.latest.forget()

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Blocks that are called by themselves share nothing.

        Warns once where the first forward merges nothing.
        """
        if not torch.compiler.is_compiling():
            end(module, self.name)
            self.shared.plans.value = None
            watched, self.watched = self.watched, []
            called = [stats for stats in watched if stats.calls]
            if called and self.shared.now.active and all(stats.last_reason for stats in called):
                largest = max(stats.tokens_in // stats.calls for stats in called)
                warnings.warn(
                    f"{NOTHING_MERGES}: each of {len(called)} was left alone, and the largest has"
                    f" {largest} tokens; report() says why. Lower min_tokens or generate larger"
                    " images",
                    stacklevel=2,
                )

    def forget(self) -> None:
        """Lets go of this thread's plans."""
        self.latest.forget()
        self.shared.plans.value = None


def takes_timestep(module: nn.Module) -> bool:
    """Whether the module is called with a timestep, as denoisers are."""
    try:
        return not set(_TIMESTEP).isdisjoint(_names(module))
    except (AttributeError, TypeError, ValueError):  # scripted or built-in: no signature
        return False


def _names(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]
