"""Put functions on modules and remove them: hooks, and replacements of methods.

A function is stored on its module and belongs to an object that is copied with the module, so that
a deepcopy of a module that merges does so by itself. A replaced forward is inside all hooks of
diffusers' registry and of accelerate, whichever came first. A cache (such as
PyramidAttentionBroadcast) skips the forward in some steps: a replacement around the cache would
receive an output computed in another step. And accelerate loads a module's weights inside its hook.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def place_of(module: nn.Module, name: str = "forward") -> tuple[Any, str]:
    """Return the object and its attribute by which a method of a module is called.

    These are the module and the method's name, unless hooks of another library are around its
    forward: then they are what the innermost of them calls.
    """
    if name == "forward":
        refs = getattr(getattr(module, "_diffusers_hook", None), "_fn_refs", None)
        if refs:
            return refs[0], name if refs[0].original_forward is None else "original_forward"
        if "_hf_hook" in vars(module) and "_old_forward" in vars(module):
            return module, "_old_forward"
    return module, name


def replacement_of(module: nn.Module, name: str = "forward") -> Any:
    """Return what replaces a method of a module, or None if nothing does."""
    place, attribute = place_of(module, name)
    return vars(place).get(attribute)


def check_free(module: nn.Module, name: str, is_ours: Callable[[Any], bool]) -> None:
    """Raise ValueError if another tool has replaced the method `name` of a module.

    `is_ours` says whether a replacement is ours.
    """
    there = replacement_of(module, name)
    if getattr(there, "__func__", None) is getattr(type(module), name):
        return  # its own method, which transformers 5.0, accelerate and diffusers store there
    if there is not None and not is_ours(there):
        raise ValueError(
            f"expected a {type(module).__name__} with its own {name}, found another tool's in its"
            f" place ({there!r}); apply merging before that tool"
        )


def give_back(module: nn.Module, name: str = "forward") -> None:
    """Give a module its own method back, which was replaced."""
    place, attribute = place_of(module, name)
    if place is module and attribute == name:
        del vars(module)[name]
    else:
        setattr(place, attribute, MethodType(getattr(type(module), name), module))


def add_hook(module: nn.Module, hook: Callable[..., Any], place: str) -> None:
    """Put a hook on a module: "before" its forward, "after" it, or at its "end", if it raises too.

    A hook before the forward gets named arguments too.
    """
    if place == "before":
        module.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        module.register_forward_hook(hook, always_call=place == "end")


def replacements_of(module: nn.Module) -> list[tuple[str, Any]]:
    """Return all attributes of a module by name, and what replaces its forward."""
    names = dict.fromkeys(("forward", *vars(module)))
    return [(name, replacement_of(module, name)) for name in names if name != "_old_forward"]


def hooks_of(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the place of each hook on a module, as `add_hook` takes it, and the hook."""
    always = module._forward_hooks_always_called
    after = ((("after", "end")[key in always], hook) for key, hook in module._forward_hooks.items())
    return [*(("before", hook) for hook in module._forward_pre_hooks.values()), *after]


def drop_hooks(module: nn.Module, is_ours: Callable[[Any], bool]) -> None:
    """Remove those hooks from a module of which `is_ours` is true."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if is_ours(hook)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
