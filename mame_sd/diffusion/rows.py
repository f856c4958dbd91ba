"""Tell the modules of a block which rows of its tokens to compute.

A block that is restored (`restoring.BlockHook`) enters a `RowsMode`. Modules of the block, and the
attention in it, find the rows on PyTorch's stack of function modes, which belongs to the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mame_sd.core.intercept import innermost
from mame_sd.core.restore import Chosen
from mame_sd.diffusion.context import Tokens


class Rows:
    """The rows of a block's tokens that are computed.

    Args:
        chosen: the chosen tokens of the image, and of references.
        tokens: layout of the tokens.
        activation: that of an MLP which shares projections with attention, if the block does no
            more between these than call it and concatenate.

    Attributes:
        mixed: True if a further self-attention of the block ran, which needs all rows.
        hidden: columns [B, n', C] of that MLP, which the projection into it set for the one out of
            it. If None, they are among those that the block passes on.
    """

    mixed = False
    hidden: Tensor | None = None

    def __init__(
        self,
        chosen: Chosen,
        tokens: Tokens,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.chosen, self.tokens, self.activation = chosen, tokens, activation

    def take(self, t: Tensor, start: int | None = None) -> Tensor | None:
        """Return the computed rows [B, n', C] of t [B, n, C], or None if t lacks the image.

        These are the chosen tokens, and all tokens among which none are chosen. `start` is the
        position of the image's first token. If None, it is found.
        """
        start = image_start(self.tokens, t) if start is None else start
        if start is None or len(t) != len(self.chosen.at):
            return None
        return self.chosen.take_around(t, start)

    def put(self, rows: Tensor, like: Tensor, start: int | None = None) -> Tensor:
        """Return `rows` [B, n', C'] at their positions among the tokens of `like`.

        All other tokens are zero. `start` is that of `take`.
        """
        start = (image_start(self.tokens, like) or 0) if start is None else start
        image = rows[:, start : start + self.chosen.tokens_kept]
        at = self.chosen.at.unsqueeze(-1).expand(-1, -1, rows.shape[-1])
        zeros = rows.new_zeros(len(rows), self.chosen.tokens_in, rows.shape[-1])
        y = zeros.scatter(1, at, image)
        if like.shape[1] == self.chosen.tokens_in:
            return y
        after = rows[:, start + self.chosen.tokens_kept :]
        return torch.cat([rows[:, :start], y, after], 1)

    def restore(self, rows: Tensor) -> Tensor:
        """Return all tokens [B, n, C], restored from `rows` [B, n', C] of a function of each token.

        The rows are in the order of `take`.
        """
        return self.chosen.restore_around(rows, self._start(rows))

    def add_restored_(self, y: Tensor, rows: Tensor) -> Tensor:
        """Return y [B, n, C], to which `restore(rows)` was added in place."""
        return self.chosen.add_restored_around_(y, rows, self._start(rows))

    def _start(self, rows: Tensor) -> int:
        """Return the position of the image's first token among `rows`."""
        length = rows.shape[1] - self.chosen.tokens_kept + self.chosen.tokens_in
        return self.tokens.start(length) or 0


def image_start(tokens: Tokens, t: Tensor) -> int | None:
    """Return the position of the image's first token in t [B, n, C], or None if t lacks them."""
    return tokens.start(t.shape[1]) if t.dim() == 3 else None


class _BlockMode(TorchFunctionMode):
    """Tell the modules of a block how to compute, and change no function that they call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.unflatten:  # see SDPAInterceptor
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class RowsMode(_BlockMode):
    """Let modules of a block compute only the given rows while entered. If None, all rows."""

    def __init__(self, rows: Rows | None) -> None:
        super().__init__()
        self.rows = rows


def running_rows() -> Rows | None:
    """Return the rows of the innermost block that is computed in part, or None."""
    mode = innermost(RowsMode)
    return None if mode is None else mode.rows


class FusedMLPCall:
    """Hold what the projections of a block share that restores its MLP (`fused_mlp.FusedMLP`).

    Args:
        activation: see `Rows`.

    Attributes:
        rows: set by the projection into the MLP, and taken by the projection out of it.
    """

    def __init__(self, activation: Callable[[Tensor], Tensor] | None) -> None:
        self.activation = activation
        self.rows: Rows | None = None


class FusedMLPMode(_BlockMode):
    """Let a block restore its MLP, which shares projections with its attention, while entered."""

    def __init__(self, call: FusedMLPCall) -> None:
        super().__init__()
        self.call = call


def running_fused_mlp() -> FusedMLPCall | None:
    """Return the call of the innermost block that restores a fused MLP, or None."""
    mode = innermost(FusedMLPMode)
    return None if mode is None else mode.call


def needs_all_rows(attention: Any) -> bool:
    """Return True if an attention has a processor of the user's.

    It may count its queries, keep their map or normalise over them (Attend-and-Excite, regional
    prompts, StyleAligned).
    """
    processor = getattr(attention, "processor", None)
    is_diffusers = processor is None or type(processor).__module__.startswith("diffusers.models.")
    return not is_diffusers
