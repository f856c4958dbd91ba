"""Whether a pipeline still has the denoisers that merge, asked where a call of it begins.

A denoiser that takes another's place (`pipe.unet = other`) carries no hooks, so nothing of it would
merge, and nothing would say so. Pipelines of diffusers call `progress_bar` before their steps.
While merging is on, a `PipelineCheck` stands in for that method.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from mame_sd.diffusion.denoisers import denoisers_of
from mame_sd.diffusion.hook_registry import hook_on
from mame_sd.diffusion.hooks import MergeHook
from mame_sd.report import NothingMergedError

_ATTRIBUTE = "progress_bar"


class PipelineCheck:
    """Stands in for a pipeline's `progress_bar`.

    Args:
        pipe: the pipeline.
        merging: what merges in each of its denoisers, by their names in the pipeline.
    """

    def __init__(self, pipe: Any, merging: Mapping[str, Sequence[nn.Module]]) -> None:
        self._pipe = held_weakly(pipe)
        self._inner = getattr(type(pipe), _ATTRIBUTE, None)
        self._merging = {
            name: [weakref.ref(module) for module in modules] for name, modules in merging.items()
        }

    def replaced(self) -> str:
        """What is wrong where the pipeline has other denoisers than those that merge; a wrapper
        around one (torch.compile's) is none.
        """
        return next((told for _, told in self._others()), "")

    def _others(self) -> Iterator[tuple[nn.Module, str]]:
        """Denoisers that came after `apply_mame`, and what to say of each."""
        pipe = self._pipe()
        for name, model in denoisers_of(pipe).items() if self._merging else ():
            placed, there = self._merging.get(name), set(model.modules())
            if placed is None:
                came = f"that {type(model).__name__} came after apply_mame"
            elif placed and all(module() not in there for module in placed):
                came = f"it is another {type(model).__name__} than at apply_mame"
            else:
                continue
            yield model, f"expected merging on pipe.{name}, but {came}: call apply_mame again"

    def put(self) -> None:
        """Puts it on the pipeline, if that has such a method of its class."""
        pipe = self._pipe()
        own = vars(pipe).get(_ATTRIBUTE) if hasattr(pipe, "__dict__") else None
        if callable(self._inner) and (own is None or isinstance(own, PipelineCheck)):
            setattr(pipe, _ATTRIBUTE, self)

    def take(self) -> None:
        """Takes it off, if it is there."""
        pipe = self._pipe()
        if getattr(pipe, "__dict__", {}).get(_ATTRIBUTE) is self:
            delattr(pipe, _ATTRIBUTE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NothingMergedError where the pipeline has another denoiser now, of which nothing
        merges, and RuntimeError where it is gone.
        """
        if self._pipe() is None:
            raise RuntimeError(
                "expected the pipeline that merging was applied to, but this is a shallow copy of"
                " it, and it is gone: call apply_mame or remove_mame on the copy"
            )
        for model, told in self._others():
            if not any(hook_on(module, MergeHook.name) for module in model.modules()):
                raise NothingMergedError(f"{told}, or remove_mame(pipe): nothing of it merges")
        assert self._inner is not None
        return self._inner(self._pipe(), *args, **kwargs)

    def __reduce__(self) -> Any:
        """Copies check the pipeline's copy."""
        merging = {
            name: [module for found in placed if (module := found()) is not None]
            for name, placed in self._merging.items()
        }
        return PipelineCheck, (self._pipe(), merging)


def forget_pipeline(pipe: Any) -> None:
    """Takes any check off a pipeline whose merging is removed, also one that a shallow copy has of
    another pipeline.
    """
    if isinstance(getattr(pipe, "__dict__", {}).get(_ATTRIBUTE), PipelineCheck):
        delattr(pipe, _ATTRIBUTE)


def held_weakly(target: Any) -> Callable[[], Any]:
    """A weak reference to `target`, or a strong one where its type allows no weak one."""
    try:
        return weakref.ref(target)
    except TypeError:
        return lambda: target
