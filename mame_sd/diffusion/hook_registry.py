"""Putting hooks on modules and taking them off: such that only read their calls, and the one that
merges (`mame_sd.diffusion.layer.MergeHook`), whose forward stands in for the module's own.

The latter is inside of all hooks of diffusers' registry, whichever came first. A cache (diffusers'
PyramidAttentionBroadcast and its like) stands in for a forward in some steps: around it we would be
given what another step merged.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_ATTRIBUTE = "_mame_hook"  # of a module, the hook that merges


class PreHook:
    """A plain forward pre-hook: it reads a module's arguments and changes nothing.

    Other tools (DeepCache, offloading) replace a module's forward. Our wrapper would be lost under
    theirs, or undo it. One with a method `after` is told too when the call is over: returned, or
    raised an Exception (PyTorch tells of no KeyboardInterrupt).
    """

    name: str
    after: Any = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Reads the call.

        Each class defines its own: `torch.compile` would compile a shared method for each class.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Lets go of all that it noted of calls: it is taken off."""


def no_replica() -> None:
    """Raises RuntimeError: a replica's forward would be the one that was put on the module, with
    the first device's weights.
    """
    raise RuntimeError(
        "nn.DataParallel makes replicas of a merged model, whose layers would compute with the"
        " first device's weights: call remove_mame, or take DistributedDataParallel"
    )


def hook_on(module: nn.Module, name: str) -> Any:
    """The hook of that name on `module`."""
    for hook in (*module._forward_pre_hooks.values(), vars(module).get(_ATTRIBUTE)):
        if getattr(hook, "name", None) == name:
            return hook
    return None


def put_hook(module: nn.Module, hook: Any) -> None:
    """Makes `hook` the one of its name on `module`."""
    if hook_on(module, hook.name) is hook:
        return
    take_hook(module, hook.name)
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


def take_hook(module: nn.Module, name: str) -> None:
    """Takes the hook of that name off `module`, if there is one; what was put around it since then
    stays in force.
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
        entry.hook = None  # a wrapper by hand holds it, and calls the module's own
    elif entry.bare or entry.inner == type(module).forward.__get__(module):
        del own["forward"]
    else:
        own["forward"] = entry.inner
    hook.entry = None


def _innermost(module: nn.Module) -> tuple[Any, str] | None:
    """Find the innermost hook that diffusers' registry has put on `module`: its reference, and the
    name by which that has what the hook is around; None: there is no hook.
    """
    refs = getattr(getattr(module, "_diffusers_hook", None), "_fn_refs", None)
    if not refs:
        return None
    return refs[0], "forward" if refs[0].original_forward is None else "original_forward"
