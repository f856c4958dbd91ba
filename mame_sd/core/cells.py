"""Which tokens of a grid may become destinations: one of each cell, drawn anew in each step.

The grid is cut into tiles, and each tile into equally many cells. Tiles and cells are balanced:
where a side does not divide, some of them are one token longer, and none is a narrow rest at the
border. A group of tokens then stands for about as many tokens everywhere, on odd, prime and oblong
grids too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

DRAWS = 64  # partitions that steps and layers choose from
LARGEST_CELL = 16  # tokens a side


@dataclass(frozen=True, eq=False)
class Cells:
    """Slots of tokens, tile by tile, and which of them are destinations.

    Attributes:
        order: LongTensor [T * P], the position of the token in each slot of T tiles of P slots.
            Tiles with fewer tokens repeat one of theirs.
        pad: bool [T * P], True where a slot repeats a token; None where no tile has such slots.
        slot: LongTensor [L], the slot of each token.
        dst: LongTensor [draws, T * m], the slots of the destinations in each draw, tile by tile.
        queries: LongTensor [draws, n], positions of tokens, spread evenly and in random order.
        number: LongTensor [T * m], the number of each destination in its tile.
        tiles, width, m: T, P and m.
        tokens: L, how many tokens the grid has.
        kept: M = T * m, how many destinations there are.
    """

    order: Tensor
    pad: Tensor | None
    slot: Tensor
    dst: Tensor
    queries: Tensor
    number: Tensor
    tiles: int
    width: int
    m: int
    tokens: int
    kept: int


def cells_of(
    size: tuple[int, ...],
    keep: float,
    tile_size: int = 16,
    seed: int | None = 0,
    device: torch.device | str = "cpu",
) -> Cells:
    """The cells of a grid of tokens, made once and looked up afterwards.

    Args:
        size: (h, w) of an image's tokens, (t, h, w) of a video's, or (n,) of a sequence, in
            row-major order.
        keep: share of the tokens that are destinations, as near as cells allow.
        tile_size: side of a tile; 0: the whole grid is one.
        seed: of the draws; a generator of their own, never the global one. None: nothing is drawn,
            destinations are the first tokens of their cells.
        device: where the index tensors live.
    """
    how = float(keep), tile_size, seed, str(device)
    if torch.compiler.is_compiling():
        return Cells(*getattr(_Compiled, _attribute(*how, *map(_known, size))))
    return _made(tuple(int(side) for side in size), *how)


def _known(side: int) -> int:
    """`side` as a plain number of the graph that is compiled for it, where torch.compile has taken
    it for one of many: a list so long makes dynamo look at the number itself.
    """
    return len([0] * side)


def plane_of(size: tuple[int, ...]) -> tuple[int, int]:
    """The (rows, columns) on which tokens are compared.

    A video's plane is (h * t, w): the rows of all frames interleaved, so that a tile spans
    neighbours in time as well as in space.
    """
    count = math.prod(size)
    return (1, count) if len(size) == 1 else (count // size[-1], size[-1])


class _Compiled:
    """Tables that compiled graphs read, as attributes: as constants they would all be called alike,
    which AOTAutograd's backends refuse.
    """


@torch.compiler.assume_constant_result
def _attribute(keep: float, tile_size: int, seed: int | None, device: str, *size: int) -> str:
    """The attribute of `_Compiled` that holds these cells."""
    key = keep, tile_size, seed, device, *size
    name = "_".join(["cells", *map(str, key)]).replace(".", "_")  # a dot would be a path to Dynamo
    if not hasattr(_Compiled, name):
        made = _made(size, keep, tile_size, seed, device)
        setattr(_Compiled, name, tuple(getattr(made, f.name) for f in fields(made)))
    return name


@lru_cache(maxsize=256)
def _made(
    size: tuple[int, ...], keep: float, tile_size: int, seed: int | None, device: str
) -> Cells:
    with _cacheable():
        made = _cut(size, keep, tile_size, seed)
        values = (getattr(made, f.name) for f in fields(made))
        moved: Any = [v.to(device) if isinstance(v, Tensor) else v for v in values]
        return Cells(*moved)


@contextmanager
def _cacheable() -> Iterator[None]:
    """Tensors made in here are on the CPU, no inference tensors, and none that a mode traces."""
    with torch.inference_mode(False), _disable_current_modes(), torch.device("cpu"):
        yield


def _cut(size: tuple[int, ...], keep: float, tile_size: int, seed: int | None) -> Cells:
    rows, columns = plane_of(size)
    high, wide = _tiles(rows, columns, tile_size)
    cells_high, cells_wide = _counts(rows / high, columns / wide, keep)
    m = cells_high * cells_wide
    # Of each row and column of the plane: its tile, and its cell in that tile.
    row_tile, row_cell = _places(rows, high, cells_high)
    column_tile, column_cell = _places(columns, wide, cells_wide)
    tile = (row_tile.unsqueeze(1) * wide + column_tile).flatten()
    cell = (row_cell.unsqueeze(1) * cells_wide + column_cell).flatten()
    count, width = high * wide, int(tile.bincount().max())
    in_order = tile.argsort(stable=True)
    place = torch.arange(len(tile)) - (tile.bincount().cumsum(0) - tile.bincount())[tile[in_order]]
    slots = tile[in_order] * width + place
    first = in_order[torch.searchsorted(tile[in_order], torch.arange(count))]
    order = first.repeat_interleave(width).index_copy(0, slots, in_order)
    pad = torch.ones(count * width, dtype=torch.bool).index_fill(0, slots, False)
    slot = torch.empty_like(tile).index_copy(0, in_order, slots)
    # Draws: in each cell, one of its tokens.
    of_cell = (tile * m + cell).argsort(stable=True)  # positions cell by cell
    sizes = (tile * m + cell).bincount(minlength=count * m)
    starts = sizes.cumsum(0) - sizes
    generator = torch.Generator().manual_seed((seed or 0) % 2**32)
    drawn = torch.rand(DRAWS, count * m, generator=generator).double()
    drawn = torch.zeros_like(drawn[:1]) if seed is None else drawn
    dst = slot[of_cell[starts + (drawn * sizes).long()]]
    queries = _spread(in_order, generator)
    to_own = _own_order(size)
    return Cells(
        to_own[order], pad if bool(pad.any()) else None, slot[_inverse(to_own)], dst,
        to_own[queries], torch.arange(m).repeat(count), count, width, m, rows * columns, count * m,
    )  # fmt: skip


def _tiles(rows: int, columns: int, tile_size: int) -> tuple[int, int]:
    """How many tiles there are down and across; a sequence's have as many tokens as others."""
    if not tile_size:
        return 1, 1
    across = tile_size if rows > 1 else tile_size**2
    return max(1, round(rows / tile_size)), max(1, round(columns / across))


def _counts(high: float, wide: float, keep: float) -> tuple[int, int]:
    """How many cells a tile of this height and width has down and across, for a share `keep`.

    The count is as near to the share as can be; of several, those whose cells are most square.
    """
    highest, widest = max(1, math.floor(high)), max(1, math.floor(wide))
    wanted = keep * high * wide

    def rank(counts: tuple[int, int]) -> tuple[float, float]:
        down, across = counts
        square = abs(math.log((high / down) / (wide / across)))
        return abs(math.log(down * across / wanted)) + 0.03 * square, square

    options = {
        (down, across)
        for down in range(max(1, math.ceil(high / LARGEST_CELL)), highest + 1)
        for across in {math.floor(wanted / down), math.ceil(wanted / down)}
        if 1 <= across <= widest
    } or {(1, 1)}
    return min(options, key=rank)


def _places(side: int, tiles: int, cells: int) -> tuple[Tensor, Tensor]:
    """Of each of `side` rows its tile and its cell in the tile, both balanced."""
    at = torch.arange(side)
    tile = at * tiles // side
    count = tile.bincount(minlength=tiles)
    place = at - (count.cumsum(0) - count)[tile]
    return tile, place * cells // count[tile]


def _spread(in_order: Tensor, generator: torch.Generator) -> Tensor:
    """Positions of tokens [DRAWS, n] in random order, one of each of n runs of neighbours."""
    n = min(len(in_order), 512)
    edges = torch.arange(n + 1) * len(in_order) // n
    lengths = edges[1:] - edges[:-1]
    place = torch.rand(DRAWS, n, generator=generator).double()
    drawn = in_order[edges[:-1] + (place * lengths).long()]
    return drawn.gather(1, torch.rand(DRAWS, n, generator=generator).argsort(1))


def _own_order(size: tuple[int, ...]) -> Tensor:
    """Where each position of the plane is in the tokens' own order [L]."""
    own = torch.arange(math.prod(size))
    return own.view(size).transpose(0, 1).flatten() if len(size) == 3 else own


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).index_copy(0, order, torch.arange(len(order)))
