"""Restore MLPs that share their projections with the attention, in single-stream blocks.

FLUX's single-stream blocks compute `proj_out([attention | act(proj_mlp(x))])`. Flux 2 has one
projection for queries, keys, values and the MLP, too. There is no module around the MLP alone. So
the block enters a `FusedMLPMode` (`FusedMLP`), the projection into the MLP chooses tokens and
computes the MLP's columns on them (`FusedInHook`), and the projection out of both takes the chosen
tokens from the mode, and restores the MLP's part of its output (`FusedOutHook`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mame_sd.diffusion.context import Tokens
from mame_sd.diffusion.hook_registry import is_hooked
from mame_sd.diffusion.restoring import CACHED, PartHook, RestoringForward, TokensCall, has_cache
from mame_sd.diffusion.rows import FusedMLPCall, FusedMLPMode, Rows, running_fused_mlp, running_rows

NOT_PLAIN = "its projection of queries, keys and MLP has a LoRA or is quantised"
REPLACED = "another tool has replaced or hooked its projection, as a LoRA added later"


class FusedInHook(PartHook):
    """Compute the projection into an MLP on a few tokens.

    If the block only calls an activation and concatenates (`Rows.activation`), the columns don't
    pass through the block, which gets none. Otherwise all other tokens get zeros, which
    `FusedOutHook` does not read.

    Attributes:
        ahead: number of columns ahead of the MLP's, which are computed on all tokens.
    """

    keep_of = "mlp_share"
    for_mlps = True
    of_references = True
    ahead = 0

    def output(self, call: TokensCall) -> Any:
        """See `RestoreHook`."""
        running, config, of_block = running_fused_mlp(), self.config, running_rows()
        if of_block is not None and of_block.activation is not None:
            part = of_block.take(call.x)
            if part is not None:
                return _aside(of_block, of_block.activation(call.run(part)), call.x)
        if running is None or config is None or of_block is not None:
            return call.run() if self.ahead else super().output(call)
        if (choice := self.chosen(call, call.x, config)) is None:
            return call.run()
        chosen, tokens, start = choice
        running.rows = rows = Rows(chosen, tokens, running.activation)
        part = rows.take(call.x, start)
        assert part is not None
        self.merged(chosen, tokens)
        if rows.activation is not None:
            return _aside(rows, rows.activation(call.run(part)), call.x)
        if not self.ahead:
            return rows.put(call.run(part), call.x, start)
        linear: Any = call.module
        weight, bias = linear.weight, linear.bias
        biases = (None, None) if bias is None else (bias[: self.ahead], bias[self.ahead :])
        y = F.linear(call.x, weight[: self.ahead], biases[0])
        mlp = rows.put(F.linear(part, weight[self.ahead :], biases[1]), call.x, start)
        return torch.cat([y, mlp], -1)

    def refused(self, call: TokensCall, tokens: Tokens) -> str:
        """See `RestoreHook`."""
        return NOT_PLAIN if self.ahead and not _is_plain(call) else ""


class FusedOutHook(PartHook):
    """Compute `proj_out([attention | mlp])`, where the MLP was computed on a few tokens.

    The projection is linear: the attention's columns are computed on all tokens, the MLP's on the
    chosen ones, and their output is restored.
    """

    for_mlps = True

    def output(self, call: TokensCall) -> Any:
        """See `RestoreHook`."""
        running, of_block = running_fused_mlp(), running_rows()
        if of_block is not None and of_block.hidden is not None:
            few, columns, of_block.hidden = of_block.take(call.x), of_block.hidden, None
            assert few is not None
            return of_block.put(call.run(torch.cat([few, columns], -1)), call.x)
        if running is None or running.rows is None:
            return super().output(call)
        rows, running.rows = running.rows, None
        linear: Any = call.module
        width: int = linear.out_features  # of the attention's output, too
        attention, mlp = call.x.split([width, call.x.shape[-1] - width], -1)
        hidden = rows.take(mlp) if rows.hidden is None else rows.hidden
        assert hidden is not None
        if _is_plain(call):
            y = F.linear(attention, linear.weight[:, :width], linear.bias)
            f = F.linear(hidden, linear.weight[:, width:])
            return rows.add_restored_(y, f)
        # A LoRA, or quantised weights: any linear map.
        few, y = rows.take(attention), call.run(F.pad(attention, (0, hidden.shape[-1])))
        assert few is not None
        f = call.run(torch.cat([few, hidden], -1)) - rows.take(y)
        return y + rows.restore(f)


class FusedMLP:
    """Compute calls of a block on all tokens, but for the MLP that the block fuses with attention.

    Args:
        hook: the hook on the projection into the MLP.
        into: path of that projection in the block.
        out: path of the projection out of attention and MLP.
    """

    def __init__(self, hook: FusedInHook, into: str, out: str) -> None:
        self.hook, self.into, self.out = hook, into, out

    def output(self, call: TokensCall) -> Any:
        """Return the block's output."""
        hook = self.hook
        if hook.config is None or hook.config.mlp_share == 1:
            return call.run()
        reason = self._reason(call.module)
        if not reason:
            running = FusedMLPCall(self.activation(call))
            with FusedMLPMode(running):
                output = call.run()
            if running.rows is None:
                return output
            reason = REPLACED  # nothing took the rows: another module projected out
            if not torch.compiler.is_compiling():
                hook.never = reason
        hook.left_alone(reason, call.x)
        return call.run()

    def activation(self, call: TokensCall) -> Callable[[Tensor], Tensor] | None:
        """Return the `activation` of `Rows` in a call of the block."""
        return _activation(call, self.into)

    def _reason(self, block: nn.Module) -> str:
        """Return why the MLP can't be restored as the projections are now. Empty if it can."""
        into, out = module_at(block, self.into), module_at(block, self.out)
        # A LoRA added later may wrap the projection in: the computed rows stay right.
        hooked = is_hooked(into) or is_hooked(getattr(into, "base_layer", None))
        if not (hooked and is_hooked(out) and _is_outermost(out)):
            return REPLACED
        return CACHED if any(map(has_cache, (into, out))) else ""


def _aside(rows: Rows, hidden: Tensor, x: Tensor) -> Tensor:
    """Keep an MLP's columns of a few tokens in `rows`, and return none for the tokens of x."""
    rows.hidden = hidden
    return hidden.new_empty(*x.shape[:2], 0)


def module_at(module: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a path, or None if there is none."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _activation(call: TokensCall, into: str) -> Callable[[Tensor], Tensor] | None:
    """Return the activation of each number that is all that a block does to the MLP's columns.

    Then the block concatenates them to the attention's, as the single-stream blocks of diffusers do
    that have `proj_mlp` and `act_mlp`. Anything that a tool has put around one of these modules may
    need the columns of each token: then return None. Compiled graphs move no zeros.
    """
    if torch.compiler.is_compiling() or into != "proj_mlp":
        return None
    block = call.module
    act: Any = getattr(block, "act_mlp", None)
    into_mlp, out = block.get_submodule(into), block.get_submodule("proj_out")
    class_forward: Any = type(block).forward
    of_block = getattr(call.forward, "__func__", None) is class_forward
    of_each_number = type(act) in (nn.GELU, nn.SiLU, nn.ReLU) and "forward" not in vars(act)
    hooked = of_each_number and (act._forward_hooks or act._forward_pre_hooks)
    width: Any = getattr(out, "in_features", 0) - getattr(out, "out_features", 0)
    projections = (into_mlp, out)
    alone = (
        of_block
        and class_forward.__module__.startswith("diffusers.models.")
        and of_each_number
        and not hooked
        and not any(m._backward_hooks or m._backward_pre_hooks for m in (act, *projections))
        and all(_has_own_hook(module) and _is_outermost(module) for module in projections)
        and getattr(into_mlp, "out_features", None) == width  # not gated
    )
    return act if alone else None


def _has_own_hook(module: nn.Module) -> bool:
    """Return True if the `forward` of a module is that of our hook, with nothing around it."""
    return isinstance(getattr(vars(module).get("forward"), "__self__", None), RestoringForward)


def _is_plain(call: TokensCall) -> bool:
    """Return True if a module multiplies by its `weight`, adds its `bias`, and does no more."""
    weight = getattr(call.module, "weight", None)
    forward = getattr(call.forward, "__func__", None)
    return forward is nn.Linear.forward and type(weight) in (Tensor, nn.Parameter)


def _is_outermost(module: nn.Module | None) -> bool:
    """Return True if nothing but offloading is around the hook on a module.

    A LoRA that another tool puts around the module would read zeros for tokens that are not chosen.
    """
    if module is None or torch.compiler.is_compiling():
        return module is not None
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    return (
        _has_own_hook(module) or hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook")
    )
