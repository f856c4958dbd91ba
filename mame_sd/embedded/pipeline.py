"""Load an embedded model as a diffusers pipeline with the model's own defaults."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mame_sd.embedded.model import DEFAULT_GUIDANCE, DEFAULT_STEPS, embedded_model_path


def embedded_pipeline(name: str = "unet", kind: Any = None, **options: Any) -> Any:
    """Load an embedded model as a pipeline that defaults to the model's own steps and guidance.

    diffusers' defaults (50 steps, guidance 7.5) oversaturate its images.

    Args:
        name: "unet" or "transformer".
        kind: class of the pipeline. If None, the model's own.
        options: arguments of `from_pretrained`.

    Raises:
        FileNotFoundError: this installation has no such model.
    """
    from diffusers import DiffusionPipeline

    with _quiet():
        pipe = (DiffusionPipeline if kind is None else kind).from_pretrained(
            embedded_model_path(name), **options
        )
    defaults = {"num_inference_steps": DEFAULT_STEPS, "guidance_scale": DEFAULT_GUIDANCE[name]}
    pipe.__class__ = _with_defaults(type(pipe), defaults)
    return pipe


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of diffusers and transformers that don't concern this model.

    They are about torchvision, which it doesn't use, and about the class of its small autoencoder.
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


def _with_defaults(base: type[Any], defaults: dict[str, Any]) -> type[Any]:
    """Return a class of the same name as `base` whose call has these defaults."""
    signature = inspect.signature(base.__call__)
    parameters = signature.parameters.values()
    signature = signature.replace(
        parameters=[p.replace(default=defaults.get(p.name, p.default)) for p in parameters]
    )

    @functools.wraps(base.__call__)
    def with_defaults(*args: Any, **kwargs: Any) -> Any:
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError:
            return base.__call__(*args, **kwargs)  # raises an error that names the pipeline
        call.apply_defaults()
        return base.__call__(*call.args, **call.kwargs)

    with_defaults.__signature__ = signature  # type: ignore[attr-defined]
    return type(base.__name__, (base,), {"__call__": with_defaults, "__module__": base.__module__})
