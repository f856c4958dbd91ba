"""What diffusers' registry of hooks lacks: putting a hook back, taking one out from under another,
hooks that only read. The one hook in the registry is a `mame_sd.diffusion.layer.MergeHook`.
"""

from __future__ import annotations

from typing import Any

from diffusers.hooks import HookRegistry
from torch import nn


class PreHook:
    """A plain forward pre-hook: it reads a module's arguments and changes nothing.

    Other tools (DeepCache, offloading) replace a module's forward. Our wrapper would be lost under
    theirs, or undo it.
    """

    name: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Reads the call.

        Each class defines its own: `torch.compile` would compile a shared method for each class.
        """
        raise NotImplementedError


class CallHook(PreHook):
    """A PreHook that is told too when the call is over: returned, or raised an Exception (PyTorch
    tells of no KeyboardInterrupt).
    """

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Changes nothing of the call's either."""
        raise NotImplementedError

    def forget(self) -> None:
        """Lets go of all that it noted of calls: it is taken off."""
        raise NotImplementedError


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
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, PreHook) and hook.name == name:
            return hook
    registry = getattr(module, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook(name)


def put_hook(module: nn.Module, hook: Any) -> None:
    """Makes `hook` the one of its name on `module`, inside of all other hooks of its registry,
    whichever came first.

    A cache (diffusers' PyramidAttentionBroadcast and its like) stands in for a forward in some
    steps: around it we would be given what another step merged.
    """
    if hook_on(module, hook.name) is hook:
        return
    take_hook(module, hook.name)
    if isinstance(hook, PreHook):
        module.register_forward_pre_hook(hook, with_kwargs=True)
        if isinstance(hook, CallHook):
            module.register_forward_hook(hook.after, always_call=True)
        return
    registry: Any = HookRegistry.check_if_exists_or_initialize(module)
    first = registry._fn_refs[0] if registry._fn_refs else None
    outermost = module.forward
    if first is not None:
        setattr(module, "forward", _inside(first))  # noqa: B010
    registry.register_hook(hook, hook.name)
    setattr(module, "forward", hook.put(module))  # noqa: B010
    setattr(module, "_replicate_for_data_parallel", no_replica)  # noqa: B010
    if first is not None:
        setattr(module, "forward", outermost)  # noqa: B010
        setattr(
            first, "forward" if first.original_forward is None else "original_forward", hook.entry
        )
        for order in (registry._hook_order, registry._fn_refs):
            order.insert(0, order.pop())


def take_hook(module: nn.Module, name: str) -> None:
    """Takes the hook of that name off `module`, if there is one; what was put around it since then
    stays in force.

    diffusers' own removal gives the next hook the module's forward where it needs our hook's
    `new_forward`, which is then lost. It also drops a function that wraps `module.forward` by hand.
    """
    hook = hook_on(module, name)
    if hook is None:
        return
    if isinstance(hook, PreHook):
        key = next(key for key, value in module._forward_pre_hooks.items() if value is hook)
        del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
        if isinstance(hook, CallHook):
            for key in [key for key, value in module._forward_hooks.items() if value == hook.after]:
                del module._forward_hooks[key]
                module._forward_hooks_always_called.pop(key, None)
            hook.forget()
        return
    module.__dict__.pop("_replicate_for_data_parallel", None)
    registry: Any = module._diffusers_hook
    later = registry._fn_refs[registry._hook_order.index(name) + 1 :]
    around = _inside(later[0]) if later else module.forward
    outer = later[0] if later and later[0].original_forward is not None else None
    if around is not hook.entry:
        hook.entry.__self__.pass_through()
        place = registry._hook_order.index(name)
        del registry.hooks[name], registry._hook_order[place], registry._fn_refs[place]
        hook.let_go()
        return
    kept = None if outer is None else outer.forward
    registry.remove_hook(name, recurse=False)
    hook.let_go()
    if outer is not None:
        outer.original_forward, outer.forward = outer.forward, kept


def _inside(ref: Any) -> Any:
    """The forward that a hook is around."""
    return ref.forward if ref.original_forward is None else ref.original_forward
