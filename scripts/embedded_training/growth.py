"""From one stage to the next with finer tokens: what was learnt stays as valid as it can."""

import torch

from .joint import Denoiser, Stage
from .pool import Pool


def grow(
    small: Denoiser, before: Stage, large: Denoiser, after: Stage, pools: dict[str, Pool],
    tokens: dict[str, torch.Tensor], seed: int,
) -> None:  # fmt: skip
    raise NotImplementedError
