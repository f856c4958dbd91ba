"""One entry for diffusion models (`mame_sd.diffusion`), vision transformers
(`mame_sd.perception`) and language models that read images (`mame_sd.captions`).

Which of them it is follows from the target; its library is imported then and not before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from mame_sd.captions.captioner_registry import is_captioner, reader_in
from mame_sd.config import MaMeConfig
from mame_sd.diffusion.families.family import REGISTERED
from mame_sd.perception.encoder_registry import is_encoder

if TYPE_CHECKING:
    from mame_sd.captions.handle import CaptionHandle
    from mame_sd.diffusion.handle import MaMeHandle
    from mame_sd.perception.handle import EncoderHandle

Restored = Callable[[Any], AbstractContextManager[None]]


@overload  # a module may be a denoiser, an encoder or a captioner; anything else is a pipeline
def apply_mame(
    target: nn.Module, config: MaMeConfig | str | PathLike[str] | None = None, **fields: Any
) -> MaMeHandle | EncoderHandle | CaptionHandle: ...
@overload
def apply_mame(
    target: object, config: MaMeConfig | str | PathLike[str] | None = None, **fields: Any
) -> MaMeHandle: ...
def apply_mame(
    target: Any, config: MaMeConfig | str | PathLike[str] | None = None, **fields: Any
) -> MaMeHandle | EncoderHandle | CaptionHandle:
    """Merges tokens of `target` until `remove_mame`. Merging that is on it already is replaced.

    Args:
        target: a diffusers pipeline, a denoiser or a single Attention module: its large
            self-attentions merge (`mame_sd.diffusion.apply_denoiser`). Or a model with a vision
            transformer of transformers or timm: its blocks merge between attention and MLP
            (`mame_sd.perception.apply_encoder`). Where both stand in one module, the diffusion
            model merges; give the encoder itself to merge it. Or a LLaVA or Qwen-VL, whose visual
            tokens merge behind its tower (`mame_sd.captions.apply_captioner`).
        config: the settings, or a .json file of them; None is the measured default.
        fields: fields of MaMeConfig, over those of `config`; for a vision transformer also
            `blocks`, `restore`, `prop_attn`; for a diffusion model also `kernel`, a function of
            (q, k, v) that computes attention over the merged keys.

    Warns where a vision transformer of images is to merge so much that a smaller image is nearer.

    Raises:
        TypeError: `target` is neither a module nor a pipeline with a denoiser.
        ValueError: nothing in it could merge, with what was found; or bad settings.
    """
    apply, _ = _room_of(target, fields)
    return _advised(apply(target, _read(config), **fields), 3)


def remove_mame(target: Any, processors: bool = True) -> None:
    """Takes all merging off `target`; results are bit-equal to before it was applied.

    Does nothing if there is none.

    Args:
        target: what `apply_mame` takes.
        processors: also replace each MaMeAttnProcessor by its inner, or diffusers' default,
            processor.
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


@overload
def mame(
    target: nn.Module, config: MaMeConfig | str | PathLike[str] | None = None, **fields: Any
) -> AbstractContextManager[MaMeHandle | EncoderHandle | CaptionHandle]: ...
@overload
def mame(
    target: object, config: MaMeConfig | str | PathLike[str] | None = None, **fields: Any
) -> AbstractContextManager[MaMeHandle]: ...
@contextmanager
def mame(
    target: Any, config: MaMeConfig | str | PathLike[str] | None = None, **fields: Any
) -> Iterator[Any]:
    """Merging for a `with` block.

    Afterwards, raised or not, what was applied before is in force again.

    Takes the arguments of `apply_mame` and gives its handle.
    """
    apply, restored = _room_of(target, fields)
    with restored(target):
        yield _advised(apply(target, _read(config), **fields), 4)


def _room_of(target: Any, fields: dict[str, Any]) -> tuple[Callable[..., Any], Restored]:
    """What merges on such a target, and a `with` block after which all is as before it."""
    if not (reads := _reads_images(target)) and not _only_encoder(target):
        from mame_sd.diffusion.apply_denoiser import apply_mame, hooks_restored

        return apply_mame, hooks_restored
    if fields.pop("kernel", None) is not None:
        raise ValueError("kernel: expected none, for only the layers of diffusion models take one")
    if reads:
        from mame_sd.captions.apply_captioner import apply_captioner, captioner_restored

        return apply_captioner, captioner_restored
    from mame_sd.perception.apply_encoder import apply_encoder, encoder_restored

    return apply_encoder, encoder_restored


def _advised(handle: Any, stacklevel: int) -> Any:
    """Warns where something else is known to be nearer to an encoder without merging."""
    if advice := handle.advice() if hasattr(handle, "advice") else "":
        warnings.warn(advice, UserWarning, stacklevel=stacklevel)
    return handle


def _read(config: MaMeConfig | str | PathLike[str] | None) -> MaMeConfig | None:
    """The settings, read where they are a file."""
    return MaMeConfig.from_file(config) if isinstance(config, (str, PathLike)) else config


def _reads_images(target: Any) -> bool:
    """Whether `target` holds a model that reads images for a language model, known or not."""
    return is_captioner(target) or (reader_in(target) is not None and not _has_denoiser(target))


def _only_encoder(target: Any) -> bool:
    """Whether `target` is a vision transformer's part: it holds one, or is a model of the libraries
    that have them, and nothing of diffusers. A UNet beside an image encoder is what merges.
    """
    if not isinstance(target, nn.Module) or _has_denoiser(target):
        return False
    return is_encoder(target) or any(
        type(module).__module__.startswith(("transformers.", "timm."))
        for module in target.modules()
    )


def _has_denoiser(target: Any) -> bool:
    """Whether a part of diffusers stands in `target`, or a model of the user's own, which may hold
    parts of timm and transformers.
    """
    kinds = {type(module) for module in target.modules()}
    known = {base.__name__ for kind in kinds for base in kind.__mro__}
    diffused = any(kind.__module__.startswith("diffusers.") for kind in kinds)
    return diffused or not known.isdisjoint(REGISTERED)
