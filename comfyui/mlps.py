"""Compute MLPs of the image on a few tokens, and restore the others (`mame_sd.core.restore`).

The engine calls no patch around an MLP. So each MLP that may be restored gets an object patch, a
forward in front of its own. It finds the call of the model that is running by `RUNNING`, and
computes all tokens outside of one.

Blocks are not restored (`block_keep`): in Flux, SD3 and others ComfyUI computes queries, keys and
values by one linear layer, whose weights LoRAs and quantisation change, so that the queries of a
few tokens can't be had by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from mame_sd import MaMeConfig
from mame_sd.core.min_tokens import too_little_work
from mame_sd.core.restore import cells_and_count, choose_tokens, restored_by

from .layers import Key
from .run import SMALL

RUNNING: ContextVar[Any] = ContextVar("mame_sd_call", default=None)  # a `wrappers.Call`


def restoring_forward(key: Key, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward for an MLP that restores its output where the current call says so.

    Args:
        key: the place of the MLP's block.
        forward: the MLP's own forward, or one that this function has returned.
    """
    original: Callable[..., Any] = getattr(forward, "original", forward)

    def restoring(x: Tensor) -> Any:
        if torch.compiler.is_compiling():  # graphs can't read the current call
            return original(x)
        call = RUNNING.get()
        return original(x) if call is None else call.restored_mlp(key, original, x)

    restoring.original = original  # type: ignore[attr-defined]
    return restoring


def why_not(x: Any, size: tuple[int, ...], start: int | None, config: MaMeConfig) -> str:
    """Return why an MLP's output for tokens x is not restored; empty if it is.

    Args:
        x: the MLP's input [B, L, C].
        size: the image's grid.
        start: where the image begins in x. If None, it isn't in it.
        config: the settings of the MLP.
    """
    if start is None or not isinstance(x, Tensor) or x.dim() != 3 or not x.is_floating_point():
        return f"an MLP's input has no image of {' x '.join(map(str, size))}"
    tokens = math.prod(size)
    if config.min_tokens is None:
        return too_little_work(x, tokens)
    return SMALL.format(tokens, config.min_tokens) if tokens < config.min_tokens else ""


def restored(
    mlp: Callable[[Tensor], Tensor],
    x: Tensor,
    size: tuple[int, ...],
    start: int,
    config: MaMeConfig,
    draw: Tensor | None,
    leader: Tensor | None,
) -> tuple[Tensor, Any]:
    """Return an MLP's output [B, L, C], restored from a few of the image's tokens, and these.

    Args:
        mlp: the MLP, which treats each token by itself.
        x: its input [B, L, C].
        size: the image's grid.
        start: where the image begins in x.
        config: the settings of the MLP.
        draw: LongTensor [1], see `choose_tokens`.
        leader: LongTensor [B], see `choose_tokens`.
    """
    cells, count = cells_and_count(size, config.mlp_share, config.seed, x.device)
    image = x[:, start : start + math.prod(size)]
    chosen = choose_tokens(image, cells, count, draw, leader)
    return restored_by(chosen, mlp, x, start), chosen
