"""The points of the frontier: our settings and their rivals, each a context manager on a
denoiser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.tomesd import tomesd_on
from mame_sd import MaMeConfig, mame
from mame_sd.config import Study
from mame_sd.eval.rivals.layers import MakePlan, rival_on
from mame_sd.eval.rivals.plans import (
    constant,
    means,
    random_cells,
    random_keys,
    strided,
    tiles,
    todo,
)
from mame_sd.eval.rivals.toma import ToMA

OURS = "mame"
HALVES = ((1, 2), (2, 2))  # cells of a half and a quarter


@dataclass(frozen=True)
class Method:
    """One point: `settings` (JSON values) say all of it, `on(denoiser)` applies it for a block."""

    family: str
    settings: dict[str, Any]
    on: Callable[[Any], AbstractContextManager[Any]]


def baseline() -> Method:
    return Method("baseline", {}, lambda unet: nullcontext())


def explicit(fields: dict[str, Any]) -> MaMeConfig:
    """Our settings, `merge` among what is given, so that no model's family decides on it."""
    config = MaMeConfig.from_dict(fields)
    return config.replace(merge=config.merge)


def ours(**fields: Any) -> Method:
    config = explicit(fields)
    return Method(OURS, settings_of(config), lambda unet: mame(unet, config))


def of_files(files: Iterable[Path]) -> dict[str, Method]:
    """A row for each file of settings, by the file's name without its ending.

    Raises:
        ValueError: a file that can't be read or used, or two of one name.
    """
    rows: dict[str, Method] = {}
    for file in files:
        if file.stem in rows:
            raise ValueError(
                f"expected files of different names, got two of {file.stem!r}; rename one"
            )
        config = MaMeConfig.from_file(file)
        rows[file.stem] = Method(OURS, settings_of(config), partial(_with_config, config))
    return rows


def _with_config(config: MaMeConfig, denoiser: Any) -> AbstractContextManager[Any]:
    return mame(denoiser, config)


def settings_of(config: MaMeConfig) -> dict[str, Any]:
    """What decides a measurement with `config`; without `detail` where there is none, as before
    there was any.
    """
    every = config.to_dict()
    every |= every.pop("study")
    settings = {name: value for name, value in every.items() if value is not None}
    if not config.detail or (config.merge == "kv" and config.mlp is None):
        del settings["detail"]
    return settings


def tomesd(ratio: float, max_downsample: int = 1, **more: Any) -> Method:
    settings = {"ratio": ratio, "max_downsample": max_downsample, **more}
    return Method("tomesd", settings, lambda unet: tomesd_on(unet, **settings))


def rival(
    family: str,
    make: Callable[..., MakePlan],
    merge: str = "kv",
    min_tokens: int = 1024,
    counted: bool = False,
    **settings: Any,
) -> Method:
    """A rival of `mame_sd.eval.rivals`, made of `settings`; `family` is its name in tables.

    `counted` as in `rival_on`.
    """
    said = {
        name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()
    }
    said |= {"counted": True} if counted else {}
    on = partial(
        rival_on,
        make=partial(make, **settings),
        merge=merge,
        min_tokens=min_tokens,
        plain_only=make is tiles,
        counted=counted,
    )
    return Method(family, {**said, "merge": merge, "min_tokens": min_tokens}, lambda unet: on(unet))


FIRST: dict[str, Any] = {
    "min_tokens": 4096
}  # the first level only, as tomesd merges unless told otherwise
FLOOR = "floor"  # the family of what an instrument must be able to see
MEAN_ATTENTION = "mean attention"
TRIVIAL = {
    **{
        f"stride {rows}x{columns}": rival("stride", strided, "qkv", cell=(rows, columns))
        for rows, columns in HALVES
    },
    **{
        f"pool {rows}x{columns}": rival("pool", means, "qkv", cell=(rows, columns))
        for rows, columns in HALVES
    },
    "pool 2x2, counted": rival("pool", means, "qkv", counted=True, cell=(2, 2)),
    **{
        f"pool-kv {rows}x{columns}": rival("pool-kv", means, cell=(rows, columns))
        for rows, columns in HALVES
    },
    "stride-kv 1x2": rival("stride-kv", strided, cell=(1, 2)),
    "pool-kv 2x2, first level": rival("pool-kv", means, cell=(2, 2), **FIRST),
    "pool-kv 4x4, first level": rival("pool-kv", means, cell=(4, 4), **FIRST),
    "pool 2x2, first level": rival("pool", means, "qkv", cell=(2, 2), **FIRST),
    "pool 1x2, first level": rival("pool", means, "qkv", cell=(1, 2), **FIRST),
}
RANDOM = {
    f"random {name}{drawn}": rival("random", make, redraw=not drawn, **fields)
    for name, make, fields in (
        ("0.5", random_keys, {"share": 0.5}),
        ("0.25", random_keys, {"share": 0.25}),
        ("0.0625", random_keys, {"share": 0.0625}),
        ("of 2x2", random_cells, {"cell": (2, 2)}),
        ("of 4x4", random_cells, {"cell": (4, 4)}),
    )
    for drawn in ("", ", one draw")
}
PUBLISHED = {
    "todo 2": rival("todo", todo, factor=2),
    "todo 4": rival("todo", todo, factor=4),
    "todo 4, then 2": rival("todo", todo, factor=2, first_factor=4),
    **{
        f"hypertile {pixels}{drawn}": rival(
            "hypertile", tiles, "qkv", side=pixels // 8, options=2 if drawn else 1
        )
        for pixels in (256, 128)
        for drawn in ("", ", drawn")
    },
    **{
        f"hypertile {pixels}, first level": rival(
            "hypertile", tiles, "qkv", side=pixels // 8, **FIRST
        )
        for pixels in (256, 128)
    },
    **{f"toma {share}": rival("toma", ToMA, "qkv", share=share) for share in (0.75, 0.5, 0.25)},
    "toma-kv 0.25": rival("toma", ToMA, share=0.25),
}
FLOORS = {
    MEAN_ATTENTION: rival(FLOOR, constant, "qkv", scale=1.0),
    "zero attention": rival(FLOOR, constant, "qkv", scale=0.0),
}
RIVALS = {
    **{f"tomesd {ratio}": tomesd(ratio) for ratio in (0.25, 0.5, 0.75)},
    **{f"tomesd {ratio}, two levels": tomesd(ratio, 2) for ratio in (0.25, 0.5, 0.75)},
    "tomesd 0.5, two levels, mlp": tomesd(0.5, 2, merge_mlp=True),
    **TRIVIAL,
    **RANDOM,
    **PUBLISHED,
    **FLOORS,
}
CORRECTED = {
    f"{name} {keep}, corrected": ours(keep=keep, correct=True, weights=name)
    for name in ("pick", "average")
    for keep in (0.25, 0.125, 0.0625)
}
UNCORRECTED = {
    f"kv {keep}, not corrected": ours(keep=keep, correct=False)
    for keep in (0.5, 0.25, 0.19, 0.125, 0.0625)
}
PICKS = {
    **{
        f"pick {keep}": ours(keep=keep, weights="pick")
        for keep in (0.5, 0.375, 0.25, 0.125, 0.0625)
    },
    "pick 0.25, one draw": ours(keep=0.25, weights="pick", redraw=False),
    "pick 0.25, first of each cell": ours(keep=0.25, weights="pick", partition="grid"),
}
WIDE: dict[str, dict[str, Any]] = {
    "1/9, 3x3 cells, tiles 12": {"keep": 0.1, "stride": (3, 3), "tiles": 12},
    "1/16, 4x4 cells, tiles 16": {"keep": 0.05, "stride": (4, 4), "tiles": 16},
    "1/64, 8x8 cells, tiles 32": {"keep": 0.01, "stride": (8, 8), "tiles": 32},
    "1/64, 8x8 cells, global": {"keep": 0.01, "stride": (8, 8), "tiles": 0},
}
CORNER: dict[str, Any] = {"partition": "grid"}  # the first token of each cell, at every step
SMALL: dict[str, Any] = {**CORNER, "tiles": 8}
SQUARE: dict[str, Any] = {**SMALL, "stride": (2, 2)}
FULL = {
    "default": ours(),
    "default, halves apart": ours(
        pairs=False
    ),  # the guided and the unguided sample each by its own tokens
    "default, first level": ours(**FIRST),
    "default, min_tokens 256": ours(min_tokens=256),
    **{f"kv {keep}": ours(keep=keep) for keep in (0.75, 0.5, 0.375, 0.19, 0.125, 0.0625)},
    **{f"kv {keep}, first of each cell": ours(keep=keep, **CORNER) for keep in (0.5, 0.25, 0.125)},
    **{
        f"kv {keep}, first of each 2x2 cell": ours(keep=keep, **SQUARE)
        for keep in (0.75, 0.5, 0.375)
    },
    **{f"kv .25, tiles {tiles}": ours(tiles=tiles, **CORNER) for tiles in (4, 8)},
    **{f"kv 0.25, drawn, tiles {tiles}": ours(tiles=tiles) for tiles in (2, 4, 8)},
    "kv .25, tiles 8, first level": ours(**SMALL, **FIRST),
    "kv .25, global": ours(tiles=0),
    **{f"kv {name}": ours(**fields) for name, fields in WIDE.items()},
    **{f"kv {name}, first level": ours(**fields, **FIRST) for name, fields in WIDE.items()},
    "kv .25, average": ours(**SMALL, weights="average"),
    "kv .25, average, not refined": ours(**SMALL, weights="average", refine=False),
    "kv .25, similarity of keys": ours(**SMALL, feature="k-mean"),
    "kv 0.5, random": ours(tiles=8, keep=0.5, partition="random", redraw=False),
    **{f"kv .25, drawn once, seed {n}": ours(redraw=False, seed=n) for n in (0, 1, 2)},
    **{
        f"qkv {keep}": ours(keep=keep, merge="qkv")
        for keep in (0.75, 0.625, 0.5, 0.375, 0.25, 0.19, 0.125, 0.0625)
    },
    **{f"qkv {keep}, tiles 4": ours(keep=keep, merge="qkv", tiles=4) for keep in (0.5, 0.25)},
    "qkv 0.25, tiles 2": ours(keep=0.25, merge="qkv", tiles=2),
    **{f"qkv {keep}, copies": ours(keep=keep, merge="qkv", detail=False) for keep in (0.5, 0.25)},
    **{
        f"qkv {keep}, not counted": ours(keep=keep, merge="qkv", correct=False)
        for keep in (0.5, 0.25)
    },
    "qkv 0.25, global": ours(keep=0.25, merge="qkv", tiles=0, **CORNER),
    "qkv 0.25, first of each cell": ours(keep=0.25, merge="qkv", **CORNER),
    "qkv 0.25, drawn once": ours(keep=0.25, merge="qkv", redraw=False),
    "qkv 0.5, first level": ours(keep=0.5, merge="qkv", **FIRST),
    "qkv 0.5, first of each 2x2 cell": ours(keep=0.5, merge="qkv", **SQUARE),
    "qkv 0.5, first of each 2x2 cell, average": ours(
        keep=0.5, merge="qkv", weights="average", **SQUARE
    ),
    **{f"tau {tau}": ours(tau=tau) for tau in (0.6, 0.7, 0.8, 0.9)},
    **{f"plain tau {tau}": ours(tau=tau, preset="plain") for tau in (0.7, 0.8, 0.9)},
    "printed equations, tau 0.8": ours(tau=0.8, preset="plain", variant="paper"),
    **{f"default, mlp {mlp}": ours(mlp=mlp) for mlp in (0.75, 0.5)},
    **PICKS,
    **CORRECTED,
    **UNCORRECTED,
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
# What `--rivals` measures: every rival, and ours over the same range of speeds.
AGAINST_RIVALS = {
    **{
        name: FULL[name]
        for name in (
            "default",
            "default, halves apart",
            "kv 0.5",
            "kv 0.125",
            "kv 0.0625",
            "tau 0.8",
            "plain tau 0.8",
            "qkv 0.5",
            "qkv 0.25",
        )
    },
    **PICKS,
    **CORRECTED,
    **UNCORRECTED,
    **RIVALS,
}


def tomesd_form(keep: float) -> Method:
    """What tomesd computes, on our path, for models that the package can't patch. Destinations are
    a random token of each 2 x 2 cell, the same at every step. Of the others those most like a
    destination merge into it as means, queries too.
    """
    config = MaMeConfig(
        keep=keep,
        merge="qkv",
        study=Study(
            partition="random-grid",
            stride=(2, 2),
            redraw=False,
            weights="best",
            correct=False,
            pairs=False,
            detail=False,
        ),
        tiles=0,
    )
    return Method("tomesd", settings_of(config), lambda denoiser: mame(denoiser, config))


# The transformer with joint attention, whose 1,024 tokens make one level. Tiles of HyperTile would
# cut the text.
JOINT_RIVALS = {
    **{f"tomesd's form {keep}": tomesd_form(keep) for keep in (0.75, 0.5, 0.25)},
    **{
        name: method
        for name, method in RIVALS.items()
        if method.family not in ("tomesd", "hypertile")
        and "first level" not in name
        and "then" not in name
    },
}
JOINT = {
    "default": FULL["qkv 0.625"],
    "default, halves apart": ours(keep=0.625, merge="qkv", pairs=False),
    **{
        name.replace("default", "kv 0.25"): method
        for name, method in FULL.items()
        if name not in (*RIVALS, "qkv 0.625")
        and "first level" not in name
        and "mlp" not in name
        and "min_tokens" not in name
    },
    **JOINT_RIVALS,
}
JOINT_SHORT = {
    name: JOINT[name]
    for name in (
        "default",
        "kv 0.25",
        "pick 0.25",
        "qkv 0.5",
        "plain tau 0.8",
        "tomesd's form 0.5",
        "random 0.25",
        MEAN_ATTENTION,
    )
}
JOINT_RIVALS = {
    **{name: JOINT[name] for name in ("kv 0.25", "qkv 0.75", *AGAINST_RIVALS) if name in JOINT},
    **JOINT_RIVALS,
}
