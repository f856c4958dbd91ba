"""Check that a pipeline still has the denoisers that merge, at the beginning of each of its calls.

A denoiser that replaces another (`pipe.unet = other`) has no hooks, so that nothing in it would
merge, without any message. Pipelines of diffusers call `progress_bar` before their steps. While
merging is on, a `PipelineCheck` replaces that method.
"""

from __future__ import annotations

import sys
from typing import Any

from mame_sd.diffusion.hook_registry import hook_on
from mame_sd.diffusion.layer import MergeHook
from mame_sd.report import NothingMergedError

_ATTRIBUTE = "progress_bar"


class PipelineCheck:
    """Replace the `progress_bar` of a pipeline.

    Args:
        handle: the pipeline's MaMeHandle (whose module imports this one).
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the pipeline, then call its own method.

        Raises:
            NothingMergedError: the pipeline has another denoiser now, in which nothing merges.
        """
        handle = self.handle
        # A shallow copy of the pipeline has this same object. The caller's variables tell which
        # pipeline runs: `self` in the pipeline's own call.
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
    """Put a check on a pipeline, if its class has the method and the user has not replaced it."""
    own = vars(pipe).get(_ATTRIBUTE) if hasattr(pipe, "__dict__") else None
    replaced = own is not None and not isinstance(own, PipelineCheck)
    if callable(getattr(type(pipe), _ATTRIBUTE, None)) and not replaced:
        setattr(pipe, _ATTRIBUTE, PipelineCheck(handle))


def check_of(pipe: Any) -> PipelineCheck | None:
    """Return the check that replaces the pipeline's method, or None."""
    found = getattr(pipe, "__dict__", {}).get(_ATTRIBUTE)
    return found if isinstance(found, PipelineCheck) else None


def forget_pipeline(pipe: Any) -> None:
    """Remove any check from a pipeline, even one that a shallow copy has of another pipeline."""
    if check_of(pipe) is not None:
        delattr(pipe, _ATTRIBUTE)
