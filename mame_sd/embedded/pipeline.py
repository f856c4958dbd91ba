"""An embedded model as a diffusers pipeline that samples with its own steps and guidance."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mame_sd.embedded.model import DEFAULT_GUIDANCE, DEFAULT_STEPS, embedded_model_path


def embedded_pipeline(name: str = "unet", kind: Any = None, **options: Any) -> Any:
    """The embedded model `name` as a pipeline, whose calls default to the model's own steps and
    guidance.

    diffusers' defaults (50 steps, guidance 7.5) burn its images. A call that gives either keeps
    what it gives.

    Args:
        name: "unet" or "transformer".
        kind: the pipeline's class; None is the one that the model names.
        options: of `from_pretrained`.

    Raises:
        FileNotFoundError: this installation has no such model.
    """
    from diffusers import DiffusionPipeline

    with _quiet():
        pipe = (DiffusionPipeline if kind is None else kind).from_pretrained(
            embedded_model_path(name), **options
        )
    own = {"num_inference_steps": DEFAULT_STEPS, "guidance_scale": DEFAULT_GUIDANCE[name]}
    pipe.__class__ = _with_defaults(type(pipe), own)
    return pipe


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings of diffusers and transformers back that are not about this model: that
    torchvision isn't there, which it doesn't use, and that its small autoencoder is of another
    class than Stable Diffusion's.
    """
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    before = [(it, it.get_verbosity()) for it in (diffusers_logging, transformers_logging)]
    try:
        for logging, _ in before:
            logging.set_verbosity_error()
        yield
    finally:
        for logging, level in before:
            logging.set_verbosity(level)


def _with_defaults(base: type[Any], own: dict[str, Any]) -> type[Any]:
    """A class of the same name as `base`, whose call has the defaults `own`."""
    signature = inspect.signature(base.__call__)
    parameters = signature.parameters.values()
    signature = signature.replace(
        parameters=[p.replace(default=own.get(p.name, p.default)) for p in parameters]
    )

    @functools.wraps(base.__call__)
    def with_defaults(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return base.__call__(*args, **kwargs)  # raises, and names itself
        given.apply_defaults()
        return base.__call__(*given.args, **given.kwargs)

    with_defaults.__signature__ = signature  # type: ignore[attr-defined]
    return type(base.__name__, (base,), {"__call__": with_defaults, "__module__": base.__module__})
