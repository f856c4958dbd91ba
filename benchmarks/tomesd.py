"""tomesd's own patch on a UNet, with all of its settings, for a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def tomesd_on(
    unet: nn.Module, ratio: float, max_downsample: int = 1, merge_mlp: bool = False
) -> Iterator[None]:
    """`unet` patched by the tomesd package for the block; `ratio` of the tokens merge, in the MLP
    too if asked to.

    Raises:
        ImportError: tomesd is not installed (`pip install mame-sd[rivals]`).
    """
    import tomesd

    try:
        tomesd.apply_patch(unet, ratio=ratio, max_downsample=max_downsample, merge_mlp=merge_mlp)
        torch.manual_seed(0)  # its generator is forked from the global one at the first forward
        yield
    finally:
        tomesd.remove_patch(unet)
