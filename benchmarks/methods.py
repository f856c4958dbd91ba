"""The points of the frontier: our settings and their rivals, each a context manager on a
denoiser.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from mame_sd import MaMeConfig, mame
from mame_sd.eval.benchmark.tomesd import tomesd_on
from mame_sd.eval.rivals.layers import MakePlan, rival_on
from mame_sd.eval.rivals.plans import constant, means, random_cells, random_keys, strided, todo
from mame_sd.eval.rivals.toma import ToMA

OURS = "mame"
FLOOR = "floor"  # the family of what an instrument must be able to see
MEAN_ATTENTION = "mean attention"


@dataclass(frozen=True)
class Method:
    """One point.

    Attributes:
        family: of rows that belong together.
        settings: JSON values that say all of it.
        on: applies it to a denoiser for a block.
        fewer: steps that it takes less.
        side: of its images, as a share of the others', to which they are enlarged.
    """

    family: str
    settings: dict[str, Any]
    on: Callable[[Any], AbstractContextManager[Any]]
    fewer: int = 0
    side: float = 1.0


def baseline() -> Method:
    return Method("baseline", {}, lambda denoiser: nullcontext())


def ours(**fields: Any) -> Method:
    """Our settings, the same in all layers, without those beside the model's weights."""
    config = MaMeConfig.from_dict(fields)
    config = config.replace(keep=config.keep, tau=config.tau)
    return Method(OURS, settings_of(config), lambda denoiser: mame(denoiser, config))


def settings_of(config: MaMeConfig) -> dict[str, Any]:
    """What decides a measurement with `config`."""
    return {name: value for name, value in config.to_dict().items() if value is not None}


def tomesd(ratio: float) -> Method:
    settings = {"ratio": ratio, "max_downsample": 1}
    return Method("tomesd", settings, lambda unet: tomesd_on(unet, ratio))


def rival(
    family: str,
    make: Callable[..., MakePlan],
    merge: str = "kv",
    fit_queries: int = 0,
    min_tokens: int = 1024,
    **settings: Any,
) -> Method:
    """A rival of `mame_sd.eval.rivals`, made of `settings`; `family` is its name in tables."""
    said = {
        name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()
    }
    how: dict[str, Any] = {"merge": merge, "fit_queries": fit_queries, "min_tokens": min_tokens}

    def on(denoiser: Any) -> Any:
        return rival_on(denoiser, partial(make, **settings), **how)

    return Method(family, {**said, **how}, on)


def fewer_steps(count: int) -> Method:
    """The unmerged model with so many steps less."""
    return Method("steps", {"fewer": count}, lambda denoiser: nullcontext(), fewer=count)


def smaller(side: float) -> Method:
    """The unmerged model's image at a share of the side, enlarged."""
    return Method("smaller", {"side": side}, lambda denoiser: nullcontext(), side=side)


NOTHING_CLEVER = {
    "one step fewer": fewer_steps(1),
    "two steps fewer": fewer_steps(2),
    "three steps fewer": fewer_steps(3),
    "image of 3/4 the side, enlarged": smaller(0.75),
    **{
        f"random {share}": rival("random", random_keys, share=share, redraw=True)
        for share in (0.5, 0.25, 0.125)
    },
    "random 0.25, fitted": rival("random", random_keys, share=0.25, redraw=True, fit_queries=128),
    "random of 2x2": rival("random", random_cells, cell=(2, 2), redraw=True),
    "every second key": rival("stride", strided, cell=(1, 2)),
    "means of 2x2": rival("means", means, cell=(2, 2)),
    "means of 2x2, fitted": rival("means", means, cell=(2, 2), fit_queries=128),
}
PUBLISHED = {
    "todo 2": rival("todo", todo, factor=2),
    "toma 0.5": rival("toma", ToMA, "qkv", share=0.5),
    **{f"tau {tau}": ours(tau=tau) for tau in (0.7, 0.8, 0.9)},
}
FLOORS = {
    MEAN_ATTENTION: rival(FLOOR, constant, "qkv", scale=1.0),
    "zero attention": rival(FLOOR, constant, "qkv", scale=0.0),
}
KEEPS = (0.5, 0.375, 0.25, 0.125, 0.0625)
RANGE = {
    "default": ours(),
    **{f"keep {keep}": ours(keep=keep) for keep in KEEPS},
    **{f"keep {keep}, not fitted": ours(keep=keep, fit_queries=0) for keep in KEEPS},
}
RIVALS = {**RANGE, **NOTHING_CLEVER, **PUBLISHED, **FLOORS}
TOMESD = {f"tomesd {ratio}": tomesd(ratio) for ratio in (0.25, 0.5)}
SHORT = {
    name: RIVALS[name]
    for name in (
        "keep 0.25",
        "keep 0.125",
        "keep 0.25, not fitted",
        "one step fewer",
        "random 0.25",
        "tau 0.8",
        MEAN_ATTENTION,
    )
}
