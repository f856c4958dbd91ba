"""Put hooks on modules and remove them.

Pre-hooks only read a module's calls. The merging hook (`mame_sd.diffusion.layer.MergeHook`)
replaces the module's forward. It is inside all hooks of diffusers' registry and of accelerate,
whichever came first. A cache (such as PyramidAttentionBroadcast) skips the forward in some steps:
if our hook wrapped the cache, it would receive an output computed in another step. And accelerate's
offloading loads a module's weights inside its hook.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_ATTRIBUTE = "_mame_hook"  # attribute of a module, its merging hook


class PreHook:
    """A plain forward pre-hook that reads a module's arguments and changes nothing.

    Other tools (DeepCache, offloading) replace a module's forward. A wrapper of ours would be lost
    under theirs, or undo it. If a pre-hook has a method `after`, it is called after the module has
    returned or raised an Exception (PyTorch does not call it after a KeyboardInterrupt).
    """

    name: str
    after: Any = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read a call.

        Each class defines its own method, because `torch.compile` would compile a shared method for
        each class.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Drop everything that was noted of calls. It is called when the hook is removed."""


def no_replica() -> None:
    """Refuse replicas of a module, whose forward would compute with the first device's weights.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "nn.DataParallel makes replicas of a merged model, whose layers would compute with the"
        " first device's weights: call remove_mame, or take DistributedDataParallel"
    )


def hook_on(module: nn.Module, name: str) -> Any:
    """Return the hook of that name on `module`, or None."""
    for hook in (*module._forward_pre_hooks.values(), vars(module).get(_ATTRIBUTE)):
        if getattr(hook, "name", None) == name:
            return hook
    return None


def is_hooked(module: nn.Module | None) -> bool:
    """Return True if a hook of ours has replaced the module's forward."""
    return getattr(module, _ATTRIBUTE, None) is not None


def put_hook(module: nn.Module, hook: Any) -> None:
    """Put `hook` on `module`. It replaces a hook of the same name."""
    if hook_on(module, hook.name) is hook:
        return
    remove_hook(module, hook.name)
    if isinstance(hook, PreHook):
        module.register_forward_pre_hook(hook, with_kwargs=True)
        if hook.after is not None:
            module.register_forward_hook(hook.after, always_call=True)
        return
    innermost = _innermost(module)
    if innermost is None:
        bare = "forward" not in vars(module)
        vars(module)["forward"] = hook.put(module, module.forward)
        hook.entry.__self__.bare = bare
    else:
        ref, name = innermost
        setattr(ref, name, hook.put(module, getattr(ref, name)))
    setattr(module, _ATTRIBUTE, hook)
    setattr(module, "_replicate_for_data_parallel", no_replica)  # noqa: B010


def remove_hook(module: nn.Module, name: str) -> None:
    """Remove the hook of that name from `module`, if there is one.

    Wrappers that were put around it since then stay in force.
    """
    hook = hook_on(module, name)
    if hook is None:
        return
    if isinstance(hook, PreHook):
        key = next(key for key, value in module._forward_pre_hooks.items() if value is hook)
        del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
        for key in [key for key, value in module._forward_hooks.items() if value == hook.after]:
            del module._forward_hooks[key]
            module._forward_hooks_always_called.pop(key, None)
        hook.forget()
        return
    innermost, own, entry = _innermost(module), vars(module), hook.entry.__self__
    del own[_ATTRIBUTE], own["_replicate_for_data_parallel"]
    if innermost is not None and getattr(*innermost) is hook.entry:
        setattr(*innermost, entry.inner)
    elif own.get("forward") is not hook.entry:
        entry.hook = None  # a foreign wrapper still calls it: run the module's own forward
    elif entry.bare or entry.inner == type(module).forward.__get__(module):
        del own["forward"]
    else:
        own["forward"] = entry.inner
    hook.entry = None


def _innermost(module: nn.Module) -> tuple[Any, str] | None:
    """Return the place of the forward that the innermost hook of another library calls.

    Returns:
        The hook's reference in diffusers' registry, or for accelerate's hooks the module, and the
        name of its attribute that holds the wrapped function; or None if there is no hook.
    """
    refs = getattr(getattr(module, "_diffusers_hook", None), "_fn_refs", None)
    if refs:
        return refs[0], "forward" if refs[0].original_forward is None else "original_forward"
    offloaded = "_hf_hook" in vars(module) and "_old_forward" in vars(module)
    return (module, "_old_forward") if offloaded else None
