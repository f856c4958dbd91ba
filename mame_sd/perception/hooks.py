"""What merging puts on a model's modules: methods of merged blocks, of hooks on inner modules and
of the state that all of them share.

Each lies in its module's dictionaries, so that a deepcopy has its own. Its owner's type identifies
it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

# A module, the place on it, and what lies there: "before" or "after" its forward, "end" (after its
# forward, or what it raised), or the name of the method that is replaced.
Placed = tuple[nn.Module, str, Any]
_OFFLOADED = "_old_forward"  # where accelerate's hooks call a module's own forward


class Merging:
    """An object whose methods merging puts on modules.

    Attributes:
        shared: what all of these objects share, a `ForwardState`.
        inner: the hooks on inner modules that belong to it.
    """

    shared: Any
    inner: Sequence[InnerHook] = ()


class InnerHook(Merging):
    """Hears what one of the model's inner modules gives. It lies on whatever takes the module's
    place too: adapters (LoRA) and quantised layers do after merging was applied.

    Args:
        shared: of all blocks.
        owner: of the module, which stays.
        path: of the module in `owner`.
        heard: called with the path and the module's output.
    """

    def __init__(
        self, shared: Any, owner: nn.Module, path: str, heard: Callable[[str, Tensor], None]
    ) -> None:
        self.shared, self.owner, self.path, self.heard = shared, owner, path, heard
        self.inner = [self]
        self.child: nn.Module | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and files are without a module that was replaced, which may hold anything."""
        return {**self.__dict__, "child": self.child if self.child is self._there else None}

    @property
    def _there(self) -> nn.Module | None:
        try:
            return self.owner.get_submodule(self.path)
        except AttributeError:  # it went with a part that was replaced whole
            return None

    def hear(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """After the inner module."""
        self.heard(self.path, output)

    def follow(self, *_: Any, late: bool = False) -> None:
        """Lie on what stands at the path now, before it is called.

        Raises:
            RuntimeError: nothing stands there. Or another module than before does, and this is too
                `late` for its call, or in a compiled graph.
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
        """Lie on what stands at the path, and on nothing else."""
        there = self._there
        for module in (self.child, there):  # tools copy hooks to what they put in a layer's place
            if module is not None:
                take(module, [self])
        if there is not None:
            put(there, "after", self.hear)
        self.child = there


def _found(module: nn.Module) -> Iterator[tuple[dict[Any, Any], Any, MethodType]]:
    """Yield what of ours is on `module`: the dictionary that it lies in, its key, and it."""
    for there in (module._forward_pre_hooks, module._forward_hooks, module.__dict__):
        for key, method in there.items():
            if isinstance(method, MethodType) and isinstance(method.__self__, Merging):
                yield there, key, method


def ours_on(module: nn.Module) -> list[Placed]:
    """List what of merging is on `module`."""
    found: list[Placed] = []
    for there, key, method in _found(module):
        if there is module._forward_pre_hooks:
            place = "before"
        elif there is module._forward_hooks:
            place = "end" if key in module._forward_hooks_always_called else "after"
        else:
            place = "forward" if key == _OFFLOADED else key
        found.append((module, place, method))
    return found


def check_free(module: nn.Module, name: str = "forward") -> None:
    """Raise ValueError where another tool has replaced a method of `module`."""
    there = module.__dict__.get(slot_of(module, name))
    if getattr(there, "__func__", None) is getattr(type(module), name):
        return  # its own, which transformers 5.0 and accelerate leave there
    if there is not None and not ours_on(module):
        raise ValueError(
            f"expected a {type(module).__name__} with its own {name}, found another tool's in its"
            f" place ({there!r}); apply merging before that tool"
        )


def slot_of(module: nn.Module, name: str) -> str:
    """Name the attribute by which a method of `module` is replaced."""
    return _OFFLOADED if name == "forward" and "_hf_hook" in module.__dict__ else name


def give_back(module: nn.Module, key: str) -> None:
    """Let `module` have its own method again, which was replaced by the attribute `key`."""
    del module.__dict__[key]
    if key == _OFFLOADED:
        setattr(module, key, MethodType(type(module).forward, module))


def put(module: nn.Module, place: str, method: Callable[..., Any]) -> None:
    """Put it on `module`."""
    if place == "before":
        module.register_forward_pre_hook(method, with_kwargs=True)
    elif place in ("after", "end"):
        module.register_forward_hook(method, always_call=place == "end")
    else:
        setattr(module, slot_of(module, place), method)


def take(module: nn.Module, owners: Collection[Any] | None = None) -> None:
    """Take off `module` what belongs to these; None: all that is ours."""
    for there, key, method in [*_found(module)]:
        if owners is None or method.__self__ in owners:
            if there is module.__dict__:
                give_back(module, key)
            else:
                del there[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def take_all(target: nn.Module, what: str = "remove_mame") -> None:
    """Take everything off all modules of `target`.

    Raises:
        RuntimeError: another thread is in a forward of the model.
    """
    modules = [*target.modules()]
    owners: set[Any] = {method.__self__ for module in modules for *_, method in _found(module)}
    for one in owners:
        one.shared.check_idle(what)
    for module in modules + left_by(owners):
        take(module)


def left_by(owners: Collection[Merging]) -> list[nn.Module]:
    """List inner modules that were heard, which another tool may have taken out of the model."""
    return [hook.child for one in owners for hook in one.inner if hook.child is not None]
