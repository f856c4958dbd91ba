"""The hooks themselves: two merge around an attention module, one reads how the tokens lie, one which step it is.

`parts.py` has the one for what follows attention, `hooks.py` puts them on models. Here is also what diffusers' registry
of hooks lacks: putting a hook back, and taking one out from under another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import index
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor, nn

from mame_sd.config import PARTS, MaMeConfig
from mame_sd.core.partition import draw_at
from mame_sd.diffusion.attention import merged_attention, skip_reason, unfused
from mame_sd.diffusion.families.family import Call, Tokens
from mame_sd.diffusion.families.sequence import FamilyLayer
from mame_sd.diffusion.processor import MaMeAttnProcessor
from mame_sd.report import LayerStats

MAME_HOOK = "mame"
MAME_SIZE_HOOK = "mame_size"
MAME_STEP_HOOK = "mame_step"
# Modules whose first input is an image [B, C, H, W] and whose blocks see its pixels, or patches, as tokens.
_UNET_TRANSFORMERS = {"Transformer2DModel", "TransformerSpatioTemporalModel"}
IMAGE_MODULES = _UNET_TRANSFORMERS | {"DiTTransformer2DModel", "PixArtTransformer2DModel"}


class Shared:
    """What a handle and its hooks share: the live settings, whether merging is on, and which draw the step takes."""

    def __init__(self, config: MaMeConfig) -> None:
        self.config = config
        self.active = True
        self.step: Tensor | None = None

    @property
    def draw(self) -> Tensor | None:
        """Which draw of the random partitions the step takes, a LongTensor [1]; None: the first.

        That is always so where gradients are on, asked for where it is used: a block that is computed again for its
        gradients (checkpointing) merges as before, whatever has run since, and no sample's timestep decides on its
        neighbours in a training batch.
        """
        return None if torch.is_grad_enabled() else self.step

    def __getstate__(self) -> dict[str, Any]:
        """Copies start without a step."""
        return {**self.__dict__, "step": None}

    @property
    def config(self) -> MaMeConfig:
        return self._config

    @config.setter
    def config(self, config: MaMeConfig) -> None:
        self.parts = {name: config.of_part(name) for name in PARTS}
        self._config = config


class AroundHook(ModelHook):
    """Runs around a module's own forward, in deepcopies of the module too.

    diffusers binds a hook to the module that was hooked first, so that a deepcopy would run the original's weights.
    `pre_forward` alone is given the module that was really called; it passes it on.
    """

    name: str
    entry: Any  # the module's forward just after the hook was put on

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, {**kwargs, "_mame_module": module}

    def new_forward(self, module: nn.Module, *args: Any, _mame_module: Any, **kwargs: Any) -> Any:
        own = _mame_module._diffusers_hook.hooks[self.name]
        return own.around(_mame_module, own.fn_ref.original_forward, *args, **kwargs)

    def around(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's output; `forward` is its own."""
        raise NotImplementedError


class Reader:
    """Reads the arguments of a module's latest forward, by name, before it runs.

    A plain forward pre-hook: other tools (DeepCache, offloading) put functions of their own in place of these modules'
    forward, which wrapping it would get lost under or undo.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.read(module, {**dict(zip(self.names, args, strict=False)), **kwargs})

    def read(self, module: nn.Module, call: Call) -> None:
        """Notes what it is for."""
        raise NotImplementedError


class SizeHook(Reader):
    """Notes how the tokens lie in the latest forward of a transformer."""

    def __init__(self, module: nn.Module, tokens_of: Callable[[Any, Call], Tokens | None]) -> None:
        super().__init__(module)
        self._tokens_of = tokens_of
        self.tokens: Tokens | None = None

    def read(self, module: nn.Module, call: Call) -> None:
        """The tokens of this call; raises ValueError beside tomesd's patch."""
        for block in getattr(module, "transformer_blocks", ()):
            if type(block).__name__ == "ToMeBlock":
                raise ValueError(
                    "expected blocks whose tokens are not merged yet, found tomesd's patch: call "
                    "tomesd.remove_patch(pipe), or remove_mame(pipe) to merge by tomesd alone"
                )
        self.tokens = self._tokens_of(module, call)


class StepHook(Reader):
    """Notes which draw of the random partitions the latest forward of a denoiser takes: it follows from the timestep.

    So the same call gives the same result, whatever ran before, and no sampler needs to be known.
    """

    def __init__(self, module: nn.Module, shared: Shared) -> None:
        super().__init__(module)
        self._shared = shared

    @classmethod
    def of(cls, module: nn.Module, shared: Shared) -> StepHook | None:
        """The hook of a module that is called with a timestep; None for others."""
        try:
            hook = cls(module, shared)
        except (AttributeError, TypeError, ValueError):  # scripted or built-in: no signature
            return None
        return hook if "timestep" in hook.names else None

    def read(self, module: nn.Module, call: Call) -> None:
        """The draw of this call's timestep, on the device of its inputs."""
        timestep = call.get("timestep")
        self._shared.step = None
        if timestep is not None and self._shared.config.redraw:
            inputs = (value for value in call.values() if isinstance(value, Tensor) and value.dim() > 1)
            tokens = next(inputs, None)
            step = draw_at(timestep)
            self._shared.step = step if tokens is None else step.to(tokens.device)


def size_of(image: SizeHook | None) -> tuple[int, int] | None:
    """(h, w) of the tokens in the latest forward of an image's transformer; None where it is unknown."""
    tokens = None if image is None else image.tokens
    return None if tokens is None else (tokens.size[0], tokens.size[1])


class MergeHook(AroundHook):
    """Merges around one Attention module's own forward, or its keys and values only."""

    name = MAME_HOOK

    def __init__(self, shared: Shared, stats: LayerStats, image: SizeHook | None) -> None:
        super().__init__()
        self.shared = shared
        self.stats = stats
        self.image = image

    def around(
        self,
        module: Any,
        forward: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """`Attention.forward`, merged where that is sound. hidden_states and the output are [B, L, C]."""

        def call(hidden: Tensor, encoder: Tensor | None) -> Any:
            processor = unfused(module.processor, encoder) if encoder_hidden_states is None else module.processor
            if processor is not module.processor:
                return processor(module, hidden, encoder_hidden_states=encoder)
            return forward(hidden, encoder_hidden_states=encoder, attention_mask=attention_mask, **kwargs)

        if not self.shared.active:
            return call(hidden_states, encoder_hidden_states)
        config, processor = self.shared.config, module.processor
        reason = skip_reason(module, hidden_states, encoder_hidden_states, attention_mask, kwargs, config, processor)
        if reason is None and isinstance(processor, MaMeAttnProcessor):
            reason = "a MaMeAttnProcessor on the module merges already"
        if reason is not None:
            self.stats.skipped(reason, hidden_states.shape[1])
            return call(hidden_states, encoder_hidden_states)
        return merged_attention(module, hidden_states, config, size_of(self.image), self.stats, call, self.shared.draw)


class FamilyHook(AroundHook):
    """Merges around one attention module of a transformer family."""

    name = MAME_HOOK

    def __init__(self, shared: Shared, stats: LayerStats, image: SizeHook, layer: FamilyLayer) -> None:
        super().__init__()
        self.shared = shared
        self.stats = stats
        self.image = image
        self.layer = layer

    def around(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """The attention's output, on merged image tokens where that is sound."""
        if not self.shared.active:
            return forward(*args, **kwargs)
        config, tokens = self.shared.config, self.image.tokens
        call = self.layer.bind(args, kwargs)
        reason = self.layer.skip_reason(call, tokens, config)
        if reason is not None or tokens is None:
            self.stats.skipped(reason or "", 0 if tokens is None else tokens.count)
            return forward(*args, **kwargs)
        return self.layer.merged(module, call, tokens, config, self.stats, forward, self.shared.draw)


_READERS: dict[str, type[Reader]] = {MAME_SIZE_HOOK: SizeHook, MAME_STEP_HOOK: StepHook}


def hook_on(module: nn.Module, name: str) -> Any:
    """The hook of that name on `module`."""
    if name in _READERS:
        return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _READERS[name])), None)
    registry = getattr(module, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook(name)


def put_hook(module: nn.Module, name: str, hook: Any) -> None:
    """Makes `hook` the one of that name on `module`."""
    if hook_on(module, name) is hook:
        return
    take_hook(module, name)
    if name in _READERS:
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return
    HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, name)
    hook.entry = module.forward


def take_hook(module: nn.Module, name: str) -> None:
    """Takes the hook of that name off `module`, if there is one; what was put around it since then stays in force.

    diffusers' own removal gives the next hook the freed forward in place of its `new_forward`, which is then lost, and
    drops a function that somebody has put around `module.forward` by hand.
    """
    hook = hook_on(module, name)
    if hook is None:
        return
    if name in _READERS:
        key = next(key for key, value in module._forward_pre_hooks.items() if value is hook)
        del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
        return
    registry: Any = module._diffusers_hook
    later = registry._fn_refs[registry._hook_order.index(name) + 1 :]
    around = (later[0].original_forward or later[0].forward) if later else module.forward
    if around is not hook.entry:
        _pass_through(registry, name)
        return
    outer = later[0] if later and later[0].original_forward is not None else None
    kept = None if outer is None else outer.forward
    registry.remove_hook(name, recurse=False)
    if outer is not None:
        outer.original_forward, outer.forward = outer.forward, kept


def _pass_through(registry: Any, name: str) -> None:
    """Takes a hook that is wrapped by a function of somebody else's out of the registry; what is wrapped does nothing."""
    plain, place = ModelHook(), registry._hook_order.index(name)
    ref = registry._fn_refs[place]
    ref.pre_forward, ref.forward, ref.post_forward = plain.pre_forward, ref.original_forward, plain.post_forward
    del registry.hooks[name], registry._hook_order[place], registry._fn_refs[place]


def image_size(module: Any, call: Call) -> Tokens | None:
    """The tokens of an image [B, C, H, W]: its pixels in a UNet's Transformer2DModel, its patches in DiT and PixArt."""
    image = call.get("hidden_states")
    if not isinstance(image, Tensor) or image.dim() != 4:
        return None
    patch = 1
    if type(module).__name__ not in _UNET_TRANSFORMERS or getattr(module, "is_input_patches", False):
        patch = int(getattr(module, "patch_size", None) or module.config["patch_size"])
    return Tokens((index(image.shape[-2]) // patch, index(image.shape[-1]) // patch))
