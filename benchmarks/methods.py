"""The points of the frontier: our settings and their rivals, each a context manager on a UNet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from benchmarks.rivals import pooled, tomesd_on
from mame_sd import MaMeConfig, mame

OURS = "mame"


@dataclass(frozen=True)
class Method:
    """One point: `settings` (JSON values) say all of it, `on(unet)` applies it for a block."""

    family: str
    settings: dict[str, Any]
    on: Callable[[Any], AbstractContextManager[Any]]


def baseline() -> Method:
    return Method("baseline", {}, lambda unet: nullcontext())


def ours(**fields: Any) -> Method:
    config = MaMeConfig.from_dict(fields)
    return Method(OURS, config.to_dict(), lambda unet: mame(unet, config))


def tomesd(ratio: float, max_downsample: int = 1) -> Method:
    settings = {"ratio": ratio, "max_downsample": max_downsample}
    return Method("tomesd", settings, lambda unet: tomesd_on(unet, ratio, max_downsample))


def trivial(kind: str, rows: int, columns: int, min_tokens: int = 1024) -> Method:
    settings = {"cell": [rows, columns], "min_tokens": min_tokens}
    return Method(kind, settings, lambda unet: pooled(unet, (rows, columns), kind, min_tokens))


RIVALS = {
    **{f"tomesd {ratio}": tomesd(ratio) for ratio in (0.25, 0.5, 0.75)},
    **{f"tomesd {ratio}, two levels": tomesd(ratio, 2) for ratio in (0.25, 0.5, 0.75)},
    "stride 1x2": trivial("stride", 1, 2),
    "pool 1x2": trivial("pool", 1, 2),
    "pool 2x2": trivial("pool", 2, 2),
    "pool-kv 1x2": trivial("pool-kv", 1, 2),
    "pool-kv 2x2": trivial("pool-kv", 2, 2),
    "pool-kv 2x2, first level only": trivial("pool-kv", 2, 2, 4096),
    "pool-kv 4x4, first level only": trivial("pool-kv", 4, 4, 4096),
    "pool 2x2, first level only": trivial("pool", 2, 2, 4096),
    "pool 1x2, first level only": trivial("pool", 1, 2, 4096),
}
SHORT = {
    "default": ours(),
    "qkv .5": ours(keep=0.5, merge="qkv"),
    "plain": ours(preset="plain"),
    **{name: RIVALS[name] for name in ("tomesd 0.5", "pool-kv 2x2")},
}
FULL = {
    "default": ours(),
    **{f"kv {keep}": ours(keep=keep) for keep in (0.75, 0.5, 0.25)},
    **{f"kv {keep}, tiles 16": ours(keep=keep, tiles=16) for keep in (0.5, 0.375, 0.25)},
    **{f"kv {keep}, tiles 4": ours(keep=keep, tiles=4) for keep in (0.5, 0.375, 0.25)},
    "kv .25, global": ours(keep=0.25, tiles=0),
    "kv .5, alternating": ours(keep=0.5, partition="alternating"),
    "kv .5, random": ours(keep=0.5, partition="random"),
    "kv .25, similarity of keys": ours(keep=0.25, feature="k-mean"),
    "kv .25, not refined": ours(keep=0.25, refine=False),
    "kv 1/9, 3x3 cells, tiles 12": ours(keep=0.1, stride=(3, 3), tiles=12),
    "kv 1/16, 4x4 cells": ours(keep=0.05, stride=(4, 4)),
    **{f"kv {keep}, best": ours(keep=keep, weights="best") for keep in (0.5, 0.375, 0.25)},
    **{
        f"kv {keep}, best, first level only": ours(keep=keep, weights="best", min_tokens=4096)
        for keep in (0.5, 0.375, 0.25)
    },
    "kv .25, best, tiles 16, first level only": ours(keep=0.25, weights="best", tiles=16, min_tokens=4096),
    "kv .375, best, tiles 16, first level only": ours(keep=0.375, weights="best", tiles=16, min_tokens=4096),
    "kv 1/9, best, 3x3 cells, tiles 12, first level only": ours(
        keep=0.1, stride=(3, 3), tiles=12, weights="best", min_tokens=4096
    ),
    "kv 1/16, best, 4x4 cells, tiles 16, first level only": ours(
        keep=0.05, stride=(4, 4), tiles=16, weights="best", min_tokens=4096
    ),
    "kv 1/16, best, 4x4 cells, tiles 32, first level only": ours(
        keep=0.05, stride=(4, 4), tiles=32, weights="best", min_tokens=4096
    ),
    "kv tau 0.8, best, first level only": ours(tau=0.8, merge="kv", weights="best", min_tokens=4096),
    "kv tau 0.8, best, tiles 16, first level only": ours(
        tau=0.8, merge="kv", weights="best", tiles=16, min_tokens=4096
    ),
    "kv .25, first level only": ours(keep=0.25, min_tokens=4096),
    "kv .375, first level only": ours(keep=0.375, min_tokens=4096),
    **{f"kv tau {tau}": ours(tau=tau, merge="kv") for tau in (0.7, 0.8, 0.9)},
    **{f"qkv {keep}": ours(keep=keep, merge="qkv") for keep in (0.75, 0.5, 0.25)},
    "qkv .5, alternating": ours(keep=0.5, merge="qkv", partition="alternating"),
    "qkv .5, tiles 16": ours(keep=0.5, merge="qkv", tiles=16),
    "qkv .5, best, first level only": ours(keep=0.5, merge="qkv", weights="best", min_tokens=4096),
    "qkv .25, best, tiles 16, first level only": ours(
        keep=0.25, merge="qkv", weights="best", tiles=16, min_tokens=4096
    ),
    "qkv .5, first level only": ours(keep=0.5, merge="qkv", min_tokens=4096),
    **{f"qkv tau {tau}": ours(tau=tau) for tau in (0.7, 0.8, 0.9)},
    **{f"plain tau {tau}": ours(tau=tau, preset="plain") for tau in (0.7, 0.8, 0.9)},
    "printed equations, tau 0.8": ours(tau=0.8, preset="plain", variant="paper"),
    **RIVALS,
}
