"""Whether a pipeline still has the denoisers that merge, asked where a call of it begins.

A denoiser that takes another's place (`pipe.unet = other`) carries no hooks, so nothing of it would
merge, and nothing would say so. Pipelines of diffusers call `progress_bar` before their steps.
While merging is on, a `PipelineCheck` stands in for that method.
"""

from __future__ import annotations

import sys
from typing import Any

from mame_sd.diffusion.hook_registry import hook_on
from mame_sd.diffusion.layer import MergeHook
from mame_sd.report import NothingMergedError

_ATTRIBUTE = "progress_bar"


class PipelineCheck:
    """Stands in for the `progress_bar` of a pipeline.

    Args:
        handle: the MaMeHandle (which imports this module) of the pipeline.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NothingMergedError where the pipeline has another denoiser now, of which nothing
        merges.
        """
        handle = self.handle
        # A shallow copy of the pipeline holds this very object: the caller's names tell which one
        # it is, `self` in a pipeline's own call.
        names = sys._getframe(1).f_locals
        callers = (names.get("self"), *names.values())
        pipe = next((one for one in callers if check_of(one) is self), handle.pipe)
        if not handle.applied:
            forget_pipeline(pipe)
        elif handle.active:
            for model, told in handle.others(pipe):
                if not any(hook_on(module, MergeHook.name) for module in model.modules()):
                    raise NothingMergedError(f"{told}, or remove_mame(pipe): nothing of it merges")
        return getattr(type(pipe), _ATTRIBUTE)(pipe, *args, **kwargs)


def watch_pipeline(pipe: Any, handle: Any) -> None:
    """Puts a check on a pipeline, if its class has such a method that the user has not replaced."""
    own = vars(pipe).get(_ATTRIBUTE) if hasattr(pipe, "__dict__") else None
    replaced = own is not None and not isinstance(own, PipelineCheck)
    if callable(getattr(type(pipe), _ATTRIBUTE, None)) and not replaced:
        setattr(pipe, _ATTRIBUTE, PipelineCheck(handle))


def check_of(pipe: Any) -> PipelineCheck | None:
    """The check that stands in for the pipeline's method."""
    found = getattr(pipe, "__dict__", {}).get(_ATTRIBUTE)
    return found if isinstance(found, PipelineCheck) else None


def forget_pipeline(pipe: Any) -> None:
    """Takes any check off a pipeline, also one that a shallow copy has of another pipeline."""
    if check_of(pipe) is not None:
        delattr(pipe, _ATTRIBUTE)
