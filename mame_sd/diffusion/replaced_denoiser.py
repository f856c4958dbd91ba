"""Refuse a pipeline's call if a denoiser that merges was replaced by one that doesn't.

A denoiser that replaces another (`pipe.unet = other`) has no hooks, so that nothing in it would
merge, without any message. Pipelines of diffusers call their method `progress_bar` before the first
step. That method of their class runs the check of those pipelines that have one.
"""

from __future__ import annotations

import functools
from typing import Any

from mame_sd.diffusion.hook_registry import hook_on
from mame_sd.diffusion.layer import MergeHook
from mame_sd.report import NothingMergedError

_ATTRIBUTE = "_mame_check"  # of a pipeline


class PipelineCheck:
    """Check pipelines whose merging a handle controls.

    Args:
        handle: the pipeline's MaMeHandle (whose module imports this one).
        owner: the class that defines `progress_bar` for the pipeline.
    """

    def __init__(self, handle: Any, owner: Any) -> None:
        self.handle, self.owner = handle, owner
        _watch(owner)

    def __setstate__(self, values: dict[str, Any]) -> None:
        """Watch the class, since a pipeline that was saved whole merges without `apply_mame`."""
        vars(self).update(values)
        _watch(self.owner)

    def run(self, pipe: Any) -> None:
        """Check a pipeline, which may be a shallow copy of the one that merging was applied to.

        Raises:
            NothingMergedError: the pipeline has another denoiser now, in which nothing merges.
        """
        handle = self.handle
        if not handle.applied:
            forget_pipeline(pipe)
        elif handle.active:
            for model, message in handle.others(pipe):
                if not any(hook_on(module, MergeHook.name) for module in model.modules()):
                    raise NothingMergedError(
                        f"{message}, or remove_mame(pipe): nothing of it merges"
                    )


def _watch(owner: Any) -> None:
    """Let the `progress_bar` of a class run the check of a pipeline first."""
    method = owner.progress_bar
    if hasattr(method, "_mame_watched"):
        return

    @functools.wraps(method)
    def progress_bar(pipe: Any, *args: Any, **kwargs: Any) -> Any:
        check = check_of(pipe)
        if check is not None:
            check.run(pipe)
        return method(pipe, *args, **kwargs)

    progress_bar._mame_watched = True  # type: ignore[attr-defined]
    owner.progress_bar = progress_bar


def watch_pipeline(pipe: Any, handle: Any) -> None:
    """Check a pipeline from now on, if its class has the method."""
    owners = (kind for kind in type(pipe).__mro__ if "progress_bar" in vars(kind))
    if hasattr(pipe, "__dict__") and (owner := next(owners, None)) is not None:
        vars(pipe)[_ATTRIBUTE] = PipelineCheck(handle, owner)


def check_of(pipe: Any) -> PipelineCheck | None:
    """Return the check of a pipeline, or None."""
    check: PipelineCheck | None = getattr(pipe, "__dict__", {}).get(_ATTRIBUTE)
    return check


def forget_pipeline(pipe: Any) -> None:
    """Remove the check of a pipeline, even if the pipeline is a shallow copy of another."""
    getattr(pipe, "__dict__", {}).pop(_ATTRIBUTE, None)
