"""What diffusers' registry of hooks lacks: hooks that live in copies, putting one back, taking one
out from under another.
"""

from __future__ import annotations

from typing import Any

from diffusers.hooks import HookRegistry, ModelHook
from torch import nn


class AroundHook(ModelHook):
    """Runs around a module's own forward, in deepcopies of the module too.

    The registry keeps `fn_ref.forward`, what is inside.
    """

    name: str
    fn_ref: Any
    entry: Any  # the module's `forward` just after the hook was put on, an Entry's

    def around(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's output; `forward` is its own."""
        raise NotImplementedError

    def put(self) -> None:
        """Is told that it was put on its module."""

    def let_go(self) -> None:
        """Holds on to nothing of the module any more: it was taken off."""
        self.fn_ref = self.entry = None


class Entry:
    """The `forward` of a module that carries an AroundHook, instead of the registry's own.

    diffusers binds a function of its own to each module: a deepcopy would run the original's
        weights, and `torch.compile` would
    compile blocks that differ in nothing else (`compile_repeated_blocks`) each anew. A method is
    one function for all of them.
    """

    def __init__(self, module: nn.Module, hook: AroundHook) -> None:
        self.module = module
        self.hook: AroundHook | None = hook
        self.passed: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        if self.hook is None:
            return self.passed(*args, **kwargs)
        return self.hook.around(self.module, self.hook.fn_ref.forward, *args, **kwargs)

    def pass_through(self) -> None:
        """Does nothing; functions that others have put around it by hand still find it."""
        assert self.hook is not None
        self.passed = self.hook.fn_ref.forward
        self.hook = None


class PreHook:
    """A plain forward pre-hook: it reads a module's arguments and changes nothing.

    Other tools (DeepCache, offloading) put functions of their own instead of a module's forward,
    which wrapping it would get lost under or undo.
    """

    name: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Reads the call.

        A method of each class: one that classes share, `torch.compile` would compile for each anew.
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


def hook_on(module: nn.Module, name: str) -> Any:
    """The hook of that name on `module`."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, PreHook) and hook.name == name:
            return hook
    registry = getattr(module, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook(name)


def put_hook(module: nn.Module, hook: AroundHook | PreHook) -> None:
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
    hook.put()
    hook.entry = Entry(module, hook).forward
    setattr(module, "forward", hook.entry)  # noqa: B010
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

    diffusers' own removal gives the next hook the freed forward instead of its `new_forward`, which
    is then lost, and drops a function that somebody has put around `module.forward` by hand.
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
