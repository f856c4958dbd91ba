"""Group similar tokens around a few destinations of each tile.

A grid of tokens is cut into tiles, and each tile into cells of equally many tokens. In each step
one token of each cell is drawn as a destination (`make_cells`, `partition_index`). `group_tokens`
puts each other token into the group of the nearest destination; the farthest tokens stay alone.
Groups have means and sizes. Samples that guidance subtracts from one another merge alike
(`guidance_leaders`).

Everything is computed as products of small matrices, one for each tile: distances, and means as a
product with a matrix of ones. On a CPU, means are sums by index instead. No tokens are sorted and
nothing is added atomically, so results don't depend on the order of threads, and values that are
not finite stay within their tile. Destinations drawn by cell follow tomesd (arXiv 2303.17604).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import pad_sequence

from mame_sd.compat import private

_no_modes = private("torch", "torch.utils._python_dispatch", "_disable_current_modes")

DRAWS = 64  # partitions that steps and layers choose from
LARGEST_CELL = 16  # tokens a side


def unreadable(t: Tensor) -> bool:
    """Return True if the values of a tensor can't be read.

    This applies while a graph is compiled or captured, and to tensors without values (meta and fake
    tensors).
    """
    captured = t.is_cuda and torch.cuda.is_current_stream_capturing()
    without = t.is_meta or isinstance(t, FakeTensor)
    return torch.compiler.is_compiling() or captured or without


def no_autocast(t: Tensor) -> contextlib.AbstractContextManager[None]:
    """Return a context that turns autocast off on the device of `t`, if it is on."""
    kind = t.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


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
        number: LongTensor [T * m], the number of each destination within its tile.
        tiles, width, m: T, P and m, the number of destinations in a tile.
        tokens, kept: L and M = T * m, the number of tokens and of destinations.
        in_order: if True, the slots are the tokens in row-major order.
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


def make_cells(
    size: tuple[int, ...],
    keep: float,
    tile_size: int = 16,
    seed: int | None = 0,
    device: torch.device | str = "cpu",
    strips: bool = False,
) -> Cells:
    """Return the cells of a grid of tokens. They are made once and cached.

    Args:
        size: (h, w) of an image's tokens, (t, h, w) of a video's, or (n,) of a sequence, in
            row-major order.
        keep: share of the tokens that are destinations. The nearest share that cells allow is used.
        tile_size: side of a tile in tokens. If 0, the whole grid is one tile.
        seed: seeds the draws with their own generator, never the global one. If None, nothing is
            drawn, and the first token of each cell is its destination.
        device: device of the index tensors.
        strips: if True, tiles of an image are strips of whole rows where the rows divide into
            strips of about as many tokens. Then the slots are the tokens in row-major order.

    Returns:
        The cells, with index tensors on `device`.
    """
    options = float(keep), tile_size, seed, str(device), strips
    if torch.compiler.is_compiling():
        # A list this long makes dynamo guard on the side of the grid that it had taken as dynamic.
        sides = tuple([len([0] * side) for side in size])
        return Cells(*getattr(_Compiled, _attribute(sides, *options)))
    made: Cells = _cached_tensors(_cut, tuple(size), *options)
    return made


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


class _Compiled:
    """Hold the tables that compiled graphs read, as attributes.

    As constants of a graph they would all have the same name, which AOTAutograd's backends refuse.
    """


@torch.compiler.assume_constant_result
def _attribute(size: tuple[int, ...], *options: Any) -> str:
    """Return the name of the attribute of `_Compiled` that holds these cells."""
    name = "_".join(["cells", *map(str, options + size)]).replace(".", "_")  # a dot would be a path
    if not hasattr(_Compiled, name):
        setattr(_Compiled, name, tuple(vars(_cached_tensors(_cut, size, *options)).values()))
    return name


def _cut(
    size: tuple[int, ...],
    keep: float,
    tile_size: int,
    seed: int | None,
    device: str,
    strips: bool,
) -> Cells:
    """Make the cells of a grid of tokens. Arguments and result are those of `make_cells`."""
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
    """Return the number of cells down and across in a tile of this height and width.

    The share of destinations is as near to `keep` as possible. Among counts that are about equally
    near, the most square cells win.

    Args:
        high: mean height of a tile in tokens.
        wide: mean width of a tile in tokens.
        keep: share of the tokens that are destinations.

    Returns:
        The number of cells (down, across), each at least 1.
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
    """Map each of `side` rows to its tile and to its cell within the tile.

    Args:
        side: number of rows.
        tiles: number of tiles, all as equally long as possible.
        cells: number of cells in each tile, balanced in the same way.

    Returns:
        Tiles and cells, each a LongTensor [side].
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


@dataclass(eq=False)
class Groups:
    """The group of each token of a grid: a destination's group, or a group of its own.

    Attributes:
        cells: the tiles and destinations of the grid.
        dst: LongTensor [T * m], the slots of the destinations.
        queries: LongTensor [n], the positions of the draw's queries.
        row: LongTensor [B, T * P], for the token of each slot the number of the destination in its
            tile that it joins, or -1 if it joins none.
        stay: LongTensor [B, r], the slots of the tokens that stay alone.
        dtype: dtype of `sizes`: that of the compared tokens, but at least fp32.
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
            slots: tensors [B, T * P, ...] in the order of the slots, all of one dtype.
            fitted: if True, the last tensor's means feed the fit, and stay in fp32 where GPUs
                multiply 16-bit numbers.

        Returns:
            For each tensor its means [B, M, ...] and the tokens that stay [B, r, ...], in its
            dtype; and the number of tokens in each group, [B, M], in fp32 (fp64 for fp64). Counts
            are in 16 bits where means are multiplied in 16 bits and the count is exact.
        """
        cells, batch, own = self.cells, self.row.shape[0], slots[0].dtype
        least = torch.promote_types(own, torch.float32)
        rows, merged = self.row.view(batch * cells.tiles, cells.width), batch * cells.kept
        traced = torch.compiler.is_compiling() or isinstance(self.row, FakeTensor)
        added = self.row.device.type in ADDING and not traced
        # GPUs multiply 16-bit numbers and sum in fp32; CPUs rarely do.
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
            # Multiply by shares, not ones: sums can exceed fp16's range.
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
        """Return the number of tokens in each group, [B, K]."""
        counts = self.means(self.row.new_empty(*self.row.shape, 0, dtype=self.dtype))[1]
        return F.pad(counts, (0, self.stay.shape[1]), value=1.0)

    @property
    def kept(self) -> Tensor:
        """Return the position of the token that each group formed around, LongTensor [B, K]."""
        batch, order = self.row.shape[0], self.cells.order
        return torch.cat([order.index_select(0, self.dst).expand(batch, -1), order[self.stay]], 1)

    @property
    def groups(self) -> Tensor:
        """Return the group of each token, LongTensor [B, L]."""
        cells = self.cells
        numbers = torch.arange(self.tokens_kept, device=self.row.device)
        first = numbers[: cells.kept : cells.m].view(-1, 1)
        found = (self.row.view(-1, cells.tiles, cells.width) + first).flatten(1)
        found = found.scatter(1, self.stay, numbers[cells.kept :].expand(self.stay.shape))
        return found.index_select(1, cells.slot)

    def merge(self, t: Tensor) -> Tensor:
        """Merge tokens t [B, L, C] to the means of their groups, [B, K, C], in the dtype of t."""
        return torch.cat(self.means(t.index_select(1, self.cells.order))[0][0], 1)

    def restore(self, y: Tensor) -> Tensor:
        """Copy y [B, K, C] of each group to all of its tokens, [B, L, C]."""
        return y.gather(1, self.groups.unsqueeze(-1).expand(-1, -1, y.shape[-1]))


# Devices that add rows by index in a fixed order, which takes a tenth of the products' time there.
ADDING = {"cpu"}
_SUMS_IN_FP32 = "dtype" in torch.ops.aten.bmm.overloads()  # 16-bit inputs on GPUs: torch 2.8


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices a [n, i, j] and b [n, j, k] in fp32 or wider.

    Returns:
        [n, i, k] in fp32 (fp64 for fp64).
    """
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
    """Group tokens by their Euclidean distance to the destinations of their tile.

    Distances, not angles, are compared: a logit depends on a key's length too, and keys that
    receive much of the attention (sinks) are long. The choice has no gradient; the means of the
    groups do.

    Args:
        slots: the compared tokens in the order of the slots, [B, T * P, d]. Distances are computed
            in fp32 (fp64 for fp64), whatever the dtype.
        cells: the tiles and destinations.
        draw: LongTensor [1], the index of the draw. If None, the first draw.
        leader: LongTensor [B], the sample whose tokens decide for each sample, such as the guided
            half for the unguided one. If None, or made for another batch size, each sample decides
            for itself.
        stay: number of tokens that stay alone: those farthest from any destination.

    Returns:
        The groups: T * m around destinations, and `stay` of a single token.
    """
    drawn = cells.drawn[0] if draw is None else cells.drawn.index_select(0, draw).view(-1)
    dst, queries = drawn.tensor_split([cells.kept])
    batch, dtype = slots.shape[0], torch.promote_types(slots.dtype, torch.float32)
    place = leader if leader is not None and leader.shape[0] == batch > 1 else None
    traced = torch.compiler.is_compiling() or isinstance(slots, FakeTensor)
    if place is not None and slots.device.type == "cpu" and not traced:
        # A CPU has no queue to wait for, and samples with the same leader are compared once.
        led, place = place.unique(return_inverse=True)
        slots = slots if len(led) == batch else slots.index_select(0, led)
    norms = torch.linalg.vector_norm(slots, dim=-1, dtype=dtype)
    chosen = slots.index_select(1, dst).view(-1, cells.m, slots.shape[2])
    of_chosen = norms.index_select(1, dst).view(-1, cells.m, 1)
    # |x - d|^2 = |x|^2 - 2 (x . d - |d|^2 / 2): the largest x . d - |d|^2 / 2 is the nearest.
    nearness = matmul_fp32(chosen, slots.view(-1, cells.width, slots.shape[2]).transpose(1, 2))
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
    # Assign every destination to its own group, even if it duplicates another or isn't finite.
    row.index_copy_(1, dst, cells.number.expand(slots.shape[0], -1))
    if place is not None:
        row, staying = row.index_select(0, place), staying.index_select(0, place)
    return Groups(cells, dst, queries, row, staying, dtype, cells.tokens, cells.kept + stay)


def partition_index(timestep: Tensor | float) -> Tensor:
    """Return the index of the random partition for a timestep, a LongTensor [1] in [0, DRAWS).

    Of several timesteps the largest counts, because video models give tokens that are already known
    (a first frame) the timestep 0 throughout. The index is a multiplicative hash; the constant was
    picked so that common schedules rarely repeat a partition.
    """
    times = timestep if isinstance(timestep, Tensor) else torch.tensor([timestep])
    thousandths = (times.float().amax().reshape(1) * 1000).long()
    return ((thousandths * 0xAAF4E5A7) & 0xFFFFFFFF) * DRAWS >> 32


def cached_tensors(make: Callable[..., Any], *args: Any) -> Any:
    """Return the cached result of `make(*args)`. Don't modify the result in place.

    A graph that is being compiled or captured must not hold cached tensors, and makes its own.
    """
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if captured or torch.compiler.is_compiling():
        return make(*args)
    return _cached_tensors(make, *args)


@lru_cache(maxsize=256)
def _cached_tensors(make: Callable[..., Any], *args: Any) -> Any:
    # Make no inference tensors, which autograd refuses, and none that a mode traces.
    with torch.inference_mode(False), _no_modes(), torch.device("cpu"):
        return make(*args)


def counting(length: int, device: torch.device) -> Tensor:
    """Return 0, 1, ..., `length` - 1, a LongTensor [length]."""
    return torch.arange(length, device=device)


def guidance_leaders(inputs: Tensor, unguided: Sequence[bool] = (True, False)) -> Tensor:
    """Return the sample whose tokens decide what merges in each sample, LongTensor [B].

    Guidance adds a multiple of the difference between guided and unguided samples, and with it a
    multiple of what merging does to one but not to the other. If both merge the same tokens, most
    of that cancels (docs/experiments.md, "Steps, draws and guidance"). So the first guided chunk
    of the batch leads each unguided chunk whose inputs are equal to its own; all other samples lead
    themselves. The comparison stays on the device: nothing waits for it.

    Args:
        inputs: latents [B, ...], with what pipelines concatenate to them.
        unguided: for each chunk of the batch, True if it is unguided. In nearly all pipelines the
            first of two chunks is, that of the negative prompt.
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
