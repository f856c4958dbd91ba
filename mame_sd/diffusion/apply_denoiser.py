"""Apply merging to a model as hooks on its self-attention modules.

A hook on the module survives tools that replace processors: slicing, `fuse_qkv_projections`,
IP-Adapter, PAG. It also gets the true (h, w) of the tokens from the Transformer2DModel around it.
Each module carries at most one merging hook: applying again replaces it. A `copy.deepcopy` of a
hooked model merges with its own weights, and so does one that `torch.save` wrote whole.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, TypeVar

from diffusers.models.attention_processor import Attention
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from mame_sd.compat import names_arguments, require
from mame_sd.config import ConfigOrFile, MaMeConfig, read_config
from mame_sd.core.intercept import Kernel, adapt_kernel
from mame_sd.diffusion.attention_backends import watch_kernels
from mame_sd.diffusion.context import HandleState, ResolvedConfig
from mame_sd.diffusion.denoisers import denoiser_of, has_denoiser_names
from mame_sd.diffusion.families.attention import PlainAttention, SequenceAttention, fixed_reason
from mame_sd.diffusion.families.family import Family, is_one_of
from mame_sd.diffusion.families.processors import PLAIN_PROCESSORS, default_processor
from mame_sd.diffusion.families.transformers import (
    ADDED_KEYS,
    IMAGE_ALONE,
    adds_keys,
    family_of,
)
from mame_sd.diffusion.handle import MaMeHandle, Placed
from mame_sd.diffusion.hook_registry import hook_on, remove_hook
from mame_sd.diffusion.hooks import (
    SPREAD,
    EagerSizeHook,
    SizeHook,
    StepHook,
    spread,
    takes_timestep,
)
from mame_sd.diffusion.layer import AttentionAdapter, LayerStats, MergeHook
from mame_sd.diffusion.processor import MaMeAttnProcessor
from mame_sd.diffusion.replaced_denoiser import check_of, forget_pipeline
from mame_sd.diffusion.restored_modules import restoring_hooks
from mame_sd.diffusion.restoring import RestoreHook
from mame_sd.diffusion.threads import CHANGES, check_idle
from mame_sd.refused import DIFFUSERS, known_as, refused_as
from mame_sd.report import device_of

Outer = TypeVar("Outer")
_OURS = (MergeHook.name, RestoreHook.name, SizeHook.name, StepHook.name)
UNNAMED = (
    "{}.forward was replaced by one of (*args, **kwargs) that doesn't name what it takes: arguments"
    " by position can't be read, such as the timestep. Wrap it with functools.wraps"
)
# Modules of these names contain attention over frames (AnimateDiff, SVD, text-to-video, I2VGen-XL).
_TEMPORAL = {
    "motion_modules",
    "temporal_transformer_blocks",
    "temp_attentions",
    "transformer_in",
    "image_latents_temporal_encoder",
}


def apply_mame(
    target: Any,
    config: ConfigOrFile = None,
    kernel: Kernel | None = None,
    **fields: Any,
) -> MaMeHandle:
    """Merge in layers with at least `min_tokens` tokens, see `mame_sd.apply_mame`.

    Args:
        target: a diffusers pipeline (its UNet or transformer merges, or each of several; a
            ControlNet needs a call of its own), a model, or a single Attention module.
        config: the settings. If they have no tau, keep or layers, settings saved next to the
            model's weights apply; `handle.config` shows them.
        kernel: computes attention over the merged keys instead of the model's own kernel, as in
            `mame_sd.attention`, from (q, k, v) of [B, H, N, D]. It needs `keep`.
        fields: fields of MaMeConfig, over those of `config`.

    Raises:
        TypeError: `target` is neither a module nor a pipeline with a denoiser, or `kernel` can't be
            called.
        ValueError: no self-attention can merge, a MaMeAttnProcessor is installed, or the settings
            are wrong.
        RuntimeError: another thread makes an image with the model, or torch or diffusers lacks a
            name that merging needs (`mame_sd.compat`).
    """
    require("torch", "diffusers")
    settings = (read_config(config) or MaMeConfig()).replace(**fields)
    handle = build_handle(target, settings, kernel=kernel)
    watch_kernels()
    with CHANGES:
        check_idle(handle.root, "apply_mame")
        remove_mame(handle.root, processors=False)
        handle.install()
    return handle


def build_handle(
    target: Any, config: MaMeConfig, active: bool = True, kernel: Kernel | None = None
) -> MaMeHandle:
    """Make a handle for `target` whose hooks are not installed yet.

    If not `active`, the hooks don't merge until they are activated. All other arguments and the
    errors are those of `apply_mame`.
    """
    root = denoiser_of(target)
    tops = {"", *(root if isinstance(root, nn.ModuleDict) else ())}  # paths of the denoisers
    adapter = None if kernel is None else adapt_kernel(kernel)
    shared = HandleState(ResolvedConfig(config, active, config), adapter)
    hooks: list[Placed] = []
    steps: dict[str, StepHook] = {}  # by path of the denoiser
    images: dict[str, tuple[SizeHook, Family]] = {}  # by path of the part of the model
    attention: dict[str, tuple[MergeHook, Family]] = {}  # by path of the merging layer
    unknown = Counter[str]()  # number of attentions without a family, by class
    for path, module in root.named_modules():
        family = _family_in(module, path in tops)
        denoiser = _around(path, steps)
        if denoiser is None and takes_timestep(module):
            steps[path] = StepHook(module, shared)
            hooks.append((module, steps[path]))
        if family is not None:
            reader = EagerSizeHook if family.eager else SizeHook
            images[path] = reader(module, shared, family.tokens), family
            hooks.append((module, images[path][0]))
        image, family = _around(path, images) or (None, IMAGE_ALONE)
        if image is None and isinstance(root, ModelMixin) and not adds_keys(module):
            continue  # attention outside of an image may be over text
        layer = _layer_of(path, module, image, family)
        if layer is not None:
            stats = LayerStats(path or type(module).__name__, device_of(module))
            layouts = None if image is None else image.tokens
            hook = MergeHook(shared, stats, layer, layouts, len(attention))
            hooks.append((module, hook))
            attention[path] = hook, family
            if denoiser is not None:
                denoiser.layers.append(stats)
        elif image is not None and _is_unknown(path, module, family):
            unknown[type(module).__name__] += 1
    if not attention:
        raise ValueError(_nothing_found(root))
    for path, module, restoring in restoring_hooks(root, shared, attention):
        hooks.append((module, restoring))
        around = _around(path, steps)
        if around is not None:
            around.layers.append(restoring.stats)
    return MaMeHandle(root, shared, hooks, None if target is root else target, unknown)


def _family_in(module: nn.Module, is_denoiser: bool) -> Family | None:
    """Return the family of a model or of a part of it. If the module is neither, return None.

    Raises:
        ValueError: the model is spread over devices, or can't merge.
    """
    if spread(module):
        raise ValueError(SPREAD.format(type(module).__name__))
    if isinstance(module, ModelMixin) and not names_arguments(type(module)):
        warnings.warn(UNNAMED.format(type(module).__name__), UserWarning, stacklevel=5)
    family = family_of(module)
    if family is None and is_one_of(module, IMAGE_ALONE.models):
        return IMAGE_ALONE
    refused = refused_as(module, DIFFUSERS) if family is None and is_denoiser else None
    if refused is not None:
        raise ValueError(f"{known_as(refused)} does not merge: {DIFFUSERS[refused]}")
    return family


def remove_mame(target: Any, processors: bool = True) -> None:
    """Remove all merging, see `mame_sd.remove_mame`.

    Raises:
        RuntimeError: another thread makes an image with the model.
    """
    try:
        root = denoiser_of(target)
    except TypeError:
        check = check_of(target)
        if check is None and not has_denoiser_names(target):
            raise
        # The denoiser was removed from the pipeline, perhaps with merging on it.
        root = nn.ModuleDict() if check is None else check.handle.root
    with CHANGES:
        check_idle(root, "remove_mame")
        forget_pipeline(target)
        for module in root.modules():
            for name in _OURS:
                remove_hook(module, name)
            processor: Any = getattr(module, "processor", None)
            if processors and isinstance(processor, MaMeAttnProcessor):
                attn: Any = module
                attn.processor = processor.inner or default_processor(attn)


def hooks_on(target: Any) -> list[Placed]:
    """Return all merging hooks on `target`, active or not, each with its module."""
    modules = denoiser_of(target).modules()
    every = ((module, hook_on(module, name)) for module in modules for name in _OURS)
    return [(module, hook) for module, hook in every if hook is not None]


def _layer_of(
    path: str, module: nn.Module, image: SizeHook | None, family: Family
) -> AttentionAdapter | None:
    """Return an adapter of the module at `path`, or None if it can't merge.

    `image` notes the layout of the image around the module, and `family` is that of the model
    around it.

    Raises:
        ValueError: a MaMeAttnProcessor is installed on the module.
    """
    plain = family is IMAGE_ALONE
    if plain and adds_keys(module):
        return SequenceAttention(module, ADDED_KEYS)
    if plain:
        merges = (
            fixed_reason(module) is None
            and _TEMPORAL.isdisjoint(path.split("."))
            # unknown processors may do anything outside of an image's transformer
            and (image is not None or type(module.processor).__name__ in PLAIN_PROCESSORS)
        )
    else:
        merges = family.owns(path, module)
    if not merges:
        return None
    if isinstance(getattr(module, "processor", None), MaMeAttnProcessor):
        raise ValueError(
            f"expected no merging on {path or type(module).__name__}, found {module.processor},"
            " which would merge twice: call remove_mame first"
        )
    return PlainAttention(module) if plain else SequenceAttention(module, family)


def _is_unknown(path: str, module: nn.Module, family: Family) -> bool:
    """Return True if `module` is attention within an image's model that no family describes.

    Cross-attention, which never merges, is recognised by its class's name.
    """
    kind = type(module).__name__
    if not kind.endswith("Attention") or "Cross" in kind or "Perceiver" in kind:
        return False
    if family is IMAGE_ALONE:
        return not isinstance(module, Attention) and _TEMPORAL.isdisjoint(path.split("."))
    return not family.knows(path, module)


def _around(path: str, outer: dict[str, Outer]) -> Outer | None:
    """Return the value of the nearest path that contains `path`, or None ("" is the root)."""
    around = [other for other in outer if not other or path.startswith(f"{other}.")]
    return outer[max(around, key=len)] if around else None


def _nothing_found(root: nn.Module) -> str:
    """Return the error for a model without layers that can merge.

    It names the model, its attention, and what to do.
    """
    names = (type(module).__name__ for module in root.modules())
    counts = Counter(name for name in names if name.endswith("Attention"))
    attention = (f"{count} {name}" for name, count in sorted(counts.items()))
    described, kind = ", ".join(attention) or "no attention modules", type(root).__name__
    return (
        f"{known_as(kind)} is not supported yet: no attention over an image's tokens is known in"
        f" {kind}, which has {described}. Describe where they are with"
        " mame_sd.families.register_family, or a vision transformer with"
        " mame_sd.perception.encoder_registry.register_encoder"
    )
