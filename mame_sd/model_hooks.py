"""The hooks themselves: one that merges around an Attention module, one that reads the size of an image.

`hooks.py` puts them on models. Here is also what diffusers' registry of hooks lacks: putting a hook back, and taking
one out from under another.
"""

from __future__ import annotations

from operator import index
from typing import Any

from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.layer import merged_attention, skip_reason, unfused
from mame_sd.processor import MaMeAttnProcessor
from mame_sd.report import LayerStats

MAME_HOOK = "mame"
MAME_SIZE_HOOK = "mame_size"
# Modules whose first input is an image [B, C, H, W] and whose blocks see its pixels, or patches, as tokens.
_UNET_TRANSFORMERS = {"Transformer2DModel", "TransformerSpatioTemporalModel"}
IMAGE_MODULES = _UNET_TRANSFORMERS | {"DiTTransformer2DModel", "PixArtTransformer2DModel"}


class Shared:
    """What a handle and its hooks share: the live settings, and whether merging is on."""

    def __init__(self, config: MaMeConfig) -> None:
        self.config = config
        self.active = True


class _Hook(ModelHook):
    """Runs around a module's own forward, in deepcopies of the module too.

    diffusers binds a hook to the module that was hooked first, so that a deepcopy would run the original's weights.
    `pre_forward` alone is given the module that was really called; it passes it on.
    """

    name: str

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, {**kwargs, "_mame_module": module}

    def new_forward(self, module: nn.Module, *args: Any, _mame_module: Any, **kwargs: Any) -> Any:
        own = _mame_module._diffusers_hook.hooks[self.name]
        return own.around(_mame_module, own.fn_ref.original_forward, *args, **kwargs)

    def around(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's output; `forward` is its own."""
        raise NotImplementedError


class SizeHook(_Hook):
    """Notes the (h, w) in tokens of the image that a transformer is called with."""

    name = MAME_SIZE_HOOK

    def __init__(self) -> None:
        super().__init__()
        self.size: tuple[int, int] | None = None

    def around(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        image = args[0] if args else kwargs.get("hidden_states")
        if isinstance(image, Tensor) and image.dim() == 4:
            patch = _patch_size(module)
            self.size = (index(image.shape[-2]) // patch, index(image.shape[-1]) // patch)
        else:
            self.size = None
        return forward(*args, **kwargs)


class MergeHook(_Hook):
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
        size = None if self.image is None else self.image.size
        return merged_attention(module, hidden_states, config, size, self.stats, call)


def hook_on(module: nn.Module, name: str) -> ModelHook | None:
    """The hook of that name on `module`."""
    registry = getattr(module, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook(name)


def put_hook(module: nn.Module, name: str, hook: ModelHook) -> None:
    """Makes `hook` the one of that name on `module`."""
    if hook_on(module, name) is hook:
        return
    take_hook(module, name)
    HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, name)


def take_hook(module: nn.Module, name: str) -> None:
    """Takes the hook of that name off `module`, if there is one; hooks put on after it stay in force.

    diffusers' own removal gives the next hook the freed forward in place of its `new_forward`, which is then lost.
    """
    if hook_on(module, name) is None:
        return
    registry: Any = module._diffusers_hook
    later = registry._fn_refs[registry._hook_order.index(name) + 1 :]
    outer = later[0] if later and later[0].original_forward is not None else None
    kept = None if outer is None else outer.forward
    registry.remove_hook(name, recurse=False)
    if outer is not None:
        outer.original_forward, outer.forward = outer.forward, kept


def _patch_size(module: nn.Module) -> int:
    """Image pixels per token side: 1 in a UNet's Transformer2DModel, the patch size in DiT and PixArt."""
    if type(module).__name__ in _UNET_TRANSFORMERS and not getattr(module, "is_input_patches", False):
        return 1
    model: Any = module
    return int(getattr(model, "patch_size", None) or model.config["patch_size"])
