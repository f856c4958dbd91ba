"""Put merging on a model's modules and take it off again.

Merging consists of bound methods: replaced forwards of blocks, and hooks on inner modules. Each one
is stored in its module's own dictionaries, so that a deepcopy gets its own. The type of the
method's owner (`HookOwner`) identifies it as ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.attach import add_hook, drop_hooks, give_back, hooks_of, place_of, replacements_of

# A module, a place on it, and the method there. Places are "before" and "after" its forward, "end"
# (after its forward has returned or raised), or the name of the method that is replaced.
Placed = tuple[nn.Module, str, Any]


class HookOwner:
    """An object whose methods merging puts on modules."""

    shared: Any  # the `ForwardState` that all owners of one model share
    inner: Sequence[InnerHook] = ()  # hooks on inner modules that belong to this owner


class InnerHook(HookOwner):
    """Observe the output of one inner module of a model.

    Adapters (LoRA) and quantised layers may replace the module after merging was applied; the hook
    then moves to the replacement. The observed module is at `path` in `owner`, which isn't
    replaced; its output is passed to `on_output`.
    """

    def __init__(
        self, shared: Any, owner: nn.Module, path: str, on_output: Callable[[Tensor], None]
    ) -> None:
        self.shared, self.owner, self.path, self.on_output = shared, owner, path, on_output
        self.inner = [self]
        self.child: nn.Module | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out a module that was replaced since, which may hold anything."""
        return {**self.__dict__, "child": self.child if self.child is self._there else None}

    @property
    def _there(self) -> nn.Module | None:
        try:
            return self.owner.get_submodule(self.path)
        except AttributeError:  # it went with a part that was replaced whole
            return None

    def observe(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Pass on the output of the inner module."""
        self.on_output(output)

    def follow(self, *_: Any, late: bool = False) -> None:
        """Move to the module that is at the path now, before it is called.

        Raise RuntimeError if there is none, or if it was replaced and moving would come too `late`
        (it was called already) or happen inside a compiled graph.
        """
        child, expected = self._there, f"expected {self.path} as merging was applied to it, got"
        if child is None:
            if self.shared.active:
                raise RuntimeError(f"{expected} none; call apply_mame again")
        elif child is not self.child:
            if late or torch.compiler.is_compiling():
                raise RuntimeError(
                    f"{expected} a {type(child).__name__} in its place; call the model itself once"
                    " before it compiles, or before you call its parts"
                )
            self.place()

    def place(self) -> None:
        """Attach to the module that is at the path, and detach from any other."""
        there = self._there
        for module in (self.child, there):  # tools copy hooks to what they put in a layer's place
            if module is not None:
                take(module, [self])
        if there is not None:
            put(there, "after", self.observe)
        self.child = there


def is_ours(method: Any) -> bool:
    """Return True for a method that `put` stores on modules."""
    return isinstance(method, MethodType) and isinstance(method.__self__, HookOwner)


def ours_on(module: nn.Module) -> list[Placed]:
    """List the methods of ours on `module`, with their places."""
    every = (*hooks_of(module), *replacements_of(module))
    return [(module, place, method) for place, method in every if is_ours(method)]


def put(module: nn.Module, place: str, method: Callable[..., Any]) -> None:
    """Put `method` on `module`, as a hook or in place of its own method; `place` as in `Placed`."""
    if place in ("before", "after", "end"):
        add_hook(module, method, place)
    else:
        setattr(*place_of(module, place), method)


def take(module: nn.Module, owners: Collection[Any] | None = None) -> None:
    """Take the methods that belong to `owners` off `module`; if None, all of ours."""

    def theirs(method: Any) -> bool:
        return is_ours(method) and (owners is None or method.__self__ in owners)

    for _, place, method in ours_on(module):
        if place not in ("before", "after", "end") and theirs(method):
            give_back(module, place)
    drop_hooks(module, theirs)


def take_all(target: nn.Module, what: str = "remove_mame") -> None:
    """Take all of our methods off every module of `target`.

    Raise RuntimeError, which names `what`, if another thread is in a forward of the model.
    """
    modules = [*target.modules()]
    owners: set[Any] = {method.__self__ for module in modules for *_, method in ours_on(module)}
    for one in owners:
        one.shared.check_idle(what)
    for module in modules + observed_by(owners):
        take(module)


def observed_by(owners: Collection[HookOwner]) -> list[nn.Module]:
    """List observed inner modules, which another tool may have taken out of the model."""
    return [hook.child for one in owners for hook in one.inner if hook.child is not None]
