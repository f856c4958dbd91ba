"""Find the parts of a pipeline that denoise."""

from __future__ import annotations

from typing import Any

from torch import nn

from mame_sd.refused import DIFFUSERS, refused_as

# Attributes of a pipeline that may denoise. If a pipeline has several, each computes its own steps,
# its own half of guidance, or its own workflow (MiniMax H3's `transformer_ref`).
DENOISERS = (
    "unet",
    "transformer",
    "transformer_2",
    "transformer_ref",
    "unconditional_transformer",
    "image_unet",
)
# Used if a pipeline has none of those: Stable Cascade, UnCLIP, LTX-2's decoder.
OTHER_NAMES = ("decoder", "prior", "prior_prior", "diffusion_decoder")


def denoisers_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the denoisers of a pipeline by the names of its attributes.

    Refused models are left out. If there are no others, the first of them is returned. The result
    is empty if the pipeline has no denoiser.
    """
    for names in (DENOISERS, OTHER_NAMES):
        models = {name: getattr(pipe, name, None) for name in names}
        every = {name: model for name, model in models.items() if isinstance(model, nn.Module)}
        merging = {n: m for n, m in every.items() if refused_as(m, DIFFUSERS) is None}
        if every:
            return merging or dict(list(every.items())[:1])
    return {}


def has_denoiser_names(target: Any) -> bool:
    """Return True if a pipeline has an attribute for a denoiser, even if it is empty."""
    return any(hasattr(target, name) for name in (*DENOISERS, *OTHER_NAMES))


def denoiser_of(target: Any) -> nn.Module:
    """Return the module to merge in: `target` itself, or a pipeline's UNet or transformer.

    If the pipeline has several (`transformer` and `transformer_2` of Wan 2.2), the result is an
    nn.ModuleDict of them by name.

    Raises:
        TypeError: `target` is neither a module nor a pipeline with a denoiser, or the pipeline has
            not loaded it yet.
    """
    denoisers = {"": target} if isinstance(target, nn.Module) else denoisers_of(target)
    if denoisers:
        return next(iter(denoisers.values())) if len(denoisers) == 1 else nn.ModuleDict(denoisers)
    kind = type(target).__name__
    specified = getattr(target, "_component_specs", ())  # of diffusers' modular pipelines
    names = [n for n in (*DENOISERS, *OTHER_NAMES) if hasattr(target, n) or n in specified]
    if not names:
        raise TypeError(
            "expected a torch module or a diffusers pipeline with a unet or transformer, got"
            f" {kind}"
        )
    how = "call load_components() first" if specified else "give it one first"
    raise TypeError(f"expected a pipeline with its {names[0]}, but {kind} has none yet: {how}")
