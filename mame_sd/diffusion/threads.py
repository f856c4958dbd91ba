"""Keep the state of several threads and tasks apart that generate with one model.

State that a forward leaves for its layers (the step, the layout of tokens) belongs to its thread: a
forward runs on one thread from beginning to end, and no coroutine is resumed in between. State that
outlives a forward (the settings of `using`, plans that two calls share) belongs to the task
(contextvars). Hooks and the settings for all tasks belong to the model. They change only while no
other thread is in a forward of the model, or in a call of a StableDiffusionMaMePipeline with it.
Other pipelines don't report that they are between two forwards of an image: a change then applies
from the next step on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from mame_sd.forks import free_in_children, in_children

# Held while hooks or settings of a model change.
CHANGES = free_in_children(threading.RLock())
# For each model, an object that each running call holds, by thread and kind of call. An interrupted
# call releases its object too.
_UNDER_WAY: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, str], weakref.ref[Any]]] = (
    weakref.WeakKeyDictionary()
)


class PerTask:
    """A value of each task: of each coroutine that asyncio runs as a task, and of each thread.

    Threads of `asyncio.to_thread` inherit the value of the task that started them. Compiled graphs,
    which can't read a ContextVar, use the value that was last set in the thread. Copies start
    without values.
    """

    def __init__(self) -> None:
        self.var: ContextVar[Any] = ContextVar("mame_sd", default=None)
        self.mine = threading.local()  # `value` for compiled graphs

    @property
    def value(self) -> Any:
        """Return this task's value, None before it has set one."""
        if torch.compiler.is_compiling():
            return getattr(self.mine, "value", None)
        return self.var.get()

    @value.setter
    def value(self, value: Any) -> None:
        self.var.set(value)
        self.mine.value = value

    def __reduce__(self) -> Any:
        return type(self), ()


class Nested(PerTask):
    """Values of the open `using` blocks of each task. The innermost is in force."""

    def innermost(self, default: Any) -> Any:
        """Return the value of this task's innermost open block, or `default` outside all blocks."""
        blocks = self.value
        return blocks[-1][0] if blocks else default

    @contextmanager
    def using(self, value: Any) -> Iterator[None]:
        """Put a value in force in this task alone, for a `with` block."""
        block = [value]  # blocks may have the same value
        self.value = (*(self.value or ()), block)
        try:
            yield
        finally:  # blocks may end in any order
            self.value = tuple(one for one in self.value or () if one is not block)


class PerThread:
    """A value of a forward, one for each thread.

    A thread that has set no value reads the latest value of any thread, or None if there is none.
    So a backward pass, which may run in another thread, reads the value of its forward. Copies
    start without values.
    """

    def __init__(self) -> None:
        self.mine = threading.local()  # `value`, which layers read directly, to save a call
        self.latest: Any = None

    @property
    def value(self) -> Any:
        """Return this thread's value."""
        return getattr(self.mine, "value", self.latest)

    @value.setter
    def value(self, value: Any) -> None:
        self.mine.value = self.latest = value

    def __reduce__(self) -> Any:
        return PerThread, ()


def begin(model: nn.Module, call: str, held: Any) -> None:
    """Note that a call of `model` runs in this thread, until `end` or until `held` is freed.

    Args:
        model: the model.
        call: kind of call. A thread has at most one call of a kind at a time.
        held: an object that lives as long as the call.
    """
    _UNDER_WAY.setdefault(model, {})[threading.get_ident(), call] = weakref.ref(held)


def end(model: nn.Module, call: str) -> None:
    """Note that a call of `model` has ended."""
    _UNDER_WAY.get(model, {}).pop((threading.get_ident(), call), None)


def check_idle(root: nn.Module, what: str) -> None:
    """Raise RuntimeError if another thread runs a call of `root` or of a model that contains it.

    `what` names the intended change in the message.
    """
    # Several denoisers of a pipeline are in a ModuleDict.
    roots = list(root.values()) if isinstance(root, nn.ModuleDict) else [root]
    for model, calls in list(_UNDER_WAY.items()):
        other = any(
            thread != threading.get_ident() and held() is not None
            for (thread, _), held in list(calls.items())
        )
        if other and any(module is known for module in model.modules() for known in roots):
            raise RuntimeError(
                f"{what}: expected no image under way in another thread, but one is being made"
                f" there by {type(model).__name__}, with two settings then: wait for it, or give"
                " each thread settings of its own (with handle.using(tau=0.9): ...)"
            )


def _forget_other_threads() -> None:
    """Drop calls of threads that a child process does not have."""
    for calls in _UNDER_WAY.values():
        for thread, call in [*calls]:
            if thread != threading.get_ident():
                del calls[thread, call]


in_children(_forget_other_threads)
