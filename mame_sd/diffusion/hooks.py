"""Read a model's calls, and write what layers need to know (`context.py`).

The hook that merges in a layer is `layer.MergeHook`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.compat import names_arguments, outside_old_graphs, parameters_of
from mame_sd.core.cells import DRAWS
from mame_sd.core.groups import cached_tensors
from mame_sd.core.guidance import guidance_leaders, partition_index
from mame_sd.core.min_tokens import BY_DEFAULT
from mame_sd.diffusion.attention_backends import watch_kernels
from mame_sd.diffusion.context import NO_STEP, Call, HandleState, LazyStep, Plans, Step, Tokens
from mame_sd.diffusion.families.family import class_names, is_one_of
from mame_sd.diffusion.families.layouts import IMAGE_MODULES
from mame_sd.diffusion.hook_registry import PreHook
from mame_sd.diffusion.layer import LayerStats
from mame_sd.diffusion.threads import PerTask, PerThread, begin, end
from mame_sd.report import NEVER_CALLED, NOTHING_MERGES, TOO_FEW

TokensOf = Callable[[Any, Call], Tokens | str | None]
# Models whose pipelines put the prompt before the negative one in a batch.
_PROMPT_FIRST = {"DiTTransformer2DModel", "LuminaNextDiT2DModel"}
# Names of the timestep among the arguments of models.
_TIMESTEP = ("timestep", "timesteps", "t", "timestep_ratio", "vision_timesteps")
BY_POSITION = "{}.forward was replaced by one that doesn't name its arguments by position"
SPREAD = (
    "{} is spread over devices by enable_parallelism (Ulysses, ring or tensor parallel), where"
    " merging has no plan for all tokens: call remove_mame, or leave the model on one device"
)


class SizeHook(PreHook):
    """Note the layout of the tokens in a forward of the model, or of a part with merging layers."""

    name = "mame_size"

    def __init__(self, module: nn.Module, shared: HandleState, tokens_of: TokensOf) -> None:
        self.names = _names(module)
        self.named = names_arguments(type(module))
        self.shared = shared
        self.tokens_of = tokens_of
        self.tokens = PerThread()  # each thread's layout in the latest forward

    @outside_old_graphs
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the layout of the tokens before a forward.

        Raises:
            ValueError: a block is patched by tomesd.
        """
        for block in getattr(module, "transformer_blocks", ()):
            if type(block).__name__ == "ToMeBlock":
                raise ValueError(
                    "expected blocks whose tokens are not merged yet, found tomesd's patch: call "
                    "tomesd.remove_patch(pipe), or remove_mame(pipe) to merge by tomesd alone"
                )
        if not self.shared.now.active:
            return
        if args and not self.named:
            self.tokens.value = Tokens((0,), unknown=BY_POSITION.format(type(module).__name__))
        else:
            self.read(module, {**dict(zip(self.names, args, strict=False)), **kwargs})

    def read(self, module: nn.Module, call: Call) -> None:
        """Note the layout of the tokens in a call of the module."""
        tokens = self.tokens_of(module, call)
        times = (call.get(name) for name in _TIMESTEP)
        several = any(isinstance(t, Tensor) and t.dim() > 1 and t.shape[1] > 1 for t in times)
        if several and isinstance(tokens, Tokens):
            tokens = replace(tokens, timesteps=True)
        self.tokens.value = Tokens((0,), unknown=tokens) if isinstance(tokens, str) else tokens


class EagerSizeHook(SizeHook):
    """Note the layout outside of compiled graphs, because values of tensors are read.

    In an export, whose tensors have no values, the layout is that of the latest forward.
    """

    __call__ = torch.compiler.disable(SizeHook.__call__)

    def __init__(self, module: nn.Module, shared: HandleState, tokens_of: TokensOf) -> None:
        super().__init__(module, shared, tokens_of)
        self._shapes = PerThread()  # shapes of the latest forward's arguments

    def read(self, module: nn.Module, call: Call) -> None:
        """Note the layout of the tokens in a call of the module.

        Raises:
            ValueError: in an export, the shapes differ from the latest forward's.
        """
        shapes = {
            name: tuple(value.shape) for name, value in call.items() if isinstance(value, Tensor)
        }
        if not torch.compiler.is_exporting():
            super().read(module, call)
            self._shapes.value = shapes
        elif shapes != self._shapes.value:
            raise ValueError(
                f"expected a forward of {type(module).__name__} with the same shapes before the"
                f" export, which can't read the layout of its tokens, got {self._shapes.value}: run"
                " the model once on what you export it with"
            )


class StepHook(PreHook):
    """Note the timestep and the latents of a denoiser's latest forward.

    The timestep chooses the draw of the random partitions. The latents tell whether a batch holds
    guided and unguided samples, or whether this is the second of two calls of the same input. So a
    call gives the same result whatever ran before, under any sampler and pipeline, with gradients
    or without.

    In a model that checkpoints gradients no step is noted during training: its blocks are
    recomputed later, when the model may be at another step.
    """

    name = "mame_step"

    def __init__(self, module: nn.Module, shared: HandleState) -> None:
        self.names = _names(module)
        self.shared = shared
        self.latest = PerTask()  # Plans of each task
        self.layers: list[LayerStats] = []  # counters of this model's layers
        self.warned = False  # True if a warning was given since something last merged
        # A ControlNet is called with the same latents for each control image.
        self.calls_pair = not any("ControlNet" in name for name in class_names(module))
        # An image UNet turns a video's frames into samples, in chunks of any size. A leader for
        # each sample of the model's batch would not fit them.
        self.by_frame = any(is_one_of(part, IMAGE_MODULES) for part in module.modules())
        self.prompt_first = is_one_of(module, _PROMPT_FIRST)

    @outside_old_graphs
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the step before a forward.

        Raises:
            RuntimeError: the model's tokens are spread over several devices.
        """
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
        keys = "keys" in setting.methods  # partitions of whole tokens don't change by step
        latents = _latents(first) if setting.config.share_guidance_plan and keys else None
        device = tensors[0].device if tensors else None
        drawn_by = timestep if setting.config.redraw and keys else None
        of_frames = self.by_frame and latents is not None and latents.dim() == 5
        prompt_first = self.prompt_first

        def made(latents: Tensor | None) -> Step:
            draw = draws = leader = None
            if drawn_by is not None:
                draw = partition_index(drawn_by)
                draw = draw if device is None else draw.to(device)
                if not compiling:
                    draws = (draw + cached_tensors(_counting, DRAWS, draw.device)) % DRAWS
            if latents is not None and not of_frames:
                leader = guidance_leaders(latents, (False, True) if prompt_first else (True, False))
            return Step(draw, draws, leader)

        plans: Plans | None = None
        if not compiling:  # graphs can't hold plans
            self.shared.learning.begin(timestep)
            if latents is first and latents is not None and self.calls_pair and not again:
                apart = {self.names[0], *_TIMESTEP}
                others = [
                    v for name, v in call.items() if isinstance(v, Tensor) and name not in apart
                ]
                plans = self._plans(latents, timestep, others)
            else:
                self.latest.value = None
        at_once = compiling or latents is not first  # only this call holds the stacked latents
        self.shared.step.value = (
            NO_STEP if again else made(latents) if at_once else LazyStep(made, latents, plans)
        )

    def _plans(self, latents: Tensor, timestep: Any, others: list[Tensor]) -> Plans | None:
        """Return the plans that a call shares with earlier ones, or None if these are unknown.

        Latents are the same if they are the same unchanged object: values are not compared. If
        timesteps are different tensors, their values are compared when a second call has plans to
        share, which waits for the device. `others` are the call's other tensors.
        """
        plans: Plans | None = self.latest.value
        # PyTorch does not count changes of inference tensors and of subclasses.
        if type(latents) is not Tensor or latents.is_inference() or _is_recorded(latents):
            plans = self.latest.value = None
        elif plans is None or not plans.matches(latents, others):
            plans = self.latest.value = Plans(latents)
        return plans if plans is None else plans.begin(timestep, others)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End the model's call, so that blocks called by themselves share nothing.

        If a forward merges nothing, warn once until something merges again.

        Args:
            module: the denoiser.
            args: positional arguments of the forward.
            output: output of the forward, which is not read.
        """
        compiling = torch.compiler.is_compiling()
        if not compiling:
            end(module, self.name)
            self._share_no_more()
        if not self.shared.now.active:
            return
        reasons = [stats.last_reason for stats in self.layers if stats.last_reason != NEVER_CALLED]
        if None in reasons:
            if self.warned:
                self.warned = False
        elif reasons and not self.warned:
            if not compiling:  # compilation runs this line only once
                self.warned = True
            text = f"{NOTHING_MERGES}: each of {len(reasons)} was left alone ({reasons[0]})"
            small = (TOO_FEW, BY_DEFAULT)
            if not compiling and any((reason or "").startswith(small) for reason in reasons):
                counts = [stats.totals() for stats in self.layers]
                most = max(tokens // max(calls, 1) for calls, tokens, _ in counts)
                text += f", and the largest has {most} tokens: lower min_tokens or generate larger"
                text += " images"
            _warn(type(module).__name__, f"{text}; report() says more")

    def forget(self) -> None:
        """Drop this task's plans."""
        self.latest.value = None
        self._share_no_more()

    def _share_no_more(self) -> None:
        step: Step | LazyStep | None = getattr(self.shared.step.mine, "value", None)
        if isinstance(step, LazyStep):
            step.plans = None


def _last_tensor(value: Any) -> Tensor | None:
    """Return a tensor of tokens or of an image, or the last one of nested lists.

    Z-Image passes a latent for each sample. The result is None for anything else.
    """
    while isinstance(value, list) and value:
        value = value[-1]
    return value if isinstance(value, Tensor) and value.dim() > 1 else None


def _latents(value: Any) -> Tensor | None:
    """Return a model's first input as one tensor [B, ...].

    A list of tensors of equal shapes is stacked. The result is None for anything else.
    """
    if isinstance(value, list) and all(isinstance(part, Tensor) for part in value):
        value = torch.stack(value) if len({part.shape for part in value}) == 1 else None
    return value if isinstance(value, Tensor) and value.dim() > 1 else None


def _is_recorded(t: Tensor) -> bool:
    """Return True if a CUDA graph is being captured.

    A replay has other values, and must decide again what merges.
    """
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


@torch.compiler.assume_constant_result
def _warn(model: str, text: str) -> None:
    """Warn, also while a graph is compiled, since graphs hold no warnings.

    The model's name is passed as the file name. Otherwise Python would warn once for all models,
    because the same line of PyTorch calls every hook.
    """
    warnings.warn_explicit(text, UserWarning, model, 1)


def spread(module: nn.Module) -> bool:
    """Return True if `enable_parallelism` spreads a diffusers model over several devices."""
    return getattr(module, "_parallel_config", None) is not None


def _checkpoints(module: nn.Module) -> bool:
    """Return True if a model trains with gradient checkpointing."""
    if not (torch.is_grad_enabled() or module.training):
        return False
    return any(getattr(part, "gradient_checkpointing", False) for part in module.modules())


def takes_timestep(module: nn.Module) -> bool:
    """Return True if the module is called with a timestep, as denoisers are."""
    try:
        return not set(_TIMESTEP).isdisjoint(_names(module))
    except (AttributeError, TypeError, ValueError):  # scripted or built-in: no signature
        return False


def _names(module: nn.Module) -> list[str]:
    return list(parameters_of(type(module)))


def _counting(length: int, device: torch.device) -> Tensor:
    """Return 0, 1, ..., `length` - 1, a LongTensor [length]."""
    return torch.arange(length, device=device)
