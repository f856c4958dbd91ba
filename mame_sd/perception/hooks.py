"""What goes on a model's modules: merged blocks, which replace the forward of theirs, and hooks.

Each lies in its module's dictionaries, so that a deepcopy has its own. Its type identifies it.
"""

from __future__ import annotations

import inspect
import math
import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.perception.merged_block import MergedBlock
from mame_sd.perception.shared import ForwardState
from mame_sd.upstream import outside_old_graphs


class Hook:
    """A forward hook that merging puts on a module."""

    def __init__(self, shared: ForwardState) -> None:
        self.shared = shared

    def put(self, module: nn.Module) -> None:
        """Put it on `module`."""
        module.register_forward_hook(self)  # type: ignore[arg-type]

    def take(self, module: nn.Module) -> None:
        """Take it off `module`."""
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


class InnerHook(Hook):
    """A hook on one of the model's inner modules, and on whatever takes its place: adapters (LoRA)
    and quantised layers do after merging was applied.

    Args:
        shared: of all blocks.
        owner: of the module, which stays.
        path: of the module in `owner`.
    """

    def __init__(self, shared: ForwardState, owner: nn.Module, path: str) -> None:
        super().__init__(shared)
        self.owner, self.path = owner, path
        self.child: nn.Module | None = None

    def put(self, module: nn.Module) -> None:
        self.take(module)  # tools copy hooks to what they put in a layer's place
        super().put(module)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and files are without a module that was replaced, which may hold anything."""
        return {**self.__dict__, "child": self.child if self.child is self._there else None}

    @property
    def _there(self) -> nn.Module | None:
        try:
            return self.owner.get_submodule(self.path)
        except AttributeError:  # it went with a part that was replaced whole
            return None

    def follow(self, late: bool = False) -> None:
        """Lie on what stands at the path now; `late`: it has computed already."""
        child = self._there
        if child is None:
            if not self.shared.active:
                return
            raise RuntimeError(
                f"expected {self.path} as merging was applied to it, got none; call apply_mame"
                " again"
            )
        if child is self.child:
            return
        if torch.compiler.is_compiling() or (late and self.shared.active):
            raise RuntimeError(
                f"expected {self.path} as merging was applied to it, got a {type(child).__name__}"
                " in its place; call the model itself once before it compiles, or before you call"
                " its parts"
            )
        self.leave()
        self.put(child)
        self.child = child

    def leave(self) -> None:
        """Lie on nothing."""
        for module in (self.child, self._there):
            if module is not None:
                self.take(module)
        self.child = None


class Follow(Hook):
    """Before the forward of a module that holds another: lets the `inner` hook follow what takes
    the other's place. A model's parts may be called without the model (timm's `forward_features`).

    Args:
        inner: the hook.
        late: this module computes after the other, and refuses what the hook has missed.
    """

    def __init__(self, inner: InnerHook, late: bool = False) -> None:
        super().__init__(inner.shared)
        self.inner, self.late = inner, late

    def put(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self)
        self.inner.follow()

    def take(self, module: nn.Module) -> None:
        super().take(module)
        self.inner.leave()

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.inner.follow(self.late)


class CheckHook(Hook):
    """Before the model's forward: raises where its call can't be merged."""

    def __init__(self, shared: ForwardState, mask: str) -> None:
        super().__init__(shared)
        self.mask = mask
        self.names = list(inspect.signature(type(shared.model).forward).parameters)[1:]

    def put(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self, with_kwargs=True)

    @outside_old_graphs
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self.shared.running.add(threading.get_ident())
        if not self.shared.active:
            return
        if getattr(module, "_is_replica", False):
            raise RuntimeError(
                "expected one device, got a replica of torch.nn.DataParallel, whose blocks would"
                " compute with the first device's weights; take DistributedDataParallel, or call"
                " remove_mame first"
            )
        if torch.jit.is_tracing():
            raise RuntimeError(
                "expected torch.export of a merged model, got torch.jit.trace, which fixes what one"
                " image's tokens merged to; take torch.export, or call remove_mame first"
            )
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if given.get("pixel_attention_mask") is not None:
            raise ValueError(
                "pixel_attention_mask: expected none, got one: tokens of images that are padded"
                " can't merge. Leave it out for images of one resolution that fill all patches"
            )
        self.shared.now.unmasked = given.get(self.mask) is None


class EndHook(Hook):
    """After the model's forward, or what it raised."""

    def put(self, module: nn.Module) -> None:
        module.register_forward_hook(self, always_call=True)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.shared.now.unmasked = False
        if not torch.compiler.is_compiling():
            self.shared.running.discard(threading.get_ident())


class NoteHook(Hook):
    """Remembers what a module gave, of which `handle.restore` may be asked."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.shared.note(output)


class GridHook(InnerHook):
    """Notes at how many places a convolution computes, and of the last one before the blocks how
    the patches lie: [B, C, h, w], of videos [B, C, t, h, w].
    """

    def __init__(self, shared: ForwardState, owner: nn.Module, path: str, patches: bool) -> None:
        super().__init__(shared, owner, path)
        self.patches = patches

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.shared.places[self.path] = math.prod(output.shape[2:])
        if self.patches:
            self.shared.now.grid = math.prod(output.shape[2:-1]), output.shape[-1]


class KeysHook(InnerHook):
    """Keeps what the projection to keys gives [B, L, d] for its block, which may compare it."""

    def __init__(self, block: MergedBlock, path: str) -> None:
        super().__init__(block.shared, block.block, path)
        self.block = block

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self.shared.active and self.block.compared != "x":
            self.shared.now.keys[self.block.number] = output


class MapsHook(Hook):
    """Replaces a method that gives feature maps of several blocks: these give all tokens in it."""

    def __init__(self, shared: ForwardState, name: str) -> None:
        super().__init__(shared)
        self.name = name

    def put(self, module: nn.Module) -> None:
        setattr(module, self.name, partial(self, module))

    def take(self, module: nn.Module) -> None:
        module.__dict__.pop(self.name, None)

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        method, now = getattr(type(module), self.name), self.shared.now
        outer, now.dense = now.dense, True
        try:
            return method(module, *args, **kwargs)
        finally:
            now.dense, now.whole = outer, None
            self.shared.ended()


Ours = MergedBlock | Hook


def ours_on(module: nn.Module) -> list[Ours]:
    """List the blocks and hooks of merging that are on `module`."""
    found = [getattr(module.__dict__.get(name), "__self__", None) for name in _SLOTS]
    found += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    found += [one.func for one in module.__dict__.values() if isinstance(one, partial)]
    return [one for one in found if isinstance(one, MergedBlock | Hook)]


_SLOTS = ("forward", "_old_forward")  # the second is where accelerate's hooks call a module's own


def _slot(module: nn.Module) -> str:
    return _SLOTS["_hf_hook" in module.__dict__]


def check_free(module: nn.Module, one: Ours) -> None:
    """Raise ValueError where another tool has replaced the forward of `module`."""
    there = module.__dict__.get(_slot(module))
    if getattr(there, "__func__", None) is type(module).forward:
        return  # its own, which transformers 5.0 leaves there when hidden states are asked for
    if isinstance(one, MergedBlock) and there is not None and not ours_on(module):
        raise ValueError(
            f"expected a {type(module).__name__} with its own forward, found another tool's in its"
            f" place ({there!r}); apply merging before that tool"
        )


def put(module: nn.Module, one: Ours) -> None:
    """Put it on `module`."""
    if isinstance(one, MergedBlock):
        setattr(module, _slot(module), one.forward)
    else:
        one.put(module)


def take(module: nn.Module, one: Ours) -> None:
    """Take it off `module`."""
    if not isinstance(one, MergedBlock):
        one.take(module)
    elif _slot(module) == "forward":
        del module.__dict__["forward"]
    else:
        module._old_forward = partial(type(module).forward, module)  # type: ignore[assignment]


def take_all(target: nn.Module, what: str = "remove_mame") -> None:
    """Take everything off all modules of `target`.

    Raises:
        RuntimeError: another thread is in a forward of the model.
    """
    found = [(module, one) for module in target.modules() for one in ours_on(module)]
    for _, one in found:
        one.shared.check_idle(what)
    for module, one in found:
        take(module, one)
