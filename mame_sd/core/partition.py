"""Which positions are destinations and which are sources (paper, "Token Partitioning"): looked up,
or made the first time, by tensor operations.

Without tiles there is one block, the whole sequence. Else every square tile is a block with a
partition of its own, in which positions count in row-major order. Blocks of unequal size are padded
to the largest and carry masks.

With `redraw` a random partition is drawn many times; `draw_at` says which draw a timestep takes.
All draws of one size have equally many destinations and sources in each block. So a draw is one row
of a table, picked on the device: no host sync, no other graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mame_sd.config import MaMeConfig

GRIDS = ("grid", "random-grid")  # partitions of one destination per stride cell
DRAWN = ("random", "random-grid")  # partitions with a seed
FEWEST, TABLE = (
    8,
    2**18,
)  # draws of large planes: as many as this number of positions holds, but not fewer
# partitions that steps and layers choose from: a draw that comes again brings its error again
DRAWS = 64
SPREAD = 13  # between neighbouring draws, where several share a row of the table
# one of so many tokens is looked at where a part tells enough
# (`mame_sd.core.correction.within_groups`)
SAMPLED = 8


# The index tensors of a draw, in the order in which they stand side by side in a row of the table.
PER_DRAW = (
    "dst",
    "src",
    "slots",
    "src_real",
    "gather",
    "source",
    "sample",
    "slot",
    "sample_slot",
)


@dataclass(frozen=True, eq=False)
class Positions:
    """A partition of L positions into T blocks of at most m destinations and n sources each.

    M and N count the real destinations and sources of all blocks, so M + N = L. Slots are the
    entries of a block-shaped tensor, T * m or T * n of them, read row by row. A padded slot repeats
    a real position of its block. All draws of one size have equally many of each, so a draw is one
    row of `table`. On CUDA, where kernels read the table by themselves, it is looked up where one
    of its tensors is first asked for.
    """

    table: (
        Tensor  # [draws, K] LongTensor: the tensors of PER_DRAW side by side, a row for each draw
    )
    dst_real: Tensor | None  # [M] the slots that are not padding; None: all of them
    dst_pad: Tensor | None  # [T, m] True at padding; None: there is none
    src_pad: Tensor | None  # [T, n] True at padding; None: there is none
    groups: Tensor  # [T, m] number of each destination slot among the [M]; -2 at padding
    m: int  # destination slots of a block
    n: int  # source slots of a block
    blocks: int  # T
    M: int
    N: int
    draw: Tensor | None = None  # LongTensor [1] below DRAWS, which draw; None: the first
    L: int = field(init=False)
    samples: int = field(init=False)  # how many the sample has
    dst: Tensor = field(init=False)  # [M] positions of the destinations, block by block
    src: Tensor = field(
        init=False
    )  # [N] positions of the sources, ascending over the whole sequence
    slots: Tensor = field(
        init=False
    )  # [T, m + n] position of every slot of a block, destinations first
    src_real: Tensor = field(init=False)  # [N] the slot of each source, in the order of `src`
    gather: Tensor = field(
        init=False
    )  # [L] row of each position in concat(destinations [M], source slots [T * n])
    source: Tensor = field(init=False)  # [L] source slot of each position; 0 at destinations
    sample: Tensor = field(
        init=False
    )  # [samples] positions at random, one of each run of SAMPLED in a tile's rows
    slot: Tensor = field(init=False)  # [L] which of the slots each position is, of T * (m + n)
    sample_slot: Tensor = field(init=False)  # [samples] the slots of the sample
    placed: Tensor = field(init=False)  # [L + samples] `slot` and `sample_slot` side by side

    def __post_init__(self) -> None:
        object.__setattr__(self, "L", self.M + self.N)
        object.__setattr__(self, "samples", max(1, self.L // SAMPLED))
        if self.draw is None or not self.table.is_cuda or torch.compiler.is_compiling():
            self._look_up()

    def __getattr__(self, name: str) -> Tensor:
        """Called where an attribute is not there yet."""
        if name not in (*PER_DRAW, "placed"):
            raise AttributeError(name)
        self._look_up()
        found: Tensor = self.__dict__[name]
        return found

    def _look_up(self) -> None:
        if self.draw is None:
            row = self.table[0]
        else:
            draws, draw = self.table.shape[0], self.draw
            if draws < DRAWS:
                draw = constant(_spread, draws, draw.device).index_select(0, draw)
            row = self.table.index_select(0, draw).view(-1)
        width = self.m + self.n
        n = self.samples
        each = self.M, self.N, self.blocks * width, self.N, self.L, self.L, n, self.L, n
        parts = row.split(each)
        object.__setattr__(self, "placed", row[-(self.L + n) :])
        for name, part in zip(PER_DRAW, parts, strict=True):
            object.__setattr__(
                self, name, part.view(self.blocks, width) if name == "slots" else part
            )

    @property
    def dst_slots(self) -> Tensor:
        """[T, m] position of every destination slot"""
        return self.slots[:, : self.m]

    @property
    def src_slots(self) -> Tensor:
        """[T, n] position of every source slot"""
        return self.slots[:, self.m :]

    def to(self, device: torch.device | str) -> Positions:
        """These positions with their tensors on `device`."""
        moved: dict[str, Any] = {
            f.name: v.to(device) if isinstance(v := getattr(self, f.name), Tensor) else v
            for f in fields(self)
            if f.init
        }
        return Positions(**moved)


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
        draw: with `redraw`, which of the drawn partitions, a LongTensor [1] below DRAWS;
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
    compiling = torch.compiler.is_compiling()
    # `or 0`: torch.compile takes only those numbers as constants that something has looked at.
    sides = (_known(h), _known(w)) if compiling else size
    key = *sides, config.partition, *stride, seed or 0, config.tiles or 0, str(device)
    if compiling:
        first = Positions(*getattr(_Compiled, _attribute(False, *key)))
    else:
        first = _first_draw(*key)
    if draw is None or not config.redraw or config.partition not in DRAWN:
        return first
    table = getattr(_Compiled, _attribute(True, *key)) if compiling else _draws(*key)
    return replace(first, table=table, draw=draw.to(table.device))


def _known(count: int) -> int:
    """`count` as a plain number of the graph that is compiled for it, where torch.compile has taken
    it for one of many.

    A list so long makes dynamo look at the number itself, where `int` alone does not.
    """
    return len([0] * count)


def square(tokens: int) -> tuple[int, int] | None:
    """(side, side) when `tokens` is a perfect square, else None."""
    side = math.isqrt(tokens)
    return (side, side) if side * side == tokens else None


class _Compiled:
    """Tables that compiled graphs read, as attributes: a tensor with a name of its own can be read
    at any number of sizes.

    As constants they would all be called alike, which AOTAutograd's backends (inductor) refuse.
    """


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


def constant(make: Callable[..., Tensor], *args: Any) -> Tensor:
    """What `make` gives for these arguments, numbers and a device; nobody may change it.

    A graph that is compiled or captured makes its own: it can't be trusted with one that others
        read.
    """
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if captured or torch.compiler.is_compiling():
        return make(*args)
    return _made(make, args)


def is_captured() -> bool:
    """Whether a CUDA graph is being captured: what runs then has values only when it is
    replayed.
    """
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=512)
def _made(make: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        return make(*args)  # autograd refuses inference tensors


def _spread(draws: int, device: torch.device) -> Tensor:
    """The row of a table of so many draws that each of DRAWS takes, [DRAWS]."""
    return counting(DRAWS, device) * SPREAD % DRAWS * draws // DRAWS


def counting(length: int, device: torch.device) -> Tensor:
    """0, 1, ... below `length`, a LongTensor."""
    return torch.arange(length, device=device)


@contextmanager
def _cacheable() -> Iterator[None]:
    """Tensors made in here are on the CPU, no inference tensors (which autograd refuses later) and
    none that export traces.
    """
    with torch.inference_mode(False), _disable_current_modes(), torch.device("cpu"):
        yield


def partitioned(
    draw: int, h: int, w: int, partition: str, sh: int, sw: int, seed: int, tile_side: int
) -> Positions:
    """The partition of h x w positions, on PyTorch's default device, which has to be the CPU.

    Args:
        draw: which of the partitions that `seed` gives; read by the random ones alone, as `seed`
            is.
        partition: its name in MaMeConfig.
        sh, sw: rows and columns of a cell, read by the grids alone.
        tile_side: side of a tile; 0: all positions are one block.
    """
    tile_row, row, height = _cut(h, tile_side)
    tile_column, column, width = _cut(w, tile_side)
    tile = (tile_row.unsqueeze(1) * (int(tile_column[-1]) + 1) + tile_column).flatten()
    place = (row.unsqueeze(1) * width + column).flatten()  # in its tile, row by row
    order = tile.argsort(stable=True)  # positions tile by tile
    # The generator reads 32 bits of a seed.
    generator = torch.Generator().manual_seed((seed + draw * 0x9E3779B1) % 2**32)
    if partition == "alternating":
        is_dst = place % 2 == 0
    elif partition == "sequential":
        is_dst = place < (height.unsqueeze(1) * width).flatten().add(1) // 2
    elif partition == "random":
        blocks = order.split(tile.bincount().tolist())
        half = [
            b.index_select(0, torch.randperm(len(b), generator=generator)[: (len(b) + 1) // 2])
            for b in blocks
        ]
        is_dst = _mask(h * w, torch.cat(half))
    else:
        is_dst = ((row % sh == 0).unsqueeze(1) & (column % sw == 0)).flatten()
    if partition == "random-grid":
        corner = order.masked_select(is_dst.index_select(0, order))
        rows = (
            (height - row).clamp(max=sh).index_select(0, corner // w)
        )  # of each cell: a tile's border cuts it
        columns = (width - column).clamp(max=sw).index_select(0, corner % w)
        y, x = torch.rand(len(corner), 2, generator=generator).double().unbind(1)
        is_dst = _mask(h * w, corner + (y * rows).long() * w + (x * columns).long())
    return _layout(tile, order, is_dst, _sample(order, generator))


def _sample(order: Tensor, generator: torch.Generator) -> Tensor:
    """One position at random of each SAMPLED successive ones of `order` [L]."""
    runs = max(1, len(order) // SAMPLED)
    length = len(order) // runs
    place = torch.randint(length, (runs,), generator=generator)
    sample = order.index_select(0, torch.arange(runs) * length + place)
    mixed = torch.randperm(runs, generator=generator)
    # Either half lies anywhere: two estimates are made of them.
    return sample.index_select(0, torch.cat([mixed[::2], mixed[1::2]]))


def _cut(length: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each of `length` rows (or columns): the number of its tile, its place in it, and how many
    the tile has.
    """
    at, side = torch.arange(length), side or length
    return at // side, at % side, (length - at + at % side).clamp(max=side)


def _mask(length: int, at: Tensor) -> Tensor:
    return torch.zeros(length, dtype=torch.bool).index_fill_(0, at, True)


def _layout(tile: Tensor, order: Tensor, is_dst: Tensor, sample: Tensor) -> Positions:
    """The index tensors, from the tile of each position [L], all positions tile by tile [L], which
    are destinations [L], and the sample of them.
    """
    # index_select, for t[index] of a few thousand entries starts threads.
    is_dst = is_dst.index_select(0, order)
    dst, src = order.masked_select(is_dst), order.masked_select(~is_dst)

    def placed(which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each position its tile and its number among those of the tile, and how many every tile
        has [T].
        """
        its_tile = tile.index_select(0, which)
        count = its_tile.bincount(minlength=int(tile[-1]) + 1)
        first = (count.cumsum(0) - count).index_select(0, its_tile)
        return its_tile, torch.arange(len(which)) - first, count

    dst_tile, dst_rank, dst_count = placed(dst)
    src_tile, src_rank, src_count = placed(src)
    m, n = int(dst_count.max()), int(src_count.max())
    slots = dst.masked_select(dst_rank == 0).repeat_interleave(
        m + n
    )  # padding: the first destination of the tile
    dst_at, src_at = dst_tile * (m + n) + dst_rank, src_tile * (m + n) + m + src_rank
    slots.index_copy_(0, dst_at, dst)
    slots.index_copy_(0, src_at, src)
    slot = torch.zeros_like(order).index_copy_(0, dst, dst_at).index_copy_(0, src, src_at)
    groups = torch.full((dst_count.shape[0] * m,), -2)
    groups.index_copy_(0, dst_tile * m + dst_rank, torch.arange(len(dst)))
    dst_pad = torch.arange(m) >= dst_count.unsqueeze(1)
    src_pad = torch.arange(n) >= src_count.unsqueeze(1)
    source = torch.zeros_like(order).index_copy_(0, src, src_tile * n + src_rank)
    gather = (source + len(dst)).index_copy_(0, dst, torch.arange(len(dst)))
    ascending = src.sort().values
    parts = {
        "dst": dst,
        "src": ascending,
        "slots": slots,
        "src_real": source.index_select(0, ascending),
        "gather": gather,
        "source": source,
        "sample": sample,
        "slot": slot,
        "sample_slot": slot.index_select(0, sample),
    }
    return Positions(
        table=torch.cat([parts[name] for name in PER_DRAW]).unsqueeze(0),
        dst_real=dst_tile * m + dst_rank if dst_pad.any() else None,
        dst_pad=dst_pad if dst_pad.any() else None,
        src_pad=src_pad if src_pad.any() else None,
        groups=groups.view(-1, m),
        m=m,
        n=n,
        blocks=slots.shape[0] // (m + n),
        M=len(dst),
        N=len(src),
    )
