"""The hooks that read a denoiser's calls for the layers in it.

They read how the tokens lie, which step it is, and whether the call is the second of two of the
same input.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.core.draws import DRAWS, constant, counting, draw_at
from mame_sd.core.pairs import leaders
from mame_sd.diffusion.families.unet import IMAGE_MODULES
from mame_sd.diffusion.hook_registry import CallHook, PreHook
from mame_sd.diffusion.hooks import Later, Shared
from mame_sd.diffusion.interception import watch_kernels
from mame_sd.diffusion.layer import NO_STEP, Call, Step, Tokens
from mame_sd.diffusion.plans import Plans
from mame_sd.diffusion.threads import PerThread, begin, end
from mame_sd.report import NEVER_CALLED, NOTHING_MERGES, TOO_FEW, LayerStats

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

SPREAD = (
    "{} is spread over devices by enable_parallelism (Ulysses, ring or tensor parallel), where"
    " merging has no plan for all tokens: call remove_mame, or leave the model on one device"
)


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
        self.latest = LatestCall()
        self.layers: list[LayerStats] = []  # of this model
        self.step = False  # that nothing merges, since something did
        # a ControlNet is called with the same latents for each control image
        self.calls_pair = "ControlNet" not in type(module).__name__
        # A UNet of images makes samples of a video's frames, as many at once as it likes.
        self.by_frame = any(type(part).__name__ in IMAGE_MODULES for part in module.modules())

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises RuntimeError in a model whose tokens are spread over several devices."""
        watch_kernels()
        call = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if self.shared.now.active and spread(module):
            raise RuntimeError(SPREAD.format(type(module).__name__))
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
        compiling = torch.compiler.is_compiling()
        keys = setting.config.method == "keys"  # whole tokens are drawn once
        redraws = setting.config.redraw and keys
        pairs = (
            setting.config.share_guidance_plan
            and keys
            and bool(inputs)
            and inputs[0] is call.get(self.names[0])
        )
        prompt_first = type(module).__name__ in _PROMPT_FIRST
        frames = self.by_frame and bool(inputs) and inputs[0].dim() == 5
        leads = pairs and not frames
        first = inputs[0] if inputs else None

        def step(first: Tensor | None) -> Step:
            draw = draws = None
            if timestep is not None and redraws:
                draw = draw_at(timestep)
                draw = draw if first is None else draw.to(first.device)
                if not compiling:
                    draws = (draw + constant(counting, DRAWS, draw.device)) % DRAWS
            leader = leaders(first, prompt_first) if leads and first is not None else None
            return Step(draw, draws, leader)

        again = _checkpoints(module)
        at_once = compiling or isinstance(parts, list)  # whose stack nobody else holds
        made = NO_STEP if again else step(first) if at_once else Later(step, first)
        self.shared.step.value = made
        if not compiling:
            self.shared.learning.begin(timestep)
        if compiling:  # a graph holds no plans
            return
        if inputs:
            begin(module, self.name, inputs[0])
        if pairs and self.calls_pair and not again:
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
                if self.step:
                    self.step = False
                return
        called = [stats for stats in self.layers if stats.last_reason != NEVER_CALLED]
        if called and not self.step:
            if not torch.compiler.is_compiling():  # which happens once
                self.step = True
            _warn(
                type(module).__name__,
                f"{NOTHING_MERGES}: each of {len(called)} was left alone, and {_why(called)}",
            )

    def forget(self) -> None:
        """Lets go of this thread's plans."""
        self.latest.forget()
        self.shared.plans.value = None


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
