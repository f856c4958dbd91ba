"""Apply merging to diffusion models, vision transformers and language models that read images.

The target decides which of `mame_sd.diffusion`, `mame_sd.perception` and `mame_sd.captions` it
belongs to. Only then that module's libraries are imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from mame_sd.captions.captioner_registry import is_captioner, reader_in
from mame_sd.config import ConfigOrFile, read_config
from mame_sd.diffusion.families.family import REGISTERED
from mame_sd.handle import Handle
from mame_sd.perception.encoder_registry import is_encoder

if TYPE_CHECKING:
    from mame_sd.captions.handle import CaptionHandle
    from mame_sd.diffusion.handle import MaMeHandle
    from mame_sd.perception.handle import EncoderHandle


@overload  # a module may be a denoiser, an encoder or a captioner; anything else is a pipeline
def apply_mame(
    target: nn.Module, config: ConfigOrFile = None, **fields: Any
) -> MaMeHandle | EncoderHandle | CaptionHandle: ...
@overload
def apply_mame(target: object, config: ConfigOrFile = None, **fields: Any) -> MaMeHandle: ...
def apply_mame(
    target: Any, config: ConfigOrFile = None, **fields: Any
) -> MaMeHandle | EncoderHandle | CaptionHandle:
    """Merge tokens of `target` until `handle.remove()` or `remove_mame`. Replace earlier merging.

    Args:
        target: a diffusers pipeline, a denoiser or a single Attention module, whose large
            self-attentions merge (`mame_sd.diffusion.apply_denoiser`); a model with a vision
            transformer of transformers or timm, whose blocks merge between attention and MLP
            (`mame_sd.perception.apply_encoder`); or a LLaVA or Qwen-VL, whose visual tokens merge
            after its vision tower (`mame_sd.captions.apply_captioner`). If one module contains a
            diffusion model and an encoder, the former merges; pass the encoder itself to merge it.
        config: the settings, or a .json file of them. If None, the measured default.
        fields: fields of MaMeConfig, over those of `config`. For a vision transformer also
            `blocks`, `restore` and `prop_attn`. For a diffusion model also `kernel`, a function of
            (q, k, v) that computes attention over the merged keys.

    Returns:
        A handle that changes, reports and removes merging. As the context of a `with` block it
        removes merging at the end of the block.

    Raises:
        TypeError: `target` is neither a module nor a pipeline with a denoiser.
        ValueError: nothing in `target` can merge, or the settings are wrong.
    """
    apply = _room_of(target, fields)
    handle: Any = apply(target, read_config(config), **fields)
    return handle


def remove_mame(target: Any, processors: bool = True) -> None:
    """Remove all merging from `target`. Results are bit-equal to those before it was applied.

    If there is no merging, nothing happens.

    Args:
        target: a target of `apply_mame`.
        processors: if True, also replace each MaMeAttnProcessor by its inner processor, or
            diffusers' default.
    """
    if _reads_images(target):
        from mame_sd.captions.apply_captioner import remove_captioner

        remove_captioner(target)
        return
    only = _only_encoder(target)
    if only or is_encoder(target):
        from mame_sd.perception.apply_encoder import remove_encoder

        remove_encoder(target)
    if only:
        return
    from mame_sd.diffusion import apply_denoiser

    apply_denoiser.remove_mame(target, processors)


def _room_of(target: Any, fields: dict[str, Any]) -> Callable[..., Handle[Any]]:
    """Return the function that applies merging to a target.

    `fields` are arguments of `apply_mame` by name. A kernel of None is dropped for models without
    one.

    Raises:
        ValueError: a kernel was given for a model that can't use one.
    """
    if not (reads := _reads_images(target)) and not _only_encoder(target):
        from mame_sd.diffusion.apply_denoiser import apply_mame

        return apply_mame
    if fields.pop("kernel", None) is not None:
        raise ValueError("kernel: expected none, for only the layers of diffusion models take one")
    if reads:
        from mame_sd.captions.apply_captioner import apply_captioner

        return apply_captioner
    from mame_sd.perception.apply_encoder import apply_encoder

    return apply_encoder


def _reads_images(target: Any) -> bool:
    """Return True if `target` contains a model that reads images for a language model."""
    return is_captioner(target) or (reader_in(target) is not None and not _has_denoiser(target))


def _only_encoder(target: Any) -> bool:
    """Return True if merging `target` concerns an encoder: it contains no denoiser.

    It contains a vision transformer instead, or a model of transformers or timm. If there are a
    UNet and an image encoder, the UNet merges.
    """
    if not isinstance(target, nn.Module) or _has_denoiser(target):
        return False
    return is_encoder(target) or any(
        type(module).__module__.startswith(("transformers.", "timm."))
        for module in target.modules()
    )


def _has_denoiser(target: Any) -> bool:
    """Return True if `target` contains a module of diffusers or a model of a registered family.

    A registered model may contain modules of timm and transformers.
    """
    kinds = {type(module) for module in target.modules()}
    bases = {base.__name__ for kind in kinds for base in kind.__mro__}
    diffused = any(kind.__module__.startswith("diffusers.") for kind in kinds)
    return diffused or not bases.isdisjoint(REGISTERED)
