"""The points of the frontier: our settings and their rivals, each a context manager on a
denoiser.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mame_sd import MaMeConfig, mame
from mame_sd.eval.benchmark.tomesd import tomesd_on
from mame_sd.eval.rivals.layers import MakePlan, rival_on
from mame_sd.eval.rivals.plans import constant, means, random_cells, random_keys, strided, todo
from mame_sd.eval.rivals.toma import ToMA

MEAN_ATTENTION = "mean attention"  # what an instrument must be able to see


@dataclass(frozen=True)
class Method:
    """One point.

    Attributes:
        settings: JSON values that say all of it.
        on: applies it to a denoiser for a block.
        fewer: steps that it takes less.
        side: of its images, as a share of the others', to which they are enlarged.
    """

    settings: dict[str, Any]
    on: Callable[[Any], AbstractContextManager[Any]] = lambda denoiser: nullcontext()
    fewer: int = 0
    side: float = 1.0


def baseline() -> Method:
    return Method({})


def ours(kernel: Any = None, **fields: Any) -> Method:
    """Our settings, the same in all layers, without those beside the model's weights; `kernel` as
    `mame` takes it.
    """
    config = MaMeConfig.from_dict(fields)
    config = config.replace(keep=config.keep, tau=config.tau)
    settings = {name: value for name, value in config.to_dict().items() if value is not None}
    if kernel is not None:
        settings["kernel"] = kernel.__name__
    return Method(settings, lambda denoiser: mame(denoiser, config, kernel=kernel))


def without_bias(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attention by a kernel that takes no bias, as FlashAttention and SageAttention take none."""
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def tomesd(ratio: float) -> Method:
    return Method({"tomesd": ratio}, lambda unet: tomesd_on(unet, ratio))


def rival(
    make: Callable[..., MakePlan],
    merge: str = "kv",
    fit_queries: int = 0,
    min_tokens: int = 1024,
    **settings: Any,
) -> Method:
    """A rival of `mame_sd.eval.rivals`, made of `settings`."""
    how: dict[str, Any] = {"merge": merge, "fit_queries": fit_queries, "min_tokens": min_tokens}

    def on(denoiser: Any) -> Any:
        return rival_on(denoiser, partial(make, **settings), **how)

    return Method({"rival": make.__name__, **settings, **how}, on)


NOTHING_CLEVER = {
    "one step fewer": Method({"fewer": 1}, fewer=1),
    "two steps fewer": Method({"fewer": 2}, fewer=2),
    "three steps fewer": Method({"fewer": 3}, fewer=3),
    "image of 3/4 the side, enlarged": Method({"side": 0.75}, side=0.75),
    **{
        f"random {share}": rival(random_keys, share=share, redraw=True)
        for share in (0.5, 0.25, 0.125)
    },
    "random 0.25, fitted": rival(random_keys, share=0.25, redraw=True, fit_queries=128),
    "random of 2x2": rival(random_cells, cell=(2, 2), redraw=True),
    "every second key": rival(strided, cell=(1, 2)),
    "means of 2x2": rival(means, cell=(2, 2)),
    "means of 2x2, fitted": rival(means, cell=(2, 2), fit_queries=128),
}
PUBLISHED = {
    "todo 2": rival(todo, factor=2),
    "toma 0.5": rival(ToMA, "qkv", share=0.5),
    **{f"tau {tau}": ours(tau=tau) for tau in (0.7, 0.8, 0.9)},
}
FLOORS = {
    MEAN_ATTENTION: rival(constant, "qkv", scale=1.0),
    "zero attention": rival(constant, "qkv", scale=0.0),
}
KEEPS = (0.5, 0.375, 0.25, 0.125, 0.0625)
RANGE = {
    "default": ours(),
    **{f"keep {keep}": ours(keep=keep) for keep in KEEPS},
    **{f"keep {keep}, not fitted": ours(keep=keep, fit_queries=0) for keep in KEEPS},
    **{
        f"keep {keep}, kernel without bias": ours(without_bias, keep=keep)
        for keep in (0.5, 0.25, 0.125)
    },
}
RIVALS = {**RANGE, **NOTHING_CLEVER, **PUBLISHED, **FLOORS}
UNET = {**RIVALS, **{f"tomesd {ratio}": tomesd(ratio) for ratio in (0.25, 0.5)}}
SHORT = (
    "keep 0.25",
    "keep 0.125",
    "keep 0.25, not fitted",
    "one step fewer",
    "random 0.25",
    "tau 0.8",
    MEAN_ATTENTION,
)
