"""Which parts of a pipeline denoise."""

from __future__ import annotations

from typing import Any

from torch import nn

from mame_sd.diffusion.families.refused import refused_as

# Of a pipeline, what may denoise. Several may be there: each takes its own steps, its own half of
# guidance, or its own workflow (MiniMax H3's `transformer_ref`).
DENOISERS = (
    "unet",
    "transformer",
    "transformer_2",
    "transformer_ref",
    "unconditional_transformer",
    "image_unet",
)
# Where there is none of those: Stable Cascade, UnCLIP, LTX-2's decoder.
OTHER_NAMES = ("decoder", "prior", "prior_prior", "diffusion_decoder")


def denoisers_of(pipe: Any) -> dict[str, nn.Module]:
    """The denoisers of a pipeline by the names of its attributes; empty where it has none.

    Of those that merging is refused for, one where there is no other.
    """
    for names in (DENOISERS, OTHER_NAMES):
        models = {name: getattr(pipe, name, None) for name in names}
        every = {name: model for name, model in models.items() if isinstance(model, nn.Module)}
        merging = {n: m for n, m in every.items() if refused_as(m) is None}
        if every:
            return merging or dict(list(every.items())[:1])
    return {}


def has_denoiser_names(target: Any) -> bool:
    """Return whether a pipeline has a place for a denoiser, filled or not."""
    return any(hasattr(target, name) for name in (*DENOISERS, *OTHER_NAMES))


def denoiser_of(target: Any) -> nn.Module:
    """The module that merging goes on: `target` itself, or a pipeline's UNet or transformer.

    Where the pipeline has several (`transformer` and `transformer_2` of Wan 2.2), it is an
    nn.ModuleDict of them by name.

    Raises:
        TypeError: neither a module nor a pipeline with a denoiser, or it has not loaded it yet.
    """
    found = {"": target} if isinstance(target, nn.Module) else denoisers_of(target)
    if found:
        return next(iter(found.values())) if len(found) == 1 else nn.ModuleDict(found)
    kind = type(target).__name__
    specified = getattr(target, "_component_specs", ())  # of diffusers' modular pipelines
    known = [n for n in (*DENOISERS, *OTHER_NAMES) if hasattr(target, n) or n in specified]
    if not known:
        raise TypeError(
            "expected a torch module or a diffusers pipeline with a unet or transformer, got"
            f" {kind}"
        )
    how = "call load_components() first" if specified else "give it one first"
    raise TypeError(f"expected a pipeline with its {known[0]}, but {kind} has none yet: {how}")
