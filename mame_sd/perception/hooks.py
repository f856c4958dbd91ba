"""What goes on a model's modules: merged blocks, which replace the forward of theirs, and hooks
around the model's forward.

Each lies in its module's dictionaries, so that a deepcopy has its own. Its type identifies it.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from torch import Tensor, nn

from mame_sd.perception.blocks import MergedBlock
from mame_sd.perception.known_encoders import Encoder
from mame_sd.perception.shared import ForwardState

_ATTENTION = (None, "eager", "sdpa")  # implementations that add a mask of numbers to the logits


class CheckHook:
    """Before the model's forward: raises where its call can't be merged, and notes whether
    attention counts sizes.
    """

    def __init__(self, shared: ForwardState) -> None:
        self.shared = shared

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.shared.active:
            return
        if kwargs.get("pixel_attention_mask") is not None:
            raise ValueError(
                "pixel_attention_mask: expected none, got one: tokens of images that are padded"
                " can't merge. Leave it out for images of one resolution that fill all patches"
            )
        self.shared.again = module.training and _checkpoints_around(module)
        reason = "" if self.shared.prop_attn is False else _no_sizes(module)
        if reason and self.shared.prop_attn:
            raise ValueError(reason)
        self.shared.sized = self.shared.prop_attn is not False and not reason


class GridHook:
    """Notes how the patches lie: as the module gives them that cuts images, [B, C, h, w], or
    videos, [B, C, t, h, w].
    """

    def __init__(self, shared: ForwardState) -> None:
        self.shared = shared

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.shared.grid = math.prod(output.shape[2:-1]), output.shape[-1]


class RestoreHook:
    """Gives the tokens [B, L', C] of the module that heads read all of their places again [B, L,
    C].
    """

    def __init__(self, shared: ForwardState) -> None:
        self.shared = shared

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if not self.shared.active:
            return output
        output = self.shared.restored(output)
        if not self.shared.capture:
            self.shared.plans = {}
        return output


class StagesHook:
    """Gives the hidden states that dense heads read all of their places again: each by the plans of
    the blocks before it.

    Args:
        shared: of all blocks.
        depth: how many blocks there are.
    """

    def __init__(self, shared: ForwardState, depth: int) -> None:
        self.shared, self.depth = shared, depth

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.shared.active or not self.shared.plans:
            return output
        states = output.get("hidden_states") or ()
        first = len(states) - self.depth  # 1 where the blocks' input is among them
        if states:
            output["hidden_states"] = tuple(
                None if state is None else self.shared.restored(state, place - first + 1)
                for place, state in enumerate(states)
            )
        output["last_hidden_state"] = self.shared.restored(output["last_hidden_state"])
        if not self.shared.capture:
            self.shared.plans = {}
        return output


class NoteHook:
    """Remembers what the model's output was, of which `handle.restore` may be asked."""

    def __init__(self, shared: ForwardState) -> None:
        self.shared = shared

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.shared.active and isinstance(output, Tensor):
            self.shared.note(output)


class KeysHook:
    """Keeps what the projection to keys gives [B, L, d] for its block, which may compare it."""

    def __init__(self, block: MergedBlock) -> None:
        self.block = block

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self.block.compares_keys:
            self.block.heard = output


Ours = MergedBlock | CheckHook | GridHook | KeysHook | NoteHook | RestoreHook | StagesHook


def ours_on(module: nn.Module) -> list[Ours]:
    """The blocks and hooks of merging that are on `module`."""
    block = getattr(module.__dict__.get("forward"), "__self__", None)
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [one for one in (block, *hooks) if isinstance(one, Ours)]


def check_free(module: nn.Module, one: Ours) -> None:
    """Raises ValueError where another tool has replaced the forward of `module`."""
    there = module.__dict__.get("forward")
    if getattr(there, "__func__", None) is type(module).forward:
        return  # its own, which transformers 5.0 leaves there when hidden states are asked for
    if isinstance(one, MergedBlock) and there is not None and not ours_on(module):
        raise ValueError(
            f"expected a {type(module).__name__} with its own forward, found another tool's in its"
            f" place ({module.__dict__['forward']!r}); apply merging before that tool"
        )


def put(module: nn.Module, one: Ours) -> None:
    """Puts it on `module`."""
    if isinstance(one, MergedBlock):
        module.forward = one.forward
    elif isinstance(one, CheckHook):
        module.register_forward_pre_hook(one, with_kwargs=True)
    else:
        module.register_forward_hook(one)


def take(module: nn.Module, one: Ours) -> None:
    """Takes it off `module`."""
    if isinstance(one, MergedBlock):
        del module.__dict__["forward"]
        return
    begins = isinstance(one, CheckHook)
    hooks: Any = module._forward_pre_hooks if begins else module._forward_hooks
    key = next(key for key, hook in hooks.items() if hook is one)
    del hooks[key]
    if begins:
        del module._forward_pre_hooks_with_kwargs[key]


def take_all(target: nn.Module) -> None:
    """Takes everything off all modules of `target`."""
    for module in target.modules():
        for one in ours_on(module):
            take(module, one)


def has_mask(known: Encoder, block: nn.Module) -> bool:
    """Whether the attention of `block` takes a mask, or is known to us with one."""
    return (
        known.attend is not None
        or known.mask
        in inspect.signature(type(block.get_submodule(known.attention[1])).forward).parameters
    )


def counts_sizes(model: nn.Module, shared: ForwardState) -> bool:
    """Whether attention of the vision transformer `model` counts sizes, as it is set now."""
    return shared.prop_attn is not False and not _no_sizes(model)


def _no_sizes(model: Any) -> str:
    """Why sizes can't be counted in attention; empty where they can."""
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if kind not in _ATTENTION:
        return (
            f"prop_attn: expected attention implementation 'eager' or 'sdpa', got {kind!r}; set one"
            " of these, or leave sizes out by prop_attn=False"
        )
    if model.training and _checkpoints_around(model):
        return (
            "prop_attn: expected no checkpointing around blocks (timm, transformers 5.0), which"
            " computes them again without the sizes of their tokens, got it; switch one of both off"
            " (prop_attn=False)"
        )
    return ""


def _checkpoints_around(model: Any) -> bool:
    """Whether gradient checkpointing stands around whole blocks, not inside their calls."""
    return getattr(model, "grad_checkpointing", False) or any(  # timm; transformers 5.0
        getattr(block, "gradient_checkpointing", False)
        and type(block).__call__ is not nn.Module.__call__
        for block in model.modules()
    )
