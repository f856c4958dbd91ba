"""Group similar tokens around a few destinations of each tile.

A grid of tokens is cut into tiles, and each tile into cells of equally many tokens (`cells.py`). In
each step one token of each cell is drawn as a destination. `group_tokens` puts each other token
into the group of the nearest destination; the farthest tokens stay alone. Groups have means and
sizes.

Everything is computed as products of small matrices, one for each tile: distances, and means as a
product with a matrix of ones. On a CPU, means are sums by index instead. No tokens are sorted and
nothing is added atomically, so results don't depend on the order of threads, and values that are
not finite stay within their tile. Destinations drawn by cell follow tomesd (arXiv 2303.17604).

Text doesn't merge by similarity. `equal_at_end` finds text tokens of which one can stand for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mame_sd.compat import private
from mame_sd.core.cells import Cells, cut

LEAST_EQUAL = 16  # fewer equal text tokens are computed as they are
no_modes = private("torch.utils._python_dispatch", "_disable_current_modes")


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
    made: Cells = _cached_tensors(cut, tuple(size), *options)
    return made


class _Compiled:
    """Hold the tables that compiled graphs read, as attributes.

    As constants of a graph they would all have the same name, which AOTAutograd's backends refuse.
    """


@torch.compiler.assume_constant_result
def _attribute(size: tuple[int, ...], *options: Any) -> str:
    """Store the cells that `cut` makes as an attribute of `_Compiled`, and return its name."""
    name = "_".join(["cells", *map(str, options + size)]).replace(".", "_")  # a dot would be a path
    if not hasattr(_Compiled, name):
        setattr(_Compiled, name, tuple(vars(_cached_tensors(cut, size, *options)).values()))
    return name


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
            For each tensor the means [B, M, ...] around the M destinations and the tokens that stay
            [B, r, ...], in its dtype (but see `fitted`); and the number of tokens in each group,
            [B, M], in fp32 (fp64 for fp64), or in 16 bits where GPUs multiply 16-bit numbers and
            tiles are so small that 16 bits count exactly.
        """
        cells, batch, dtype = self.cells, self.row.shape[0], slots[0].dtype
        least = torch.promote_types(dtype, torch.float32)
        rows, merged = self.row.view(batch * cells.tiles, cells.width), batch * cells.kept
        traced = torch.compiler.is_compiling() or isinstance(self.row, FakeTensor)
        added = self.row.device.type in ADDING and not traced
        # GPUs multiply 16-bit numbers and sum in fp32; CPUs rarely do.
        halves = slots[0].is_cuda and dtype in (torch.float16, torch.bfloat16)
        used = dtype if halves else least
        if added:
            first = torch.arange(0, merged, cells.m, device=rows.device).unsqueeze(1)
            group = torch.where(rows < 0, merged, rows + first).flatten()
            counts = group.bincount(minlength=merged + 1)[:merged].to(least)
        else:
            belongs = rows.unsqueeze(1) == cells.number[: cells.m].view(-1, 1)
            counted = dtype if halves and cells.width <= 256 else least
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
            mean = mean if wide else mean.to(dtype)
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
        group = (self.row.view(-1, cells.tiles, cells.width) + first).flatten(1)
        group = group.scatter(1, self.stay, numbers[cells.kept :].expand(self.stay.shape))
        return group.index_select(1, cells.slot)

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
        leader: LongTensor [B], for each sample the index of the sample whose tokens decide for it;
            for an unguided sample, that of the guided one. If None, or made for another batch size,
            each sample decides for itself.
        stay: number of tokens that stay alone: those farthest from any destination.

    Returns:
        The groups: T * m around the destinations (m in each of T tiles), and `stay` groups of one
        token each.
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
    with torch.inference_mode(False), no_modes(), torch.device("cpu"):
        return make(*args)


def equal_at_end(text: Any) -> int:
    """Return how many tokens at the end of a text [B, N, C] are equal in each sample.

    Stable Diffusion 3 without its T5 encoder passes 256 zero tokens after those of CLIP. Its text
    has no positions, so that these tokens stay equal in all layers, and one of them can be computed
    for all. Tokens are compared in each call, on a CPU alone, where nothing waits.

    The result is 1 if they are fewer than `LEAST_EQUAL`, if they can't be compared without waiting
    for a device, or if gradients may be wanted of each of them.
    """
    if not isinstance(text, Tensor) or text.dim() != 3 or text.shape[1] < LEAST_EQUAL:
        return 1
    if text.device.type != "cpu" or unreadable(text) or torch.is_grad_enabled():
        return 1
    if torch.jit.is_tracing() or torch._C._functorch.is_functorch_wrapped_tensor(text):
        return 1
    last = text[:, -1:]
    if not bool((text[:, -LEAST_EQUAL:] == last).all()):
        return 1
    equal = (text == last).all(-1).flip(1)  # from the last token to the first
    return int(equal.int().cumprod(1).sum(1).min())


def all_text(text: Tensor, repeats: int) -> Tensor:
    """Return a text [B, N, C] with its last token `repeats` times."""
    return torch.cat([text, text[:, -1:].expand(-1, repeats - 1, -1)], 1)
