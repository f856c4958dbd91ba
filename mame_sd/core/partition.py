"""Which positions are destinations and which are sources (paper, "Token Partitioning"): looked up,
or made the first time.

With `redraw` a random partition is drawn many times; `draw_at` says which draw a timestep takes.
All draws of one size have equally many destinations and sources in each block, so a draw is one row
of a table, picked on the device: no host sync, no other graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mame_sd.config import MaMeConfig
from mame_sd.core.tables import DRAWS, Positions, partitioned

GRIDS = ("grid", "random-grid")  # partitions of one destination per stride cell
DRAWN = ("random", "random-grid")  # partitions with a seed
FEWEST, TABLE = (
    8,
    2**18,
)  # draws of large planes: as many as this number of positions holds, but not fewer


def draw_at(timestep: Tensor | float) -> Tensor:
    """Which of the drawn partitions a step takes, a LongTensor [1] below DRAWS; it follows from the
    (largest) timestep.

    Largest, because video models give tokens that are known already (a first frame) the timestep 0
    throughout. The multiples of a constant choose, one by which few draws come twice over the
    timesteps of usual schedulers.
    """
    times = timestep if isinstance(timestep, Tensor) else torch.tensor([timestep])
    thousandths = (times.float().amax().reshape(1) * 1000).long()
    return ((thousandths * 0xAAF4E5A7) & 0xFFFFFFFF) * DRAWS >> 32


def positions(
    tokens: int,
    config: MaMeConfig,
    size: tuple[int, int] | None = None,
    device: torch.device | str = "cpu",
    draw: Tensor | None = None,
) -> Positions:
    """The partition of `tokens` positions that `config` asks for; special tokens are not counted.

    Args:
        tokens: L, at least 1.
        config: `partition`, `stride`, `seed`, `redraw` and `tiles` are read.
        size: (h, w) in tokens with h * w = L. Needed by the grid partition and by tiles; a square
            is assumed when it is left out and L is a perfect square.
        device: where the index tensors live.
        draw: with `redraw`, which of the drawn partitions, a LongTensor [1] that counts in circles;
            None: the first.

    Raises:
        ValueError: no tokens, a size that does not fit, or none where one is needed.
    """
    if tokens < 1:
        raise ValueError(f"tokens: expected at least 1 token to partition, got {tokens}")
    if size is not None and size[0] * size[1] != tokens:
        raise ValueError(f"size: expected (h, w) with h * w = {tokens} tokens, got {tuple(size)}")
    if config.partition in GRIDS or config.tiles:
        size = size or square(tokens)
        if size is None:
            raise ValueError(
                f"size: partition {config.partition!r} with tiles={config.tiles} needs the (h, w)"
                f" of {tokens} tokens, which are no square; give size=(h, w), or take"
                " partition='alternating' without tiles"
            )
    else:
        size = (1, tokens)  # rows do not matter: one key of the cache for all of them
    stride = config.stride if config.partition in GRIDS else (1, 1)
    seed = config.seed if config.partition in DRAWN else 0
    h, w = size
    # `or 0`: torch.compile takes only those numbers as constants that something has looked at.
    key = _known(h), _known(w), config.partition, *stride, seed or 0, config.tiles or 0, str(device)
    first = _looked_up(*key)
    if draw is None or not config.redraw or config.partition not in DRAWN:
        return first
    return replace(first, table=_looked_up_draws(*key), draw=draw.to(first.table.device))


def _known(count: int) -> int:
    """`count` as a plain number: a graph that is compiled for it, where torch.compile has taken it
    for one of many.

    A list so long makes dynamo look at the number itself, where `int` alone does not.
    """
    return len([0] * count) if torch.compiler.is_compiling() else int(count)


def square(tokens: int) -> tuple[int, int] | None:
    """(side, side) when `tokens` is a perfect square, else None."""
    side = math.isqrt(tokens)
    return (side, side) if side * side == tokens else None


class _Compiled:
    """Tables that compiled graphs read, as attributes: a tensor with a name of its own can be read
    at any number of sizes.

    As constants they would all be called alike, which AOTAutograd's backends (inductor) refuse.
    """


def _looked_up(*key: Any) -> Positions:
    if torch.compiler.is_compiling():
        return Positions(*getattr(_Compiled, _attribute(False, *key)))
    return _first_draw(*key)


def _looked_up_draws(*key: Any) -> Tensor:
    if torch.compiler.is_compiling():
        return getattr(_Compiled, _attribute(True, *key))
    return _draws(*key)


@torch.compiler.assume_constant_result
def _attribute(draws: bool, *key: Any) -> str:
    """The attribute of _Compiled that holds a table; nothing below is traced."""
    name = "_".join(map(str, (draws, *key)))
    if not hasattr(_Compiled, name):
        setattr(_Compiled, name, _draws(*key) if draws else _values(*key))
    return name


def _values(*key: Any) -> tuple[Any, ...]:
    pos = _first_draw(*key)
    return tuple(getattr(pos, f.name) for f in fields(pos) if f.init)


@lru_cache(maxsize=32)
def _draws(*key: Any) -> Tensor:
    """The table of all draws, see `Positions`."""
    count = min(DRAWS, max(FEWEST, TABLE // (key[0] * key[1])))
    with _cacheable():
        return torch.cat([partitioned(draw, *key[:-1]).table for draw in range(count)]).to(key[-1])


@lru_cache(maxsize=256)
def _first_draw(*key: Any) -> Positions:
    with _cacheable():
        return partitioned(0, *key[:-1]).to(key[-1])


@contextmanager
def _cacheable() -> Iterator[None]:
    """Tensors made in here are on the CPU, no inference tensors (which autograd refuses later) and
    none that export traces.
    """
    with torch.inference_mode(False), _disable_current_modes(), torch.device("cpu"):
        yield
