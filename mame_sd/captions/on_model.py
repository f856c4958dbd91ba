"""What replaces `forward` and `generate` of a captioner, and for whom it merges.

`apply_mame` merges for every thread, a `mame()` block for the thread or task that opened it. What a
call needs to know belongs to the call and to its cache, so that later words of an answer fit its
prompt whatever other threads do meanwhile.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from mame_sd.captions.calls import (
    Calls,
    after_images,
    check_empty,
    check_writing,
    has_images,
    tower_turn,
)
from mame_sd.captions.prompts import Image, of_prompts
from mame_sd.forks import free_in_children
from mame_sd.perception.hooks import check_free, give_back, slot_of
from mame_sd.upstream import cache_in

_NAMES = ("forward", "generate")
_CHANGES = free_in_children(threading.RLock())  # held while what stands on a model changes


class Slot:
    """A place for merging: one for all threads, and one for each block that is open."""

    calls: Calls | None = None  # what merges


_OPEN: ContextVar[tuple[Slot, ...]] = ContextVar("open", default=())  # of all models, as nested


# The `generate` that runs: on which model, and the images of each of its prompts.
_WRITING: ContextVar[tuple[OnModel, Calls, list[list[Image]]] | None]
_WRITING = ContextVar("writing", default=None)


class OnModel:
    """What stands on one captioner. Copies of the model have what `apply_mame` put there, and no
    block's.

    Attributes:
        base: of every thread that is in no block.
        blocks: those that are open.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.base = Slot()
        self.blocks: list[Slot] = []
        self._writing = 0  # answers under way that need the model to call us

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "blocks": [], "_writing": 0}

    @property
    def slot(self) -> Slot:
        """Of this thread or task: its innermost block on this model, else everybody's."""
        return next((one for one in reversed(_OPEN.get()) if one in self.blocks), self.base)

    @property
    def slots(self) -> list[Slot]:
        """All of them."""
        return [self.base, *self.blocks]

    def leave(self) -> None:
        """Takes the replacements off the model where nothing needs them any more."""
        with _CHANGES:
            if not self.blocks and self.base.calls is None and not self._writing:
                for key in (slot_of(self.model, name) for name in _NAMES):
                    if isinstance(self.model.__dict__.get(key), StandIn):
                        give_back(self.model, key)

    def forward(self, call: dict[str, Any]) -> Any:
        """Make the model's own call, with fewer tokens where it is given images."""
        own = partial(type(self.model).forward, self.model)
        if not has_images(call):
            writing = _WRITING.get()
            if writing is None or writing[0] is not self or not self._is_prompt(call):
                return own(**after_images(call))
            _, merging, rows = writing
            times = len(call["input_ids"]) // len(rows)  # beams
            return merging.forward(own, call, [one for row in rows for one in row * times])
        calls = self._merging(call)
        if calls is not None:
            return calls.forward(own, call)
        with tower_turn():
            return own(**call)

    def generate(self, call: dict[str, Any]) -> Any:
        """Write after prompts, whose images go through the tower before."""
        own = partial(type(self.model).generate, self.model)
        calls = self._merging(call)
        if calls is None:
            return own(**call)
        check_writing(self.model, call)
        if call.get("inputs") is not None:
            call["input_ids"] = call.pop("inputs")
        with torch.no_grad():
            seen = calls.images({k: value for k, value in call.items() if value is not None})
        call = {k: value for k, value in call.items() if k not in ("pixel_values", "image_sizes")}
        token = int(self.model.config.image_token_id)
        rows = of_prompts(call["input_ids"], token, seen)
        with _CHANGES:
            self._writing += 1
        turn = _WRITING.set((self, calls, rows))
        try:
            return own(**call)
        finally:
            _WRITING.reset(turn)
            with _CHANGES:
                self._writing -= 1
                self.leave()

    def _is_prompt(self, call: dict[str, Any]) -> bool:
        """Tell whether a call reads prompts with image tokens, not a word that was written."""
        ids = call.get("input_ids")
        if ids is None or ids.shape[1] == 1:
            return False
        return bool((ids == self.model.config.image_token_id).any())

    def _merging(self, call: dict[str, Any]) -> Calls | None:
        """Return what merges a call's images for this thread; None: it has none, or nothing does.

        Raises:
            RuntimeError: nothing stands there for this thread, and a block of another is open.
            ValueError: nothing merges, and the call's cache holds merged prompts.
        """
        calls = None
        if has_images(call):
            slot = self.slot
            calls = slot.calls
            if slot is self.base and calls is None and self.blocks:
                raise RuntimeError(
                    "expected images from a thread whose own mame() block is open, got them from"
                    f" another while one merges this {type(self.model).__name__}: open a block in"
                    " each thread, or call apply_mame once for all"
                )
        if calls is not None and calls.active:
            return calls
        check_empty(cache_in(call), merged=True)
        return None


class StandIn:
    """Replaces one method of a model, with the same signature."""

    def __init__(self, on: OnModel, name: str) -> None:
        self.on, self.name = on, name

    @property
    def __signature__(self) -> inspect.Signature:
        kind: Any = type(self.on.model)
        return _signature(kind, self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = [name for name in self.__signature__.parameters if name != "kwargs"]
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        return getattr(self.on, self.name)(call)


@lru_cache
def _signature(kind: Any, name: str) -> inspect.Signature:
    """Return the signature of a method without its first argument."""
    own = inspect.signature(getattr(kind, name))
    return own.replace(parameters=[*own.parameters.values()][1:], return_annotation=Any)


def on_model(module: nn.Module, name: str = "forward") -> OnModel | None:
    """Return what stands on `module`, by the method that it replaces."""
    there = module.__dict__.get(slot_of(module, name))
    return there.on if isinstance(there, StandIn) else None


def put(calls: Calls) -> None:
    """Merges by `calls` from now on: for the block that this thread is in, else for all.

    Raises:
        ValueError: another tool has replaced `forward` or `generate`.
    """
    with _CHANGES:
        _placed(calls.model).slot.calls = calls


def take(module: nn.Module, calls: Calls | None = None) -> None:
    """Merges by `calls` no more, for anybody; None: by nothing, for the block that this thread is
    in, else for all.
    """
    on = on_model(module) or on_model(module, "generate")  # a tool may have wrapped forward since
    if on is None:
        return
    with _CHANGES:
        for slot in [on.slot] if calls is None else on.slots:
            if calls is None or slot.calls is calls:
                slot.calls = None
        on.leave()


@contextmanager
def block(model: nn.Module) -> Iterator[None]:
    """Take off after the block what this thread or task put on `model`, in any order of blocks."""
    slot = Slot()
    with _CHANGES:
        on = _placed(model)
        slot.calls = on.slot.calls  # until another is put there
        on.blocks.append(slot)
    _OPEN.set((*_OPEN.get(), slot))
    try:
        yield
    finally:
        with _CHANGES:
            on.blocks.remove(slot)
            on.leave()
        _OPEN.set(tuple(one for one in _OPEN.get() if one is not slot))


def _placed(model: nn.Module) -> OnModel:
    """Return what stands on `model`, and put it there if nothing does."""
    on = on_model(model)
    if on is None:
        on = OnModel(model)
        for name in _NAMES:
            check_free(model, name)
        model.__dict__.update({slot_of(model, name): StandIn(on, name) for name in _NAMES})
    return on
