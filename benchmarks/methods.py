"""The points of the frontier: our settings and their rivals, each a context manager on a UNet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.rivals import pooled, tomesd_on
from benchmarks.variants import guidance_protected, scheduled, share_at, varied
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
    settings = {name: value for name, value in config.to_dict().items() if value is not None}
    return Method(OURS, settings, lambda unet: mame(unet, config))


def tomesd(ratio: float, max_downsample: int = 1, **more: Any) -> Method:
    settings = {"ratio": ratio, "max_downsample": max_downsample, **more}
    return Method("tomesd", settings, lambda unet: tomesd_on(unet, **settings))


def trivial(kind: str, rows: int, columns: int, min_tokens: int = 1024) -> Method:
    settings = {"cell": [rows, columns], "min_tokens": min_tokens}
    return Method(kind, settings, lambda unet: pooled(unet, (rows, columns), kind, min_tokens))


def biased(bias: float, **fields: Any) -> Method:
    config = MaMeConfig.from_dict(fields)
    return Method("variant", {"bias": bias, **config.to_dict()}, lambda unet: varied(unet, config, bias=bias))


def protected(**fields: Any) -> Method:
    config = MaMeConfig.from_dict(fields)
    return Method(
        "variant", {"protected": "guidance", **config.to_dict()}, lambda unet: varied(unet, config, guidance_protected)
    )


def in_steps(noisy: tuple[float, ...], fine: tuple[float, ...]) -> Method:
    """The default with a share that changes linearly from `noisy` to `fine`, both of one number; an empty one: no merging there."""
    settings = {"noisy": noisy, "fine": fine, **MaMeConfig().to_dict()}
    return Method("variant", settings, lambda unet: scheduled(unet, partial(share_at, noisy, fine)))


RIVALS = {
    **{f"tomesd {ratio}": tomesd(ratio) for ratio in (0.25, 0.5, 0.75)},
    **{f"tomesd {ratio}, two levels": tomesd(ratio, 2) for ratio in (0.25, 0.5, 0.75)},
    "tomesd 0.5, two levels, mlp": tomesd(0.5, 2, merge_mlp=True),
    "stride 1x2": trivial("stride", 1, 2),
    "pool 1x2": trivial("pool", 1, 2),
    "pool 2x2": trivial("pool", 2, 2),
    "pool-kv 1x2": trivial("pool-kv", 1, 2),
    "pool-kv 2x2": trivial("pool-kv", 2, 2),
    "pool-kv 2x2, first level": trivial("pool-kv", 2, 2, 4096),
    "pool-kv 4x4, first level": trivial("pool-kv", 4, 4, 4096),
    "pool 2x2, first level": trivial("pool", 2, 2, 4096),
    "pool 1x2, first level": trivial("pool", 1, 2, 4096),
}
FIRST = {"min_tokens": 4096}  # the first level only, as tomesd merges unless told otherwise
WIDE: dict[str, dict[str, Any]] = {
    "1/9, 3x3 cells, tiles 12": {"keep": 0.1, "stride": (3, 3), "tiles": 12},
    "1/16, 4x4 cells, tiles 16": {"keep": 0.05, "stride": (4, 4), "tiles": 16},
    "1/64, 8x8 cells, tiles 32": {"keep": 0.01, "stride": (8, 8), "tiles": 32},
    "1/64, 8x8 cells, global": {"keep": 0.01, "stride": (8, 8), "tiles": 0},
}
CORNER: dict[str, Any] = {"partition": "grid"}  # the first token of each cell, at every step
SMALL: dict[str, Any] = {**CORNER, "tiles": 8}
SQUARE: dict[str, Any] = {**SMALL, "stride": (2, 2)}
MIXED: dict[str, Any] = {**SQUARE, "keep": 0.375}  # some sources stay, so that keys stand for one to four tokens
VARIANTS = {
    **{f"kv .25, first of each cell, size bias {bias:g}": biased(bias, **CORNER) for bias in (0.5, 1.0)},
    **{f"kv 0.375, 2x2 cells, size bias {bias:g}": biased(bias, **MIXED) for bias in (0.5, 1.0)},
    "kv 0.375, 2x2 cells, guidance protected": protected(**MIXED),
    "default, noisy half only": in_steps((0.25,), ()),
    "default, fine half only": in_steps((), (0.25,)),
    "kv .50 to .25 over the steps": in_steps((0.5,), (0.25,)),
    "kv .25 to .50 over the steps": in_steps((0.25,), (0.5,)),
}
FULL = {
    "default": ours(),
    "default, first level": ours(**FIRST),
    "default, min_tokens 256": ours(min_tokens=256),
    **{f"kv {keep}": ours(keep=keep) for keep in (0.75, 0.5, 0.375, 0.19, 0.125, 0.0625)},
    **{f"kv {keep}, first of each cell": ours(keep=keep, **CORNER) for keep in (0.5, 0.25, 0.125)},
    **{f"kv {keep}, first of each 2x2 cell": ours(keep=keep, **SQUARE) for keep in (0.75, 0.5, 0.375)},
    **{f"kv .25, tiles {tiles}": ours(tiles=tiles, **CORNER) for tiles in (4, 8)},
    "kv .25, tiles 8, first level": ours(**SMALL, **FIRST),
    "kv .25, global": ours(tiles=0),
    **{f"kv {name}": ours(**fields) for name, fields in WIDE.items()},
    **{f"kv {name}, first level": ours(**fields, **FIRST) for name, fields in WIDE.items()},
    "kv .25, average": ours(**SMALL, weights="average"),
    "kv .25, average, not refined": ours(**SMALL, weights="average", refine=False),
    "kv .25, similarity of keys": ours(**SMALL, feature="k-mean"),
    "kv 0.5, random": ours(tiles=8, keep=0.5, partition="random", redraw=False),
    **{f"kv .25, drawn once, seed {n}": ours(redraw=False, seed=n) for n in (0, 1, 2)},
    "kv tau 0.8, best": ours(tau=0.8, merge="kv", weights="best"),
    **{f"qkv {keep}": ours(keep=keep, merge="qkv") for keep in (0.75, 0.5, 0.25, 0.19, 0.125, 0.0625)},
    "qkv 0.25, global": ours(keep=0.25, merge="qkv", tiles=0, **CORNER),
    "qkv 0.25, first of each cell": ours(keep=0.25, merge="qkv", **CORNER),
    "qkv 0.25, drawn once": ours(keep=0.25, merge="qkv", redraw=False),
    "qkv 0.5, first level": ours(keep=0.5, merge="qkv", **FIRST),
    "qkv 0.5, first of each 2x2 cell": ours(keep=0.5, merge="qkv", **SQUARE),
    "qkv 0.5, first of each 2x2 cell, average": ours(keep=0.5, merge="qkv", weights="average", **SQUARE),
    **{f"qkv tau {tau}": ours(tau=tau) for tau in (0.7, 0.8, 0.9)},
    **{f"plain tau {tau}": ours(tau=tau, preset="plain") for tau in (0.7, 0.8, 0.9)},
    "printed equations, tau 0.8": ours(tau=0.8, preset="plain", variant="paper"),
    **{f"default, mlp {mlp}": ours(mlp=mlp) for mlp in (0.75, 0.5)},
    "default, cross .5": ours(cross=0.5),
    "default, mlp .5, cross .5": ours(mlp=0.5, cross=0.5),
    **VARIANTS,
    **RIVALS,
}
SHORT = {
    name: FULL[name]
    for name in (
        "default",
        "default, first level",
        "kv 0.125",
        "kv 1/64, 8x8 cells, tiles 32",
        "qkv 0.5",
        "plain tau 0.8",
        "tomesd 0.5",
        "pool-kv 2x2",
    )
}
