"""Several threads that generate with one model: what each call keeps for itself, and changes to the model only between images.

What a forward leaves for the layers in it (the step, how tokens lie) belongs to its thread. What is on the model (hooks, the
settings of all) changes only while no other thread makes an image with it: else one image would be made with two settings.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModularPipeline, ModularPipelineBlocks
from torch import nn

CHANGES = threading.RLock()  # held while hooks or settings of a model change
# What a call of a module, and one of a pipeline (all are made without gradients), runs first.
_MODULE_CALL = nn.Module.__call__.__code__
_NO_GRAD_CALL = torch.no_grad()(lambda: None).__code__


class PerThread:
    """A value that each thread has its own of; None before it has set one.

    Args:
        latest: a thread that has set none reads what any thread has set last: a backward pass, which may run in a thread of its
            own, sees what its forward left.

    Copies start without values.
    """

    def __init__(self, latest: bool = False) -> None:
        self._own = threading.local()
        self._latest: Any = None
        self._reads_latest = latest

    @property
    def value(self) -> Any:
        """This thread's."""
        return getattr(self._own, "value", self._latest)

    @value.setter
    def value(self, value: Any) -> None:
        self._own.value = value
        if self._reads_latest:
            self._latest = value

    def __reduce__(self) -> Any:
        return PerThread, (self._reads_latest,)


def check_idle(root: nn.Module, what: str) -> None:
    """Raise RuntimeError where another thread is in a forward of `root`, or in a call of a pipeline that `root` is part of.

    Args:
        what: is to be done, as "set", for the message.
    """
    with _no_collection():
        for thread, frame in sys._current_frames().items():
            for owner in _owners(frame) if thread != threading.get_ident() else ():
                if _holds(owner, root):
                    raise RuntimeError(
                        f"{what}: expected no image under way in another thread, but one is being made there by "
                        f"{type(owner).__name__}, with two settings then: wait for it, or give each thread settings of its own "
                        "(with handle.using(tau=0.9): ...)"
                    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """The block without garbage collections: while a frame of another thread is read none of its code may run."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _owners(frame: FrameType | None) -> Iterator[Any]:
    """The module, or what may be a pipeline, of each call under way.

    Only of functions that never bind their arguments anew: before Python 3.13 `f_locals` copies all locals and lets go of those
    that it copied before. Of a function that went on, that may free them, thereby run other threads, and read a frame that is gone.
    """
    while frame is not None:
        if frame.f_code is _MODULE_CALL:
            yield frame.f_locals["self"]
        elif frame.f_code is _NO_GRAD_CALL:
            args = frame.f_locals["args"]
            of_pipeline = args and isinstance(args[0], ModularPipelineBlocks)  # which is given its pipeline
            yield from args[: 2 if of_pipeline else 1]
        frame = frame.f_back


def _holds(owner: Any, root: nn.Module) -> bool:
    """Whether `owner` is a module or a pipeline, and `root`, or one of its denoisers, is it or within it."""
    if isinstance(owner, nn.Module):
        roots = list(root.values()) if isinstance(root, nn.ModuleDict) else [root]
        return any(module is known for module in owner.modules() for known in roots)
    if isinstance(owner, DiffusionPipeline | ModularPipeline):
        return any(_holds(part, root) for part in owner.components.values())
    return False
