"""Which parts of a pipeline denoise."""

from __future__ import annotations

from typing import Any

from torch import nn

# Of a pipeline, what may denoise. Several may be there: each takes its own steps, or its own half
# of guidance.
DENOISERS = ("unet", "transformer", "transformer_2", "unconditional_transformer")
OTHER_NAMES = ("decoder", "prior")  # where there is none of those (Stable Cascade, UnCLIP)


def denoisers_of(pipe: Any) -> dict[str, nn.Module]:
    """The denoisers of a pipeline by the names of its attributes; empty where it has none."""
    models = {name: getattr(pipe, name, None) for name in (*DENOISERS, *OTHER_NAMES)}
    every = {name: model for name, model in models.items() if isinstance(model, nn.Module)}
    found = {name: model for name, model in every.items() if name in DENOISERS}
    return found or dict(list(every.items())[:1])
