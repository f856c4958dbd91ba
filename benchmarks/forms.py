"""Forms of attention over fewer keys, as plain functions of q, k and v: what the library's own is
chosen from, and its rivals.

Each is `attend(q, k, v, grid, draw) -> output`: q, k, v [B, H, N, D] of N tokens on a grid (h, w),
and a `Draw` that random numbers come from. Written to be read and compared, not to be fast.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int]


@dataclass
class Draw:
    """What the layers of one run share, and what the layer that runs has beside q, k and v.

    Attributes:
        generator: of random numbers.
        tokens: the layer's input, as attention projects it [B, N, C]; None where nobody noted it.
        beside: keys and values [B, H, T, D] of text or a class token, which stay as they are; q may
            have their queries after those of the grid.
    """

    generator: torch.Generator
    tokens: Tensor | None = None
    beside: tuple[Tensor, Tensor] | None = None

    def all(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v with what stands beside them."""
        if self.beside is None:
            return k, v
        return torch.cat([k, self.beside[0]], 2), torch.cat([v, self.beside[1]], 2)

    @classmethod
    def of(cls, seed: int) -> Draw:
        return cls(torch.Generator().manual_seed(seed))


Attend = Callable[[Tensor, Tensor, Tensor, Grid, Draw], Tensor]


class Groups(NamedTuple):
    """Which of `kept` = K groups each token is in, `of` [B, 1 or H, N]; `places` [K'] (K' <= K) of
    the destinations, the first groups, in their order.
    """

    of: Tensor
    kept: int
    places: Tensor


def exact(q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
    return F.scaled_dot_product_attention(q, *draw.all(k, v))


def even(q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
    return v.mean(2, keepdim=True).expand_as(q)


def cells_of(grid: Grid, cell: Grid) -> tuple[Tensor, int]:
    """The cell of each position [N], and how many there are; the border may cut the last ones."""
    rows, columns = torch.arange(grid[0]) // cell[0], torch.arange(grid[1]) // cell[1]
    across = math.ceil(grid[1] / cell[1])
    return (rows[:, None] * across + columns).flatten(), math.ceil(grid[0] / cell[0]) * across


def cell_for(keep: float) -> Grid:
    """The cell of the largest share of at most `keep`: 1 x 2, 2 x 2, 2 x 4, 4 x 4, ..."""
    power = math.ceil(math.log2(1 / keep) - 1e-9)
    return 2 ** (power // 2), 2 ** (power - power // 2)


def one_of_each(grid: Grid, cell: Grid, generator: torch.Generator) -> Tensor:
    """Positions of one random token of each cell, in the order of the cells."""
    of, count = cells_of(grid, cell)
    order = torch.rand(len(of), generator=generator).argsort()
    chosen = torch.empty(count, dtype=torch.long)
    chosen[of[order]] = order  # the last one written stays; the order is random
    return chosen


def tile_of(grid: Grid, side: int) -> Tensor:
    return cells_of(grid, (side, side))[0] if side else torch.zeros(grid[0] * grid[1]).long()


def planned(
    metric: Tensor,
    grid: Grid,
    keep: float,
    draw: Draw,
    tiles: int = 16,
    drawn: str = "cells",
    cell: Grid | None = None,
    near: str = "cosine",
    alone: float = 0.0,
) -> Groups:
    """Groups by similarity of `metric` [B, H, N, C], one plan for each of its heads: "cosine", or
    minus the squared "euclidean" distance.

    Destinations: one of each cell, or with drawn="all" as many of all tokens; an `alone` share of
    them, drawn at random, is none. Each other token joins the most similar destination of its tile,
    the most similar first, until `keep` are left.
    """
    n = grid[0] * grid[1]
    count = round(keep * n)
    apart = tile_of(grid, tiles)
    if drawn == "cells":
        places = one_of_each(grid, cell or cell_for(keep), draw.generator)
        places = places[apart[places].argsort(stable=True)]
    else:
        places = torch.randperm(n, generator=draw.generator)[:count]
    t = metric.float()
    t = F.normalize(t, dim=-1) if near == "cosine" else t - t.mean(-2, keepdim=True)
    parts = int(apart.max()) + 1
    if drawn != "cells" or n % parts or not tiles or any(side % tiles for side in grid):
        parts = 1
    of_each = places.view(parts, -1)
    if alone:
        fewer = round(of_each.shape[1] * (1 - alone))
        chosen = torch.rand(of_each.shape, generator=draw.generator).argsort(1)[:, :fewer]
        of_each = of_each.gather(1, chosen)
    places = of_each.flatten()
    order = apart.argsort(stable=True) if parts > 1 else torch.arange(n)
    x = t[..., order, :].unflatten(-2, (parts, -1))
    y = t[..., places, :].unflatten(-2, (parts, -1))
    similarity = x @ y.transpose(-1, -2)  # [B, H, tiles, tokens, destinations]
    if near == "euclidean":
        squares = y.square().sum(-1).unsqueeze(-2) - 2 * similarity
        similarity = -squares - x.square().sum(-1, keepdim=True)
    if parts == 1 and tiles:
        similarity.masked_fill_(apart[:, None] != apart[places], -math.inf)
    best, joined = similarity.max(-1)
    joined = joined + torch.arange(parts).unsqueeze(-1) * of_each.shape[1]
    score, of = torch.empty_like(t[..., 0]), torch.empty(t.shape[:-1], dtype=torch.long)
    score[..., order], of[..., order] = best.flatten(-2), joined.flatten(-2)
    of[..., places] = torch.arange(len(places))
    score[..., places] = math.inf
    least = count - len(places)
    if least > 0:
        far = score.topk(least, largest=False).indices  # [B, H, least]
        of.scatter_(-1, far, (len(places) + torch.arange(least)).expand_as(far))
    return Groups(of, max(count, len(places)), places)


def cells(grid: Grid, cell: Grid) -> Groups:
    of, count = cells_of(grid, cell)
    return Groups(of[None, None], count, torch.empty(0).long())


def sums(t: Tensor, groups: Groups) -> Tensor:
    """Sums of t [B, H, N, D] within the groups: [B, H, K, D] in fp32."""
    where = groups.of.unsqueeze(-1).expand(t.shape)
    return t.new_zeros(*t.shape[:2], groups.kept, t.shape[3], dtype=torch.float32).scatter_add_(
        2, where, t.float()
    )


def sizes(groups: Groups, like: Tensor) -> Tensor:
    """How many tokens each group has [B, H, K], fp32."""
    of = groups.of.expand(*like.shape[:3])
    found = torch.zeros(*like.shape[:2], groups.kept)
    return found.scatter_add_(2, of, torch.ones(of.shape))


@dataclass(frozen=True)
class Fit:
    """Values fitted to exact queries: v'' = v' + A^T (A A^T + lambda mean(diag) I)^-1 R.

    Attributes:
        m: how many queries, drawn at random.
        lam: lambda.
    """

    m: int
    lam: float = 0.1


def attention_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    merged: tuple[Tensor, Tensor, Tensor | None],
    draw: Draw,
    fit: Fit | None = None,
) -> Tensor:
    """Attention of q over merged keys and values, fitted by `fit`.

    Args:
        merged: keys and values [B, H, K, D], and what is added to their logits [B, H, K].
    """
    keys, values, bias = merged
    count, n = keys.shape[2], k.shape[2]
    keys, values = draw.all(keys, values)
    if bias is not None:
        bias = F.pad(bias, (0, keys.shape[2] - count))
    if fit is not None:
        some = q[:, :, torch.randperm(n, generator=draw.generator)[: fit.m]]
        truth = F.scaled_dot_product_attention(some, *draw.all(k, v)).float()
        logits = some.float() @ keys.float().transpose(-1, -2) * q.shape[-1] ** -0.5
        rows = torch.softmax(logits if bias is None else logits + bias.unsqueeze(2), -1)
        residual = truth - rows @ values.float()
        rows = rows[..., :count]
        matrix = rows @ rows.transpose(-1, -2)
        mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        system = matrix / mean + fit.lam * torch.eye(some.shape[2])
        alpha = torch.cholesky_solve(residual, torch.linalg.cholesky(system))
        change = (rows.transpose(-1, -2) @ alpha / mean).to(values.dtype)
        values = values + F.pad(change, (0, 0, 0, values.shape[2] - count))
    mask = None if bias is None else bias.unsqueeze(2).to(q.dtype)
    return F.scaled_dot_product_attention(q, keys.to(q.dtype), values.to(q.dtype), mask)


@dataclass(frozen=True)
class Picked:
    """Keys at some places, as they are.

    Attributes:
        keep: share of the keys.
        places: "random", "cells" (one drawn of each), "first" (of each cell) or "second" (every
            1 / keep-th in reading order).
        fit: None for no fit.
    """

    keep: float
    places: str = "random"
    fit: Fit | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
        n = k.shape[2]
        if self.places == "first":
            of, count = cells_of(grid, cell_for(self.keep))
            at = torch.full((count,), n).scatter_reduce_(0, of, torch.arange(n), "amin")
        elif self.places == "second":
            at = torch.arange(0, n, round(1 / self.keep))
        else:
            drawn = "all" if self.places == "random" else "cells"
            at = planned(k[:, :1, :, :1], grid, self.keep, draw, tiles=0, drawn=drawn).places
        return attention_of(q, k, v, (k[:, :, at], v[:, :, at], None), draw, self.fit)


def concatenated(k: Tensor) -> Tensor:
    """All heads' keys of each token: [B, 1, N, H D]."""
    return k.transpose(1, 2).flatten(2).unsqueeze(1)


@dataclass(frozen=True)
class Merged:
    """Means of groups: ours.

    Attributes:
        keep: share of the keys.
        fit: None for no fit.
        counted: the logits count each mean as often as it stands for tokens.
        by: "keys" of all heads, or "means" of cells.
        tiles: side of the tiles in which tokens are compared; 0: all with all.
        near: "cosine" or "euclidean".
        alone: share of the kept that have no destination, but are the tokens least similar to any.
    """

    keep: float
    fit: Fit | None = None
    counted: bool = True
    by: str = "keys"
    tiles: int = 16
    near: str = "euclidean"
    alone: float = 1 / 8

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
        if self.by == "means":
            groups = cells(grid, cell_for(self.keep))
        else:
            groups = planned(
                concatenated(k), grid, self.keep, draw, self.tiles, near=self.near, alone=self.alone
            )
        n = sizes(groups, k)
        keys, values = (sums(t, groups) / n.unsqueeze(-1) for t in (k, v))
        merged = keys.to(k.dtype), values.to(v.dtype), n.log() if self.counted else None
        return attention_of(q, k, v, merged, draw, self.fit)


def _input(draw: Draw) -> Tensor:
    assert draw.tokens is not None
    return draw.tokens.unsqueeze(1)


@dataclass(frozen=True)
class Tomesd:
    """tomesd's form (arXiv 2303.17604): queries, keys and values merge as means of groups, 2 x 2
    cells, all compared by the layer's input; outputs are copied back.
    """

    keep: float

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
        groups = planned(_input(draw), grid, self.keep, draw, tiles=0, cell=(2, 2))
        n = sizes(groups, k).unsqueeze(-1)
        queries, keys, values = (sums(t, groups) / n for t in (q, k, v))
        output = F.scaled_dot_product_attention(queries, keys, values)
        return output.gather(2, groups.of.unsqueeze(-1).expand(q.shape))


@dataclass(frozen=True)
class InDtype:
    """`form` on q, k and v in another dtype."""

    form: Attend
    dtype: torch.dtype

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
        narrow = draw
        if draw.beside is not None:
            keys, values = (t.to(self.dtype) for t in draw.beside)
            narrow = dataclasses.replace(draw, beside=(keys, values))
        query, key, value = (t.to(self.dtype) for t in (q, k, v))
        return self.form(query, key, value, grid, narrow).to(q.dtype)
