"""The bound that no merging can pass: a UNet that computes on the first tokens only, as if choosing
and restoring were free.

What it computes is no image. Its times say what merging to a share of the tokens could save at
most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import AttnProcessor2_0
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import unets
from mame_sd import MaMeConfig


class FreeProcessor:
    """Self-attention on the first `share` of the tokens. Outputs are repeated."""

    def __init__(self, share: float, merge: str, min_tokens: int) -> None:
        self._share, self._merge, self._min_tokens = share, merge, min_tokens
        self._inner = AttnProcessor2_0()

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: Any = None, **rest: Any
    ) -> Any:
        tokens = hidden_states.shape[1]
        if encoder_hidden_states is not None or tokens < self._min_tokens:
            return self._inner(attn, hidden_states, encoder_hidden_states, **rest)
        kept = first(hidden_states, self._share)
        if self._merge == "kv":
            return self._inner(attn, hidden_states, kept, **rest)
        return repeated(self._inner(attn, kept, None, **rest), tokens)


@contextmanager
def free_on(unet: Any, config: MaMeConfig) -> Iterator[None]:
    """`unet` with every part that `config` merges on the kept tokens alone, for the block."""
    before = dict(unet.attn_processors)
    wrapped = []
    assert config.keep is not None
    try:
        unet.set_attn_processor(FreeProcessor(config.keep, config.merge, config.min_tokens))
        for block in (
            module for module in unet.modules() if isinstance(module, BasicTransformerBlock)
        ):
            if config.mlp is not None and block.ff is not None:
                block.ff.forward = partial(
                    _on_first, block.ff.forward, config.mlp, config.min_tokens
                )
                wrapped.append(block.ff)
        yield
    finally:
        unet.set_attn_processor(before)
        for module in wrapped:
            del module.forward


@torch.no_grad()
def work(unet: Any, side: int, batch: int, configs: Mapping[str, MaMeConfig]) -> dict[str, float]:
    """The free bound's multiplications as a share of the plain UNet's, of one forward, by the
    configs' names.

    Counted on a copy without weights: on no device and in no time.
    """
    with torch.device("meta"):
        twin = UNet2DConditionModel.from_config(unet.config).eval()

    def count(config: MaMeConfig | None) -> int:
        given = unets.inputs(twin, side, batch, 0)
        with (
            nullcontext() if config is None else free_on(twin, config),
            FlopCounterMode(display=False) as counter,
        ):
            twin(**given)
        return counter.get_total_flops()

    plain = count(None)
    return {name: count(config) / plain for name, config in configs.items()}


def first(x: torch.Tensor, share: float) -> torch.Tensor:
    """The first `share` of the tokens of x [B, L, C], as merging would hand them on: without
    gaps.
    """
    return x[:, : round(share * x.shape[1])].contiguous()


def repeated(y: torch.Tensor, tokens: int) -> torch.Tensor:
    """y [B, n, C] as [B, tokens, C]: a block needs all rows, and one write makes them."""
    return y.new_empty(y.shape[0], tokens, y.shape[2]).copy_(y[:, :1])


def _on_first(
    forward: Callable[..., torch.Tensor],
    share: float,
    min_tokens: int,
    x: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    if x.shape[1] < min_tokens:
        return forward(x, *args, **kwargs)
    return repeated(forward(first(x, share), *args, **kwargs), x.shape[1])
