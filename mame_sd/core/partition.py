"""Which positions are destinations and which are sources (paper, "Token Partitioning"), as cached index tensors.

Positions are computed once per (tokens, size, config, device). Without tiles there is one block, the whole sequence;
with `tiles=T` every T x T square of the image is a block with a partition of its own, in which positions count in
row-major order. Blocks of unequal size are padded to the largest and carry masks.

With `redraw` a random partition is drawn DRAWS times; `draw_at` says which draw a timestep takes. All draws of one size have
equally many destinations and sources in each block, so a draw is one row of a table, picked on the device: no host sync, no
other graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mame_sd.config import DRAWN, MaMeConfig

GRIDS = ("grid", "random-grid")  # partitions of one destination per stride cell
DRAWS = 8  # partitions that steps choose from
_PER_DRAW = ("dst", "src", "slots", "src_real", "gather", "source")  # index tensors that differ between draws


@dataclass(frozen=True, eq=False)
class Positions:
    """A partition of L positions into T blocks of at most m destinations and n sources each.

    M and N count the real destinations and sources of all blocks, so M + N = L. Slots are the entries of a
    block-shaped tensor, T * m or T * n of them, read row by row; a padded slot repeats a real position of its block.
    """

    dst: Tensor  # [M] positions of the destinations, block by block
    src: Tensor  # [N] positions of the sources, ascending over the whole sequence
    slots: Tensor  # [T, m + n] position of every slot of a block, destinations first
    dst_real: Tensor | None  # [M] the slots that are not padding; None: all of them
    src_real: Tensor  # [N] the slot of each source, in the order of `src`
    dst_pad: Tensor | None  # [T, m] True at padding; None: there is none
    src_pad: Tensor | None  # [T, n] True at padding; None: there is none
    gather: Tensor  # [L] row of each position in concat(destinations [M], source slots [T * n])
    source: Tensor  # [L] source slot of each position; 0 at destinations
    m: int  # destination slots of a block

    @property
    def L(self) -> int:
        return self.gather.shape[0]

    @property
    def M(self) -> int:
        return self.dst.shape[0]

    @property
    def N(self) -> int:
        return self.src.shape[0]

    @property
    def blocks(self) -> int:
        return self.slots.shape[0]

    @property
    def n(self) -> int:
        return self.slots.shape[1] - self.m

    @property
    def dst_slots(self) -> Tensor:
        """[T, m] position of every destination slot"""
        return self.slots[:, : self.m]

    @property
    def src_slots(self) -> Tensor:
        """[T, n] position of every source slot"""
        return self.slots[:, self.m :]


def draw_at(timestep: Tensor | float) -> Tensor:
    """Which of the DRAWS partitions a step takes, a LongTensor [1]: a hash of the (largest) timestep.

    Largest, because video models give tokens that are known already (a first frame) the timestep 0 throughout.
    """
    times = timestep if isinstance(timestep, Tensor) else torch.tensor([timestep])
    bits = (times.float().amax().reshape(1) * 1000).long()
    for _ in range(2):
        bits = ((bits ^ (bits >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return (bits >> 16) % DRAWS


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
        size: (h, w) in tokens with h * w = L. Needed by the grid partition and by tiles; a square is assumed when
            it is left out and L is a perfect square.
        device: where the index tensors live.
        draw: with `redraw`, which of the drawn partitions, a LongTensor [1]; None: the first.

    Raises:
        ValueError: no tokens, a size that does not fit, or none where one is needed.
    """
    if tokens < 1:
        raise ValueError(f"tokens: expected at least 1 token to partition, got {tokens}")
    if size is not None and size[0] * size[1] != tokens:
        raise ValueError(f"size: expected (h, w) with h * w = {tokens} tokens, got {tuple(size)}")
    if config.partition in GRIDS or config.tiles is not None:
        size = size or square(tokens)
        if size is None:
            raise ValueError(
                f"size: partition {config.partition!r} with tiles={config.tiles} needs the (h, w) of {tokens} tokens, "
                "which are no square; give size=(h, w), or take partition='alternating' without tiles"
            )
    else:
        size = (1, tokens)  # rows do not matter: one key of the cache for all of them
    stride = config.stride if config.partition in GRIDS else (1, 1)
    seed = config.seed if config.partition in DRAWN else 0
    h, w = size
    key = int(h), int(w), config.partition, stride[0], stride[1], seed, config.tiles or 0, str(device)
    first = Positions(*_looked_up(*key))
    if draw is None or not config.redraw or config.partition not in DRAWN:
        return first
    return _drawn(first, _looked_up_draws(*key), draw)


def square(tokens: int) -> tuple[int, int] | None:
    """(side, side) when `tokens` is a perfect square, else None."""
    side = math.isqrt(tokens)
    return (side, side) if side * side == tokens else None


def _drawn(first: Positions, draws: Tensor, draw: Tensor) -> Positions:
    """The positions that row `draw` [1] of a table of draws holds; padding and counts are those of every draw."""
    row = draws.index_select(0, draw.to(draws.device))[0]
    values = {f.name: getattr(first, f.name) for f in fields(first)}
    start = 0
    for name in _PER_DRAW:
        count = values[name].numel()
        values[name] = row[start : start + count].view(values[name].shape)
        start += count
    return Positions(**values)


# A compiled graph takes these tensors as constants and traces nothing below; it reads counts off their shapes.
@torch.compiler.assume_constant_result
def _looked_up(h: int, w: int, partition: str, sh: int, sw: int, seed: int, tiles: int, device: str) -> tuple[Any, ...]:
    pos = _positions(h, w, partition, (sh, sw), seed, tiles or None, torch.device(device))
    return tuple(getattr(pos, f.name) for f in fields(pos))


@torch.compiler.assume_constant_result
def _looked_up_draws(h: int, w: int, partition: str, sh: int, sw: int, seed: int, tiles: int, device: str) -> Tensor:
    return _draws(h, w, partition, (sh, sw), seed, tiles or None, torch.device(device))


@lru_cache(maxsize=16)
def _draws(
    h: int, w: int, partition: str, stride: tuple[int, int], seed: int, tiles: int | None, device: torch.device
) -> Tensor:
    """[DRAWS, ...]: the tensors of `_PER_DRAW` side by side, a row for each draw."""
    with torch.inference_mode(False), unset_fake_temporarily():
        cpu = torch.device("cpu")
        drawn = [_built(h, w, partition, stride, seed, tiles, cpu, draw) for draw in range(DRAWS)]
        rows = [torch.cat([getattr(pos, name).flatten() for name in _PER_DRAW]) for pos in drawn]
        return torch.stack(rows).to(device)


@lru_cache(maxsize=256)
def _positions(
    h: int, w: int, partition: str, stride: tuple[int, int], seed: int, tiles: int | None, device: torch.device
) -> Positions:
    # Cached tensors outlive the call: they must not be inference tensors, which autograd refuses later, nor an export's fakes.
    with torch.inference_mode(False), unset_fake_temporarily():
        return _built(h, w, partition, stride, seed, tiles, device, draw=0)


def _built(
    h: int,
    w: int,
    partition: str,
    stride: tuple[int, int],
    seed: int,
    tiles: int | None,
    device: torch.device,
    draw: int,
) -> Positions:
    # The generator reads 32 bits of a seed.
    generator = torch.Generator("cpu").manual_seed((seed + draw * 0x9E3779B1) % 2**32)
    dst: list[list[int]] = []
    src: list[list[int]] = []
    side_h, side_w = (tiles, tiles) if tiles is not None else (h, w)
    for top in range(0, h, side_h):
        for left in range(0, w, side_w):
            th, tw = min(side_h, h - top), min(side_w, w - left)
            chosen = _destinations(th, tw, partition, stride, generator)
            block = [(top + i // tw) * w + left + i % tw for i in range(th * tw)]
            dst.append([block[i] for i in chosen])
            src.append([block[i] for i in sorted(set(range(th * tw)) - set(chosen))])
    return _layout(h * w, dst, src, device)


def _destinations(h: int, w: int, partition: str, stride: tuple[int, int], generator: torch.Generator) -> list[int]:
    """Ascending row-major positions of the destinations in a block of h x w tokens."""
    tokens = h * w
    count = (tokens + 1) // 2
    if partition == "alternating":
        return list(range(0, tokens, 2))
    if partition == "sequential":
        return list(range(count))
    if partition == "random":
        order = torch.randperm(tokens, generator=generator, device="cpu")
        drawn: list[int] = order[:count].tolist()
        return sorted(drawn)
    corners = [(row, column) for row in range(0, h, stride[0]) for column in range(0, w, stride[1])]
    if partition == "random-grid":
        draw = torch.rand(len(corners), 2, generator=generator, device="cpu").tolist()
        corners = [
            (row + int(y * min(stride[0], h - row)), column + int(x * min(stride[1], w - column)))
            for (row, column), (y, x) in zip(corners, draw, strict=True)
        ]
    return sorted(row * w + column for row, column in corners)


def _layout(tokens: int, dst: list[list[int]], src: list[list[int]], device: torch.device) -> Positions:
    """Index tensors of blocks that are given as lists of positions."""
    m, n = max(map(len, dst)), max(map(len, src))
    flat_dst = [p for block in dst for p in block]
    slot_of = {p: t * n + i for t, block in enumerate(src) for i, p in enumerate(block)}
    flat_src = sorted(slot_of)
    row_of = {p: len(flat_dst) + slot for p, slot in slot_of.items()}
    row_of.update({p: row for row, p in enumerate(flat_dst)})

    def padded(blocks: list[list[int]], width: int) -> list[int]:
        return [p for t, block in enumerate(blocks) for p in block + [dst[t][0]] * (width - len(block))]

    def pad_mask(blocks: list[list[int]], width: int) -> Tensor | None:
        if all(len(block) == width for block in blocks):
            return None
        rows = [[i >= len(block) for i in range(width)] for block in blocks]
        return torch.tensor(rows, dtype=torch.bool, device="cpu").to(device)

    def index(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device="cpu").to(device)

    dst_pad = pad_mask(dst, m)
    dst_slots = index(padded(dst, m)).view(len(dst), m)
    src_slots = index(padded(src, n)).view(len(src), n)
    dst_real = [t * m + i for t, block in enumerate(dst) for i in range(len(block))]
    return Positions(
        dst=index(flat_dst),
        src=index(flat_src),
        slots=torch.cat([dst_slots, src_slots], 1),
        dst_real=None if dst_pad is None else index(dst_real),
        src_real=index([slot_of[p] for p in flat_src]),
        dst_pad=dst_pad,
        src_pad=pad_mask(src, n),
        gather=index([row_of[p] for p in range(tokens)]),
        source=index([slot_of.get(p, 0) for p in range(tokens)]),
        m=m,
    )
