"""Which keys merge: a few tokens of each tile are destinations, and each other token joins the
nearest one of its tile.

A grid of tokens is cut into tiles, and each tile into cells of equally many tokens, one of which is
drawn as destination anew in each step (`cells_of`, `draw_at`). `group_tokens` puts each other token
into the group of the nearest destination; the farthest tokens stay alone. Groups give means and
sizes. Samples that guidance subtracts from one another merge alike (`leaders`).

All of it is products of small matrices, one for each tile: distances, and means as a product with a
matrix of ones, but on a CPU as sums by index. No tokens are sorted and nothing is added atomically,
so results don't depend on the order of threads, and what is not finite stays within its tile.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn.utils.rnn import pad_sequence

from mame_sd.upstream import private

_no_modes = private("torch", "torch.utils._python_dispatch", "_disable_current_modes")

DRAWS = 64  # partitions that steps and layers choose from
LARGEST_CELL = 16  # tokens a side


def unreadable(t: Tensor) -> bool:
    """Return whether the numbers of a tensor can't be read: in a graph that is being compiled or
    captured, and of a tensor without any.
    """
    captured = t.is_cuda and torch.cuda.is_current_stream_capturing()
    return torch.compiler.is_compiling() or captured or is_fake(t)


def autocasts(t: Tensor) -> bool:
    """Return whether autocast is on, on the device of `t`."""
    kind = t.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def no_autocast(t: Tensor) -> contextlib.AbstractContextManager[None]:
    """Autocast off on the device of `t`, where it is on."""
    return (
        torch.autocast(t.device.type, enabled=False) if autocasts(t) else contextlib.nullcontext()
    )


@dataclass(frozen=True, eq=False)
class Cells:
    """Slots of tokens, tile by tile, and which of them are destinations.

    Tiles and cells are balanced: where a side does not divide, some are one token longer, and none
    is a narrow rest at the border, so that a group has about as many tokens everywhere.

    Attributes:
        order: LongTensor [T * P], the position of the token in each slot of T tiles of P slots.
            Tiles with fewer tokens repeat one of theirs.
        pad: bool [T * P], True where a slot repeats a token; None where no tile has such slots.
        slot: LongTensor [L], the slot of each token.
        drawn: LongTensor [draws, M + n], of each draw `dst` and `queries`: one table, that a layer
            reads once.
        number: LongTensor [T * m], the number of each destination in its tile.
        tiles, width, m: T, P and m, the destinations of a tile.
        tokens, kept: L and M = T * m, how many tokens and destinations there are.
        in_order: whether the slots are the tokens in row-major order.
    """

    order: Tensor
    pad: Tensor | None
    slot: Tensor
    drawn: Tensor
    number: Tensor
    tiles: int
    width: int
    m: int
    tokens: int
    kept: int
    in_order: bool

    def to_slots(self, t: Tensor) -> Tensor:
        """Return the tokens [B, T * P, ...] in the order of the slots of t [B, L, ...]."""
        return t if self.in_order else t.index_select(1, self.order)

    def from_slots(self, t: Tensor) -> Tensor:
        """Return the tokens [B, L, ...] in row-major order of t [B, T * P, ...]."""
        return t if self.in_order else t.index_select(1, self.slot)

    @property
    def dst(self) -> Tensor:
        """LongTensor [draws, M], the slots of the destinations in each draw, tile by tile."""
        return self.drawn[:, : self.kept]

    @property
    def queries(self) -> Tensor:
        """LongTensor [draws, n], positions of tokens, spread evenly and in random order."""
        return self.drawn[:, self.kept :]


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
        # A list so long makes dynamo look at a side that it has taken for one of many.
        sides = tuple([len([0] * side) for side in size])
        return Cells(*getattr(_Compiled, _attribute(sides, *how)))
    made: Cells = _constant(_cut, tuple(size), *how)
    return made


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
def _attribute(size: tuple[int, ...], *how: Any) -> str:
    """The attribute of `_Compiled` that holds these cells."""
    name = "_".join(["cells", *map(str, how + size)]).replace(".", "_")  # a dot would be a path
    if not hasattr(_Compiled, name):
        setattr(_Compiled, name, tuple(vars(_constant(_cut, size, *how)).values()))
    return name


def _cut(
    size: tuple[int, ...], keep: float, tile_size: int, seed: int | None, device: str
) -> Cells:
    rows, columns = plane_of(size)
    high = wide = 1  # how many tiles there are down and across
    if tile_size:
        across = tile_size if rows > 1 else tile_size**2  # a sequence's have as many tokens
        high, wide = max(1, round(rows / tile_size)), max(1, round(columns / across))
    cells_high, cells_wide = _counts(rows / high, columns / wide, keep)
    tiles, m = high * wide, cells_high * cells_wide
    # Of each row and column of the plane: its tile, and its cell in that tile.
    row_tile, row_cell = _places(rows, high, cells_high)
    column_tile, column_cell = _places(columns, wide, cells_wide)
    tile = (row_tile.unsqueeze(1) * wide + column_tile).flatten()
    cell = tile * m + (row_cell.unsqueeze(1) * cells_wide + column_cell).flatten()
    in_order = tile.argsort(stable=True)
    of_slot = pad_sequence(in_order.split(tile.bincount().tolist()), True, -1)  # [T, P]
    pad = of_slot < 0
    slot = (~pad).flatten().nonzero().squeeze(1)[in_order.argsort()]
    # Draws: in each cell, one of its tokens.
    sizes = cell.bincount(minlength=tiles * m)
    generator = torch.Generator().manual_seed((seed or 0) % 2**32)
    drawn = torch.rand(DRAWS, tiles * m, generator=generator).double()
    drawn = torch.zeros_like(drawn[:1]) if seed is None else drawn
    at = sizes.cumsum(0) - sizes + (drawn * sizes).long()
    dst = slot[cell.argsort(stable=True)[at]]
    # Where each position of the plane is in the tokens' own order.
    own = torch.arange(rows * columns)
    own = own.view(size).transpose(0, 1).flatten() if len(size) == 3 else own
    queries = own[_spread(in_order, generator)][: len(dst)]
    return Cells(
        order=own[of_slot.where(~pad, of_slot[:, :1]).flatten()].to(device),
        pad=pad.flatten().to(device) if bool(pad.any()) else None,
        slot=slot[own.argsort()].to(device),
        drawn=torch.cat([dst, queries], 1).to(device),
        number=torch.arange(m).repeat(tiles).to(device),
        tiles=tiles,
        width=of_slot.shape[1],
        m=m,
        tokens=rows * columns,
        kept=tiles * m,
        in_order=tiles == 1 and len(size) < 3,
    )


def _counts(high: float, wide: float, keep: float) -> tuple[int, int]:
    """How many cells a tile of this height and width has down and across: as near to a share `keep`
    as can be, and of several such counts those whose cells are most square.
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


@dataclass(eq=False)
class Groups:
    """Which group each token of a grid belongs to: a destination's, or one of its own.

    Attributes:
        cells: the tiles and destinations of the grid.
        dst: LongTensor [T * m], the slots of the destinations.
        queries: LongTensor [n], the positions of the draw's queries.
        row: LongTensor [B, T * P], the number of the destination in its tile that the token of each
            slot joins, -1 for none.
        stay: LongTensor [B, r], the slots of the tokens that stay.
        dtype: of `sizes`, that of what was compared in fp32 at least.
        tokens_in, tokens_kept: L and K = T * m + r.
    """

    cells: Cells
    dst: Tensor
    queries: Tensor
    row: Tensor
    stay: Tensor
    dtype: torch.dtype
    tokens_in: int
    tokens_kept: int

    def means(self, *slots: Tensor, fitted: bool = False) -> tuple[list[list[Tensor]], Tensor]:
        """Average the tokens of each group.

        Args:
            slots: tokens [B, T * P, ...] in the order of the slots, all of one dtype.
            fitted: whether the last of them are computed with further, so that their means may be
                fp32 where cards multiply 16 bits.

        Returns:
            Of each the means [B, M, ...] and the tokens that stay [B, r, ...], in its dtype, and
            how many tokens each group has, [B, M], in fp32 (fp64 for fp64; in 16 bits where these
            are multiplied and the number is exact).
        """
        cells, batch, own = self.cells, self.row.shape[0], slots[0].dtype
        least = torch.promote_types(own, torch.float32)
        rows, merged = self.row.view(batch * cells.tiles, cells.width), batch * cells.kept
        added = self.row.device.type in ADDING and not unreadable(self.row)
        # Cards multiply 16 bits and sum in fp32, CPUs hardly do.
        halves = slots[0].is_cuda and own in (torch.float16, torch.bfloat16)
        used = own if halves else least
        if added:
            first = torch.arange(0, merged, cells.m, device=rows.device).unsqueeze(1)
            group = torch.where(rows < 0, merged, rows + first).flatten()
            counts = group.bincount(minlength=merged + 1)[:merged].to(least)
        else:
            belongs = rows.unsqueeze(1) == cells.number[: cells.m].view(-1, 1)
            counted = own if halves and cells.width <= 256 else least
            counts = belongs.sum(-1, keepdim=True, dtype=counted)
            # Shares of the mean rather than sums, which leave fp16's range.
            shares = (belongs / counts).to(used)
        parts = []
        for t in slots:
            flat = t.to(used).flatten(2)
            learns = torch.is_grad_enabled() and t.requires_grad
            wide = fitted and t is slots[-1] and halves and _SUMS_IN_FP32 and not learns
            if added:
                flat = flat.flatten(0, 1)
                sums = flat.new_zeros(merged + 1, flat.shape[1]).index_add(0, group, flat)
                mean = sums[:merged] / counts.unsqueeze(1)
            else:
                flat = flat.view(batch * cells.tiles, cells.width, flat.shape[2])
                more: Any = {"out_dtype": torch.float32} if wide else {}
                mean = torch.bmm(shares, flat, **more)
            mean = mean.view(batch, cells.kept, *t.shape[2:])
            mean = mean if wide else mean.to(own)
            at = self.stay.view(*self.stay.shape, *[1] * (t.dim() - 2))
            parts.append([mean, t.gather(1, at.expand(-1, -1, *t.shape[2:]))])
        return parts, counts.view(batch, cells.kept)

    @property
    def sizes(self) -> Tensor:
        """[B, K], how many tokens each group has."""
        counts = self.means(self.row.new_empty(*self.row.shape, 0, dtype=self.dtype))[1]
        return F.pad(counts, (0, self.stay.shape[1]), value=1.0)

    @property
    def kept(self) -> Tensor:
        """LongTensor [B, K], the position of the token that each group formed around."""
        batch, order = self.row.shape[0], self.cells.order
        return torch.cat([order.index_select(0, self.dst).expand(batch, -1), order[self.stay]], 1)

    @property
    def groups(self) -> Tensor:
        """LongTensor [B, L], the group of each token."""
        cells = self.cells
        numbers = torch.arange(self.tokens_kept, device=self.row.device)
        first = numbers[: cells.kept : cells.m].view(-1, 1)
        found = (self.row.view(-1, cells.tiles, cells.width) + first).flatten(1)
        found = found.scatter(1, self.stay, numbers[cells.kept :].expand(self.stay.shape))
        return found.index_select(1, cells.slot)

    def merge(self, t: Tensor) -> Tensor:
        """The means [B, K, C] of the groups of t [B, L, C], in the dtype of t."""
        return torch.cat(self.means(t.index_select(1, self.cells.order))[0][0], 1)

    def restore(self, y: Tensor) -> Tensor:
        """All tokens [B, L, C] as copies of their groups' y [B, K, C]."""
        return y.gather(1, self.groups.unsqueeze(-1).expand(-1, -1, y.shape[-1]))


# Devices that add rows by index in a fixed order; it takes a tenth of the products' time there.
ADDING = {"cpu"}
_SUMS_IN_FP32 = "dtype" in torch.ops.aten.bmm.overloads()  # of 16 bits on cards: from torch 2.8 on


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b [n, i, k] of a [n, i, j] and b [n, j, k], in fp32 (fp64 for fp64) at least."""
    learns = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    halves = a.is_cuda and a.dtype in (torch.float16, torch.bfloat16)
    if halves and not learns and _SUMS_IN_FP32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    dtype = torch.promote_types(a.dtype, torch.float32)
    return torch.bmm(a.to(dtype), b.to(dtype))


@torch.no_grad()
def group_tokens(
    slots: Tensor,
    cells: Cells,
    draw: Tensor | None = None,
    leader: Tensor | None = None,
    stay: int = 0,
) -> Groups:
    """Groups of tokens by their Euclidean distance to the destinations of their tile.

    Not by the angle: a logit depends on a key's length too, and keys that much of the attention
    lies on (sinks) are long. The choice has no gradient; means of the groups have.

    Args:
        slots: what is compared, in the order of the slots, [B, T * P, d]; fp32 is computed with
            (fp64 for fp64), whatever its dtype.
        cells: the tiles and destinations.
        draw: LongTensor [1], which of the draws; None: the first.
        leader: LongTensor [B], the sample whose tokens decide for each sample, such as the guided
            half for the unguided one; None, or of another batch: each its own.
        stay: how many of the tokens stay as they are: those farthest from any destination.
    """
    drawn = cells.drawn[0] if draw is None else cells.drawn.index_select(0, draw).view(-1)
    dst, queries = drawn.tensor_split([cells.kept])
    batch, dtype = slots.shape[0], torch.promote_types(slots.dtype, torch.float32)
    place = leader if leader is not None and leader.shape[0] == batch > 1 else None
    if place is not None and slots.device.type == "cpu" and not unreadable(place):
        # Nothing waits here, and samples with one leader are compared once.
        led, place = place.unique(return_inverse=True)
        slots = slots if len(led) == batch else slots.index_select(0, led)
    norms = torch.linalg.vector_norm(slots, dim=-1, dtype=dtype)
    chosen = slots.index_select(1, dst).view(-1, cells.m, slots.shape[2])
    of_chosen = norms.index_select(1, dst).view(-1, cells.m, 1)
    # |x - d|^2 = |x|^2 - 2 (x . d - |d|^2 / 2), of which the last part tells the nearest.
    nearness = product(chosen, slots.view(-1, cells.width, slots.shape[2]).transpose(1, 2))
    nearness.addcmul_(of_chosen, of_chosen, value=-0.5)
    best, row = nearness.max(1)
    row = row.view(norms.shape)
    if cells.pad is not None:
        row.masked_fill_(cells.pad, -1)
    staying = row[:, :0]
    if stay:
        near = torch.addcmul(best.view(norms.shape), norms, norms, value=-0.5)
        near.index_fill_(1, dst, torch.inf)
        if cells.pad is not None:
            near.masked_fill_(cells.pad, torch.inf)
        staying = near.topk(stay, largest=False, sorted=False).indices
        row.scatter_(1, staying, -1)
    # Each destination keeps itself: no equal one takes it, nor one that is not finite, beside which
    # no token is the farthest.
    row.index_copy_(1, dst, cells.number.expand(slots.shape[0], -1))
    if place is not None:
        row, staying = row.index_select(0, place), staying.index_select(0, place)
    return Groups(cells, dst, queries, row, staying, dtype, cells.tokens, cells.kept + stay)


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


def constant(make: Callable[..., Any], *args: Any) -> Any:
    """Tensors that `make` gives for these numbers and a device: made once, and changed by nobody.
    A graph that is compiled or captured can't be trusted with them, and makes its own.
    """
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if captured or torch.compiler.is_compiling():
        return make(*args)
    return _constant(make, *args)


@lru_cache(maxsize=256)
def _constant(make: Callable[..., Any], *args: Any) -> Any:
    # no inference tensors, which autograd refuses, and none that a mode traces
    with torch.inference_mode(False), _no_modes(), torch.device("cpu"):
        return make(*args)


def counting(length: int, device: torch.device) -> Tensor:
    """0, 1, ... below `length`, a LongTensor."""
    return torch.arange(length, device=device)


def leaders(inputs: Tensor, unguided: Sequence[bool] = (True, False)) -> Tensor:
    """Say whose tokens decide what merges in each sample of a model's input: LongTensor [B].

    Guidance adds a multiple of the difference of guided and unguided samples, and with it a
    multiple of what merging does to one and not to the other. Where both merge the same tokens most
    of that cancels (docs/experiments.md, "The two halves of guidance"). So an unguided chunk of the
    batch is led by the first guided one where their inputs are equal; all others lead themselves.
    What is found stays on the device: nothing waits for it.

    Args:
        inputs: latents [B, ...], with what pipelines put beside them.
        unguided: which of as many chunks of the batch are unguided; in nearly all pipelines it is
            the first of two, of the negative prompt.
    """
    own = torch.arange(inputs.shape[0], device=inputs.device)
    if not unguided or all(unguided) or inputs.shape[0] % len(unguided):
        return own
    chunks, numbers = inputs.chunk(len(unguided)), list(own.chunk(len(unguided)))
    guide = unguided.index(False)
    for chunk, follows in enumerate(unguided):
        if follows:
            same = (chunks[chunk] == chunks[guide]).all()
            numbers[chunk] = torch.where(same, numbers[guide], numbers[chunk])
    return torch.cat(numbers)
