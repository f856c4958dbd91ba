"""Cut a grid of tokens into tiles, and each tile into cells of equally many tokens.

The result consists of tables of positions. `groups.make_cells` makes them once for each size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

DRAWS = 64  # partitions that steps and layers choose from
LARGEST_CELL = 16  # tokens a side


@dataclass(frozen=True, eq=False)
class Cells:
    """The slots of tokens, tile by tile, and the drawn destinations.

    Tiles and cells are balanced: if a side doesn't divide evenly, some are one token longer, and no
    narrow remainder is left at the border. So all groups have about as many tokens.

    Attributes:
        order: LongTensor [T * P], the position of the token in each slot, for T tiles of P slots.
            Tiles with fewer tokens repeat one of theirs.
        pad: bool [T * P], True where a slot repeats a token. If None, no tile has such slots.
        slot: LongTensor [L], the slot of each token.
        drawn: LongTensor [draws, M + n], `dst` and `queries` of each draw in one table, so that a
            layer reads only once.
        places: LongTensor [draws, M], the places of each draw's destinations in their tile.
        number: LongTensor [T * m], the number of each destination within its tile.
        tiles, width, m: T, P and m, the number of destinations in a tile.
        tokens, kept: L and M = T * m, the number of tokens and of destinations.
        in_order: if True, the slots are the tokens in row-major order.
    """

    order: Tensor
    pad: Tensor | None
    slot: Tensor
    drawn: Tensor
    places: Tensor
    number: Tensor
    tiles: int
    width: int
    m: int
    tokens: int
    kept: int
    in_order: bool

    def to_slots(self, t: Tensor) -> Tensor:
        """Reorder t [B, L, ...] from row-major order to slots, [B, T * P, ...]."""
        return t if self.in_order else t.index_select(1, self.order)

    def from_slots(self, t: Tensor) -> Tensor:
        """Reorder t [B, T * P, ...] from slots to row-major order, [B, L, ...]."""
        return t if self.in_order else t.index_select(1, self.slot)

    @property
    def dst(self) -> Tensor:
        """Return the slots of each draw's destinations, tile by tile, LongTensor [draws, M]."""
        return self.drawn[:, : self.kept]

    @property
    def queries(self) -> Tensor:
        """Return the positions of each draw's queries, LongTensor [draws, n].

        They are spread evenly and in random order.
        """
        return self.drawn[:, self.kept :]


def checked_grid(grid: Sequence[int], before: int, after: int) -> tuple[int, ...]:
    """Check where the tokens of an image are in a sequence.

    Args:
        grid: (h, w) or (t, h, w) of the image's tokens.
        before: number of tokens before the image's.
        after: number of tokens after the image's.

    Returns:
        The sides of the grid as integers.

    Raises:
        ValueError: a side or a number of tokens that can't be.
    """
    try:
        size = tuple(index(side) for side in grid)
        around = index(before), index(after)
    except TypeError:
        size, around = (), (0, 0)
    if not 1 <= len(size) <= 3 or min(*size, 1) < 1 or min(around) < 0:
        raise ValueError(
            "grid, before, after: expected (h, w) or (t, h, w) of at least 1 and numbers of tokens,"
            f" got {grid!r}, {before!r}, {after!r}"
        )
    return size


def plane_of(size: tuple[int, ...]) -> tuple[int, int]:
    """Return the (rows, columns) of the plane on which tokens are compared.

    A video's plane is (h * t, w): the rows of all frames are interleaved, so that a tile spans
    neighbours in time as well as in space.
    """
    count = math.prod(size)
    return (1, count) if len(size) == 1 else (count // size[-1], size[-1])


def cut(
    size: tuple[int, ...],
    keep: float,
    tile_size: int,
    seed: int | None,
    device: str,
    strips: bool,
) -> Cells:
    """Make the cells of a grid of tokens. Arguments and result are those of `groups.make_cells`."""
    rows, columns = plane_of(size)
    high = wide = 1  # number of tiles down and across
    if tile_size:
        across = tile_size if rows > 1 else tile_size**2  # a sequence's tiles have as many tokens
        high, wide = max(1, round(rows / tile_size)), max(1, round(columns / across))
        count = _strips(rows, columns, tile_size**2) if strips and len(size) == 2 else None
        high, wide = (high, wide) if count is None else (count, 1)
    cells_high, cells_wide = _counts(rows / high, columns / wide, keep)
    tiles, m = high * wide, cells_high * cells_wide
    # Map each row and column of the plane to its tile and to its cell within that tile.
    row_tile, row_cell = _places(rows, high, cells_high)
    column_tile, column_cell = _places(columns, wide, cells_wide)
    tile = (row_tile.unsqueeze(1) * wide + column_tile).flatten()
    cell = tile * m + (row_cell.unsqueeze(1) * cells_wide + column_cell).flatten()
    in_order = tile.argsort(stable=True)
    of_slot = pad_sequence(in_order.split(tile.bincount().tolist()), True, -1)  # [T, P]
    pad = of_slot < 0
    slot = (~pad).flatten().nonzero().squeeze(1)[in_order.argsort()]
    # Each draw picks one token of each cell.
    sizes = cell.bincount(minlength=tiles * m)
    generator = torch.Generator().manual_seed((seed or 0) % 2**32)
    drawn = torch.rand(DRAWS, tiles * m, generator=generator).double()
    drawn = torch.zeros_like(drawn[:1]) if seed is None else drawn
    at = sizes.cumsum(0) - sizes + (drawn * sizes).long()
    dst = slot[cell.argsort(stable=True)[at]]
    # Map each position of the plane to the token's position in row-major order.
    row_major = torch.arange(rows * columns)
    row_major = row_major.view(size).transpose(0, 1).flatten() if len(size) == 3 else row_major
    queries = row_major[_spread(in_order, generator)][: len(dst)]
    return Cells(
        order=row_major[of_slot.where(~pad, of_slot[:, :1]).flatten()].to(device),
        pad=pad.flatten().to(device) if bool(pad.any()) else None,
        slot=slot[row_major.argsort()].to(device),
        drawn=torch.cat([dst, queries], 1).to(device),
        places=(dst % of_slot.shape[1]).to(device),
        number=torch.arange(m).repeat(tiles).to(device),
        tiles=tiles,
        width=of_slot.shape[1],
        m=m,
        tokens=rows * columns,
        kept=tiles * m,
        in_order=wide == 1 and not pad.any() and len(size) < 3,
    )


def _strips(rows: int, columns: int, tokens: int) -> int | None:
    """Return the number of equal strips of about `tokens` tokens into which to cut a plane.

    If no number of strips gives two thirds to three halves as many tokens, return None.
    """
    fits = [
        n for n in range(1, rows + 1)
        if rows % n == 0 and 2 / 3 <= rows // n * columns / tokens <= 3 / 2
    ]  # fmt: skip
    return min(fits, key=lambda n: abs(math.log(rows / n * columns / tokens)), default=None)


def _counts(high: float, wide: float, keep: float) -> tuple[int, int]:
    """Return the number of cells (down, across) in a tile of mean height and width in tokens.

    The share of destinations is as near to `keep` as possible. Among counts that are about equally
    near, the most square cells win.
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
    """Map `side` rows to their tiles and to the cells within these, each a LongTensor [side].

    Tiles, and the cells of each tile, are as equally long as possible.
    """
    at = torch.arange(side)
    tile = at * tiles // side
    count = tile.bincount(minlength=tiles)
    place = at - (count.cumsum(0) - count)[tile]
    return tile, place * cells // count[tile]


def _spread(in_order: Tensor, generator: torch.Generator) -> Tensor:
    """Draw the positions of queries, LongTensor [DRAWS, n], in random order.

    One is drawn from each of n runs of neighbours.
    """
    n = min(len(in_order), 512)
    edges = torch.arange(n + 1) * len(in_order) // n
    lengths = edges[1:] - edges[:-1]
    place = torch.rand(DRAWS, n, generator=generator).double()
    drawn = in_order[edges[:-1] + (place * lengths).long()]
    return drawn.gather(1, torch.rand(DRAWS, n, generator=generator).argsort(1))
