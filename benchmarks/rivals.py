"""What merging has to beat: tomesd, and three ways to shrink self-attention that look at no token at all.

* stride: attention on every second token, each output repeated for its neighbour;
* pool: attention on means of 1 x 2 or 2 x 2 tokens, outputs repeated;
* pool-kv: queries stay whole, keys and values are means of 1 x 2 or 2 x 2 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor, nn

from mame_sd.core.partition import square


class PooledProcessor:
    """Self-attention of square images on pooled tokens; everything else as diffusers computes it.

    Args:
        cell: (rows, columns) that become one token.
        kind: stride (the cell's first token), pool (its mean) or pool-kv (its mean, keys and values only).
        min_tokens: layers with fewer are left alone.
    """

    def __init__(self, cell: tuple[int, int], kind: str, min_tokens: int) -> None:
        self._cell = cell
        self._kind = kind
        self._min_tokens = min_tokens
        self._inner = AttnProcessor2_0()

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: Any = None, **rest: Any
    ) -> Tensor:
        size = square(hidden_states.shape[1])
        if encoder_hidden_states is not None or size is None or hidden_states.shape[1] < self._min_tokens:
            return self._inner(attn, hidden_states, encoder_hidden_states, **rest)
        image = hidden_states.transpose(1, 2).unflatten(2, size)  # [B, C, h, w]
        rows, columns = self._cell
        small = image[:, :, ::rows, ::columns] if self._kind == "stride" else F.avg_pool2d(image, self._cell)
        tokens = small.flatten(2).transpose(1, 2)
        if self._kind == "pool-kv":
            return self._inner(attn, hidden_states, tokens, **rest)
        output = self._inner(attn, tokens, None, **rest).transpose(1, 2).unflatten(2, small.shape[2:])
        return output.repeat_interleave(rows, 2).repeat_interleave(columns, 3).flatten(2).transpose(1, 2)


@contextmanager
def pooled(unet: Any, cell: tuple[int, int], kind: str, min_tokens: int) -> Iterator[None]:
    """`unet` with a PooledProcessor for the block; afterwards its own processors are back."""
    before = dict(unet.attn_processors)
    try:
        unet.set_attn_processor(PooledProcessor(cell, kind, min_tokens))
        yield
    finally:
        unet.set_attn_processor(before)


@contextmanager
def tomesd_on(unet: nn.Module, ratio: float, max_downsample: int = 1, merge_mlp: bool = False) -> Iterator[None]:
    """`unet` patched by the tomesd package for the block; `ratio` of the tokens merge, in the MLP too if asked to.

    Raises:
        ImportError: tomesd is not installed (`pip install mame-sd[peers]`).
    """
    import tomesd

    try:
        tomesd.apply_patch(unet, ratio=ratio, max_downsample=max_downsample, merge_mlp=merge_mlp)
        torch.manual_seed(0)  # its generator is forked from the global one at the first forward
        yield
    finally:
        tomesd.remove_patch(unet)
