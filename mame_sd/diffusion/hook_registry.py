"""Put hooks on modules of a denoiser by name, and remove them.

Pre-hooks only read a module's calls. The merging hook (`mame_sd.diffusion.layer.MergeHook`)
replaces the module's forward (`mame_sd.attach`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from mame_sd.attach import add_hook, drop_hooks, give_back, place_of

_ATTRIBUTE = "_mame_hook"  # attribute of a module, its merging hook


class PreHook:
    """A plain forward pre-hook that reads a module's arguments and changes nothing.

    It replaces no forward, because other tools (DeepCache, offloading) do: ours could be lost under
    theirs, or undo theirs. If a pre-hook has a method `after`, it is called after the module has
    returned or raised an Exception (PyTorch does not call it after a KeyboardInterrupt).
    """

    name: str
    after: Any = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read a call.

        Each class defines its own method, because `torch.compile` would recompile a shared one for
        each class, and it limits recompilations.
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
        add_hook(module, hook, "before")
        if hook.after is not None:
            add_hook(module, hook.after, "end")
        return
    place, attribute = place_of(module)
    bare = attribute not in vars(place)
    setattr(place, attribute, hook.put(module, getattr(place, attribute)))
    hook.entry.__self__.bare = bare
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
        drop_hooks(module, lambda there: there is hook or there == hook.after)
        hook.forget()
        return
    (place, attribute), entry = place_of(module), hook.entry.__self__
    del vars(module)[_ATTRIBUTE], vars(module)["_replicate_for_data_parallel"]
    if vars(place).get(attribute) is not hook.entry:
        entry.hook = None  # a foreign wrapper still calls it: run the module's own forward
    elif place is module and (entry.bare or entry.inner == type(module).forward.__get__(module)):
        give_back(module)
    else:
        setattr(place, attribute, entry.inner)
    hook.entry = None
