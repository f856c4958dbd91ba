"""Several threads and tasks that generate with one model: what each call keeps for itself, and
changes to the model only between calls.

What a forward leaves for the layers in it (the step, how tokens lie) belongs to its thread: a
forward runs on one thread from beginning to end, and no coroutine is resumed in between. What
outlives a forward (the settings of `using`, plans that two calls share) belongs to the task
(contextvars). Hooks and the settings of all are on the model. They change only while no other
thread is in a forward of it. Nor may one be in a call of a StableDiffusionMaMePipeline with it.
Between two forwards of another pipeline nobody tells of an image under way: a change then holds
from its next step on.
"""

from __future__ import annotations

import threading
import weakref
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

CHANGES = threading.RLock()  # held while hooks or settings of a model change
# Of each model what the calls under way hold, by thread and kind of call. A call that an interrupt
# ended lets go of it too.
_UNDER_WAY: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, str], weakref.ref[Any]]] = (
    weakref.WeakKeyDictionary()
)


class PerTask:
    """A value that each task has its own of: each coroutine that asyncio runs as a task, and each
    thread. Threads of `asyncio.to_thread` begin with that of the task that started them.

    Compiled graphs, which can't read a ContextVar, take the value that was set last in the thread.

    Copies start without values.
    """

    def __init__(self) -> None:
        self.var: ContextVar[Any] = ContextVar("mame_sd", default=None)
        self.mine = threading.local()  # its `value`, for compiled graphs

    @property
    def value(self) -> Any:
        """This task's; None before it has set one."""
        if torch.compiler.is_compiling():
            return getattr(self.mine, "value", None)
        return self.var.get()

    @value.setter
    def value(self, value: Any) -> None:
        self.var.set(value)
        self.mine.value = value

    def __reduce__(self) -> Any:
        return PerTask, ()


class PerThread:
    """A value of a forward, which each thread has its own of; None before it has set one.

    Args:
        latest: a thread that has set none reads what any thread has set last. A backward pass,
            which may run in a thread of its own, thus sees what its forward left.

    Copies start without values.
    """

    def __init__(self, latest: bool = False) -> None:
        self.mine = threading.local()  # its `value`; layers read it there, which costs no call
        self.latest: Any = None
        self._reads_latest = latest

    @property
    def value(self) -> Any:
        """This thread's."""
        return getattr(self.mine, "value", self.latest)

    @value.setter
    def value(self, value: Any) -> None:
        self.mine.value = value
        if self._reads_latest:
            self.latest = value

    def __reduce__(self) -> Any:
        return PerThread, (self._reads_latest,)


def begin(model: nn.Module, call: str, held: Any) -> None:
    """Notes that a call of `model`, of which a thread has one of a kind at most, is under way in
    this thread, until `end`, or until nothing holds `held` any more.
    """
    _UNDER_WAY.setdefault(model, {})[threading.get_ident(), call] = weakref.ref(held)


def end(model: nn.Module, call: str) -> None:
    """Notes that it is over."""
    _UNDER_WAY.get(model, {}).pop((threading.get_ident(), call), None)


def check_idle(root: nn.Module, what: str) -> None:
    """Raise RuntimeError where a call of `root`, or of a model that `root` is part of, is under way
    in another thread; `what` is to be done, for the message.
    """
    # A pipeline's denoisers come in a ModuleDict.
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
