"""apply_mame: merging as hooks on a model's self-attention modules.

    handle = apply_mame(pipe, tau=0.8)
    image = pipe("a red key").images[0]
    print(handle.report())
    remove_mame(pipe)                      # bit-equal to before

    with mame(pipe, tau=0.8):              # for one block of code; what was there before comes back
        image = pipe("a red key").images[0]

A hook on the module survives what replaces processors: slicing, `fuse_qkv_projections`, IP-Adapter, PAG. It also learns
the true (h, w) of the tokens from the Transformer2DModel around it. Each module carries one merging hook at most: applying
again replaces it. A `copy.deepcopy` of a hooked model merges with its own weights; to save a whole model with `torch.save`
call `remove_mame` first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.layer import default_processor, fixed_reason, merged_attention, skip_reason, unfused
from mame_sd.merge import MergePlan
from mame_sd.processor import MaMeAttnProcessor, make_config
from mame_sd.report import LayerStats, MaMeReport, device_of, make_report

_MAME_HOOK = "mame"
_MAME_SIZE_HOOK = "mame_size"
_OURS = (_MAME_HOOK, _MAME_SIZE_HOOK)
_DENOISERS = ("unet", "transformer", "prior")
# Attention over frames lies below modules of these names (AnimateDiff, SVD, text-to-video).
_TEMPORAL = {"motion_modules", "temporal_transformer_blocks", "temp_attentions", "transformer_in"}
# Modules whose first input is an image [B, C, H, W] and whose blocks see its pixels, or patches, as tokens.
_UNET_TRANSFORMERS = {"Transformer2DModel", "TransformerSpatioTemporalModel"}
_IMAGE_MODULES = _UNET_TRANSFORMERS | {"DiTTransformer2DModel", "PixArtTransformer2DModel"}


class _Shared:
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


class _SizeHook(_Hook):
    """Notes the (h, w) in tokens of the image that a transformer is called with."""

    name = _MAME_SIZE_HOOK

    def __init__(self) -> None:
        super().__init__()
        self.size: tuple[int, int] | None = None

    def around(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        image = args[0] if args else kwargs.get("hidden_states")
        if isinstance(image, Tensor) and image.dim() == 4:
            patch = _patch_size(module)
            self.size = (image.shape[-2] // patch, image.shape[-1] // patch)
        else:
            self.size = None
        return forward(*args, **kwargs)


class _MergeHook(_Hook):
    """Merges around one Attention module's own forward, or its keys and values only."""

    name = _MAME_HOOK

    def __init__(self, shared: _Shared, stats: LayerStats, image: _SizeHook | None) -> None:
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


class MaMeHandle:
    """Merging as applied to one model: settings, counters, removal. Made by `apply_mame`."""

    def __init__(self, root: nn.Module, shared: _Shared, hooks: list[tuple[nn.Module, str, ModelHook]]) -> None:
        self.root = root
        self._shared = shared
        self._hooks = hooks
        self._stats = [hook.stats for _, _, hook in hooks if isinstance(hook, _MergeHook)]

    @property
    def config(self) -> MaMeConfig:
        """The settings now in force."""
        return self._shared.config

    @property
    def installed(self) -> bool:
        """Whether this handle's hooks are (all) on the model: not removed, not replaced by a later `apply_mame`."""
        return all(_hook_on(module, name) is hook for module, name, hook in self._hooks)

    @property
    def active(self) -> bool:
        """Whether the hooks merge; False makes every call bit-equal to an unhooked model."""
        return self._shared.active

    @active.setter
    def active(self, value: bool) -> None:
        self._shared.active = value

    def set(self, config: MaMeConfig | None = None, **fields: Any) -> None:
        """Changes live settings from the next forward on: `handle.set(tau=0.9)`; `config` replaces all of them.

        Raises:
            RuntimeError: merging was removed or replaced, so the change would have no effect.
            ValueError: a field is unknown or out of its range; nothing has changed then.
        """
        if not self.installed:
            raise RuntimeError("expected merging to be applied, but it was removed or replaced: call apply_mame again")
        self._shared.config = make_config(self.config if config is None else config, fields)

    def report(self) -> MaMeReport:
        """Tokens in and kept per layer since the last `reset`.

        Raises:
            NothingMergedError: a forward has run and no layer could merge.
        """
        return make_report(self._stats)

    def reset(self) -> None:
        """Sets all counters to zero and drops captured plans."""
        for stats in self._stats:
            stats.reset()

    def capture(self, on: bool = True) -> None:
        """Keeps the latest MergePlan of every layer for `plans` (memory: one plan a layer; not under torch.compile)."""
        for stats in self._stats:
            stats.capture = on
            stats.plan = stats.plan if on else None

    def plans(self) -> dict[str, MergePlan]:
        """The latest plan of every layer that merged since `capture`, by layer name; sizes stand in `report`."""
        return {stats.name: stats.plan for stats in self._stats if stats.plan is not None}

    def remove(self) -> None:
        """Takes this handle's hooks off the model; hooks of a later `apply_mame` stay."""
        for module, name, hook in self._hooks:
            if _hook_on(module, name) is hook:
                _registry(module).remove_hook(name, recurse=False)

    def install(self) -> None:
        """Puts the hooks back (after `remove`, or in place of a later `apply_mame`)."""
        for module, name, hook in self._hooks:
            _put(module, name, hook)


def apply_mame(target: Any, config: MaMeConfig | None = None, **fields: Any) -> MaMeHandle:
    """Merges tokens in every large self-attention of `target` until `remove_mame`.

    Layers with at least `min_tokens` tokens merge: by default 1024, which is the two largest levels of SD 1.x and SDXL at
    their own sizes, and of SD 2.x at 768 pixels (9216, 2304). Merging that is on `target` already is replaced.

    Args:
        target: a diffusers pipeline (its UNet or transformer is taken), a model, or a single Attention module.
        config: the settings; None is the measured default.
        fields: fields of MaMeConfig, over those of `config`.

    Raises:
        TypeError: `target` is neither a module nor a pipeline with a denoiser.
        ValueError: no self-attention that could merge, or a MaMeAttnProcessor is installed, or bad settings.
    """
    handle = build_handle(target, make_config(config, fields))
    remove_mame(handle.root, processors=False)
    handle.install()
    return handle


def build_handle(target: Any, config: MaMeConfig) -> MaMeHandle:
    """A handle for `target` whose hooks are not installed yet; raises as `apply_mame` does."""
    root = denoiser_of(target)
    shared = _Shared(config)
    hooks: list[tuple[nn.Module, str, ModelHook]] = []
    images: dict[str, _SizeHook] = {}
    for path, module in root.named_modules():
        if type(module).__name__ in _IMAGE_MODULES:
            images[path] = _SizeHook()
            hooks.append((module, _MAME_SIZE_HOOK, images[path]))
        if not isinstance(module, Attention) or not _may_merge(path, module):
            continue
        if isinstance(module.processor, MaMeAttnProcessor):
            raise ValueError(
                f"expected no merging on {path or type(module).__name__}, found {module.processor}, which would merge "
                "twice: call remove_mame first"
            )
        inside = max((p for p in images if not p or path.startswith(p + ".")), key=len, default=None)
        stats = LayerStats(path or type(module).__name__)
        stats.prepare(device_of(module))
        hooks.append((module, _MAME_HOOK, _MergeHook(shared, stats, None if inside is None else images[inside])))
    if not any(isinstance(hook, _MergeHook) for _, _, hook in hooks):
        raise ValueError(
            f"expected a model with diffusers self-attention, found none that can merge in {type(root).__name__}: "
            "cross-attention, temporal, linear, joint and added-key attention are left alone. Apply to a UNet such as "
            "pipe.unet"
        )
    return MaMeHandle(root, shared, hooks)


def remove_mame(target: Any, processors: bool = True) -> None:
    """Takes all merging off `target`; results are bit-equal to before it was applied. Does nothing if there is none.

    Args:
        target: what `apply_mame` takes.
        processors: also replace each MaMeAttnProcessor by its inner, or diffusers' default, processor.
    """
    for module in denoiser_of(target).modules():
        for name in _OURS:
            if _hook_on(module, name) is not None:
                _registry(module).remove_hook(name, recurse=False)
        processor: Any = getattr(module, "processor", None)
        if processors and isinstance(processor, MaMeAttnProcessor):
            attn: Any = module
            attn.processor = processor.inner or default_processor(attn)


@contextmanager
def mame(target: Any, config: MaMeConfig | None = None, **fields: Any) -> Iterator[MaMeHandle]:
    """Merging for a `with` block. Afterwards, raised or not, what was applied before is in force again.

    Takes the arguments of `apply_mame` and gives its handle.
    """
    with hooks_restored(target):
        yield apply_mame(target, config, **fields)


@contextmanager
def hooks_restored(target: Any) -> Iterator[None]:
    """After the block `target` carries the same merging hooks as before it, whatever the block applied or removed."""
    modules = list(denoiser_of(target).modules())
    before = {(module, name): _hook_on(module, name) for module in modules for name in _OURS}
    try:
        yield
    finally:
        for (module, name), hook in before.items():
            if hook is not None:
                _put(module, name, hook)
            elif _hook_on(module, name) is not None:
                _registry(module).remove_hook(name, recurse=False)


def has_hooks(target: Any) -> bool:
    """Whether any merging hook is on `target`, active or not."""
    return any(_hook_on(module, name) is not None for module in denoiser_of(target).modules() for name in _OURS)


def denoiser_of(target: Any) -> nn.Module:
    """The module that merging goes on: `target` itself, or a pipeline's UNet or transformer.

    Raises:
        TypeError: neither a module nor a pipeline with a denoiser.
    """
    if isinstance(target, nn.Module):
        return target
    for name in _DENOISERS:
        model = getattr(target, name, None)
        if isinstance(model, nn.Module):
            return model
    raise TypeError(
        f"expected a torch module or a diffusers pipeline with a unet or transformer, got {type(target).__name__}"
    )


def _may_merge(path: str, attn: Attention) -> bool:
    return fixed_reason(attn) is None and _TEMPORAL.isdisjoint(path.split("."))


def _registry(module: nn.Module) -> HookRegistry:
    return HookRegistry.check_if_exists_or_initialize(module)


def _hook_on(module: nn.Module, name: str) -> ModelHook | None:
    registry = getattr(module, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook(name)


def _patch_size(module: nn.Module) -> int:
    """Image pixels per token side: 1 in a UNet's Transformer2DModel, the patch size in DiT and PixArt."""
    if type(module).__name__ in _UNET_TRANSFORMERS and not getattr(module, "is_input_patches", False):
        return 1
    model: Any = module
    return int(getattr(model, "patch_size", None) or model.config["patch_size"])


def _put(module: nn.Module, name: str, hook: ModelHook) -> None:
    """Makes `hook` the one of that name on `module`."""
    registry = _registry(module)
    if registry.get_hook(name) is hook:
        return
    if registry.get_hook(name) is not None:
        registry.remove_hook(name, recurse=False)
    registry.register_hook(hook, name)
