"""Forms of attention over fewer keys, as plain functions of q, k and v: what the library's own is
chosen from, and its rivals.

Each is `attend(q, k, v, grid, draw) -> output`: q, k, v [B, H, N, D] of N tokens on a grid (h, w),
and a `Draw` that random numbers come from. Written to be read and compared, not to be fast.
"""

from __future__ import annotations

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
    """What the layers of one run share: a generator of random numbers, and the input of the layer
    that runs, as attention projects it [B, N, C] (None where nobody noted it).
    """

    generator: torch.Generator
    tokens: Tensor | None = None

    @classmethod
    def of(cls, seed: int) -> Draw:
        return cls(torch.Generator().manual_seed(seed))


Attend = Callable[[Tensor, Tensor, Tensor, Grid, Draw], Tensor]


class Groups(NamedTuple):
    """Which of K groups each token is in, `of` [B, 1 or H, N]; `places` [K'] (K' <= K) of the
    destinations, the first groups, in their order.
    """

    of: Tensor
    count: int
    places: Tensor


def exact(q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def mean_output(q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
    return exact(q, k, v, grid, draw).mean(2, keepdim=True).expand_as(q)


def even(q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
    return v.mean(2, keepdim=True).expand_as(q)


def none(q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
    return torch.zeros_like(q)


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
) -> Groups:
    """Groups by cosine similarity of `metric` [B, H, N, C], one plan for each of its heads.

    Destinations: one of each cell, or with drawn="all" as many of all tokens. Each other token
    joins the most similar one of its tile, the most similar first, until `keep` are left.
    """
    n = grid[0] * grid[1]
    count = round(keep * n)
    if drawn == "cells":
        places = one_of_each(grid, cell or cell_for(keep), draw.generator)
    else:
        places = torch.randperm(n, generator=draw.generator)[:count]
    unit = F.normalize(metric.float(), dim=-1)
    similarity = unit @ unit[..., places, :].transpose(-1, -2)  # [B, H, N, K']
    apart = tile_of(grid, tiles)
    similarity.masked_fill_(apart[:, None] != apart[places], -2)
    score, of = similarity.max(-1)
    of[..., places] = torch.arange(len(places))
    score[..., places] = 9
    alone = count - len(places)
    if alone > 0:
        least = score.topk(alone, largest=False).indices  # [B, H, alone]
        of.scatter_(-1, least, (len(places) + torch.arange(alone)).expand_as(least))
    return Groups(of, max(count, len(places)), places)


def cells(grid: Grid, cell: Grid) -> Groups:
    of, count = cells_of(grid, cell)
    return Groups(of[None, None], count, torch.empty(0).long())


def sums(t: Tensor, groups: Groups) -> Tensor:
    """Sums of t [B, H, N, D] within the groups: [B, H, K, D] in fp32."""
    where = groups.of.unsqueeze(-1).expand(t.shape)
    return t.new_zeros(*t.shape[:2], groups.count, t.shape[3], dtype=torch.float32).scatter_add_(
        2, where, t.float()
    )


def sizes(groups: Groups, like: Tensor) -> Tensor:
    """How many tokens each group has [B, H, K], fp32."""
    of = groups.of.expand(*like.shape[:3])
    found = torch.zeros(*like.shape[:2], groups.count)
    return found.scatter_add_(2, of, torch.ones(of.shape))


@dataclass(frozen=True)
class Fit:
    """Values fitted to exact queries: v'' = v' + A^T (A A^T + lambda mean(diag) I)^-1 R.

    Attributes:
        m: how many queries.
        lam: lambda.
        kernel: add the kernel of attention's rows, A A^T.
        w, s: weight and width of a Gaussian kernel of the queries beside it; w=0: none.
        on: "drawn" queries, or those of a "grid".
    """

    m: int
    lam: float = 0.1
    kernel: bool = True
    w: float = 0.0
    s: float = 0.25
    on: str = "drawn"


def attention_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    merged: tuple[Tensor, Tensor, Tensor | None],
    draw: Draw,
    grid: Grid,
    fit: Fit | None = None,
    corrected: Tensor | None = None,
) -> Tensor:
    """Attention of q over merged keys and values, fitted by `fit`.

    Args:
        merged: keys and values [B, H, K, D], and what is added to their logits [B, H, K].
        corrected: Cov(v, k) that they lack [B, H, D, D], which is added to first order.
    """
    keys, values, bias = merged
    scale = q.shape[-1] ** -0.5
    extra: Tensor | float = 0.0
    if fit is not None:
        n = q.shape[2]
        if fit.on == "grid":
            asked = torch.linspace(0, n - 1, fit.m).round().long()
        else:
            asked = torch.randperm(n, generator=draw.generator)[: fit.m]
        some = q[:, :, asked]
        truth = F.scaled_dot_product_attention(some, k, v).float()
        logits = some.float() @ keys.float().transpose(-1, -2) * scale
        rows = torch.softmax(logits if bias is None else logits + bias.unsqueeze(2), -1)
        residual = truth - rows @ values.float()
        if corrected is not None:
            residual = residual - scale * some.float() @ corrected
        matrix = rows @ rows.transpose(-1, -2)
        mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        system = matrix / mean if fit.kernel else torch.zeros_like(matrix)
        if fit.w:
            apart = torch.cdist(some.float(), some.float()).square()
            width = 2 * fit.s * apart.flatten(-2).median(-1).values[..., None, None]
            system = system + fit.w * torch.exp(-apart / width)
        system = system + fit.lam * torch.eye(len(asked))
        alpha = torch.cholesky_solve(residual, torch.linalg.cholesky(system))
        if fit.kernel:
            values = values + (rows.transpose(-1, -2) @ alpha / mean).to(values.dtype)
        if fit.w:
            far = torch.cdist(q.float(), some.float()).square()
            extra = fit.w * torch.exp(-far / width) @ alpha
    if corrected is not None:
        extra = extra + scale * q.float() @ corrected
    mask = None if bias is None else bias.unsqueeze(2).to(q.dtype)
    output = F.scaled_dot_product_attention(q, keys.to(q.dtype), values.to(q.dtype), mask)
    return output if isinstance(extra, float) else (output.float() + extra).to(q.dtype)


@dataclass(frozen=True)
class Picked:
    """Keys at some places, as they are.

    Attributes:
        keep: share of the keys.
        places: "random", "cells" (one drawn of each), "first" (of each cell) or "second" (every
            1 / keep-th in reading order).
        counted: the logits count each as often as it is the most similar one of others.
        fit: None for no fit.
    """

    keep: float
    places: str = "random"
    counted: bool = False
    fit: Fit | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
        n = k.shape[2]
        bias = None
        if self.places == "first":
            of, count = cells_of(grid, cell_for(self.keep))
            at = torch.full((count,), n).scatter_reduce_(0, of, torch.arange(n), "amin")
        elif self.places == "second":
            at = torch.arange(0, n, round(1 / self.keep))
        else:
            groups = planned(
                concatenated(k) if self.counted else k[:, :1, :, :1],
                grid,
                self.keep,
                draw,
                tiles=0,
                drawn="all" if self.places == "random" else "cells",
            )
            at = groups.places
            bias = sizes(groups, k).log() if self.counted else None
        merged = k[:, :, at], v[:, :, at], bias
        return attention_of(q, k, v, merged, draw, grid, self.fit)


def concatenated(k: Tensor) -> Tensor:
    """All heads' keys of each token: [B, 1, N, H D]."""
    return k.transpose(1, 2).flatten(2).unsqueeze(1)


@dataclass(frozen=True)
class Merged:
    """Means of groups: ours.

    Attributes:
        keep: share of the keys.
        fit: None for no fit.
        corrected: add what the means lack to first order (exact moments).
        counted: the logits count each mean as often as it stands for tokens.
        by: "keys" of all heads, "heads" (a plan for each), "input" of the layer, "means" of cells.
        tiles: side of the tiles in which tokens are compared; 0: all with all.
        drawn: "cells" or "all".
        cell: of the destinations; None: of the area 1 / keep.
    """

    keep: float
    fit: Fit | None = None
    corrected: bool = False
    counted: bool = True
    by: str = "keys"
    tiles: int = 16
    drawn: str = "cells"
    cell: Grid | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
        if self.by == "means":
            groups = cells(grid, cell_for(self.keep))
        else:
            metric = {"keys": concatenated, "heads": lambda k: k, "input": lambda k: _input(draw)}
            groups = planned(
                metric[self.by](k), grid, self.keep, draw, self.tiles, self.drawn, self.cell
            )
        n = sizes(groups, k)
        keys, values = (sums(t, groups) / n.unsqueeze(-1) for t in (k, v))
        lacking = None
        if self.corrected:
            every = k.float().transpose(-1, -2) @ v.float()  # [D, D'], to stand after q
            kept = (n.unsqueeze(-1) * keys).transpose(-1, -2) @ values
            lacking = (every - kept) / k.shape[2]
        bias = n.log() if self.counted else None
        merged = keys.to(k.dtype), values.to(v.dtype), bias
        return attention_of(q, k, v, merged, draw, grid, self.fit, lacking)


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
        output = F.scaled_dot_product_attention(*(sums(t, groups) / n for t in (q, k, v)))
        return output.gather(2, groups.of.unsqueeze(-1).expand(q.shape))


@dataclass(frozen=True)
class InDtype:
    """`form` on q, k and v in another dtype."""

    form: Attend
    dtype: torch.dtype

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
        narrow = (t.to(self.dtype) for t in (q, k, v))
        return self.form(*narrow, grid, draw).to(q.dtype)
