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
from typing import Any, NamedTuple

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
    """Which of K groups each token is in, `of` [B, 1 or H, N]; `places` [K'] (K' <= K) of the
    destinations, the first groups, in their order.
    """

    of: Tensor
    count: int  # type: ignore[assignment]  # tuples have a method of this name
    places: Tensor


def exact(q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
    return F.scaled_dot_product_attention(q, *draw.all(k, v))


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
    count, n = keys.shape[2], k.shape[2]
    keys, values = draw.all(keys, values)
    if bias is not None:
        bias = F.pad(bias, (0, keys.shape[2] - count))
    scale = q.shape[-1] ** -0.5
    extra: Tensor | float = 0.0
    if fit is not None:
        if fit.on == "grid":
            asked = torch.linspace(0, n - 1, fit.m).round().long()
        else:
            asked = torch.randperm(n, generator=draw.generator)[: fit.m]
        some = q[:, :, asked]
        truth = F.scaled_dot_product_attention(some, *draw.all(k, v)).float()
        logits = some.float() @ keys.float().transpose(-1, -2) * scale
        rows = torch.softmax(logits if bias is None else logits + bias.unsqueeze(2), -1)
        residual = truth - rows @ values.float()
        if corrected is not None:
            residual = residual - scale * some.float() @ corrected
        rows = rows[..., :count]
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
            change = (rows.transpose(-1, -2) @ alpha / mean).to(values.dtype)
            values = values + F.pad(change, (0, 0, 0, values.shape[2] - count))
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


def as_logits(q: Tensor, k: Tensor, draw: Draw, drawn: int = 64) -> Tensor:
    """Keys whose squared distances are mean squares of the differences of `drawn` queries' logits:
    k times a root of the queries' second moments, [B, H, N, D].
    """
    n = k.shape[2]
    some = q[:, :, torch.randperm(n, generator=draw.generator)[:drawn]].float()
    moments = some.transpose(-1, -2) @ some / drawn
    least = 1e-3 * moments.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return k.float() @ torch.linalg.cholesky(moments + least * torch.eye(k.shape[-1]))


@dataclass(frozen=True)
class Merged:
    """Means of groups: ours.

    Attributes:
        keep: share of the keys.
        fit: None for no fit.
        corrected: add what the means lack to first order (exact moments).
        counted: the logits count each mean as often as it stands for tokens.
        by: "keys" of all heads, "pair" (those of all samples too: one plan), "heads" (a plan for
            each), "logits" of 64 drawn queries (their mean squares over heads), "input" of the
            layer, "means" of cells.
        tiles: side of the tiles in which tokens are compared; 0: all with all.
        drawn: "cells" or "all".
        cell: of the destinations; None: of the area 1 / keep. With larger ones the tokens that are
            least similar to any destination stay as they are.
        near: "cosine" or "euclidean".
        alone: share of the kept that have no destination, but are the tokens least similar to any.
    """

    keep: float
    fit: Fit | None = None
    corrected: bool = False
    counted: bool = True
    by: str = "keys"
    tiles: int = 16
    drawn: str = "cells"
    cell: Grid | None = None
    near: str = "euclidean"
    alone: float = 1 / 8

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
        if self.by == "means":
            groups = cells(grid, cell_for(self.keep))
        else:
            metric: dict[str, Callable[[Tensor], Tensor]] = {
                "keys": concatenated,
                "pair": lambda k: concatenated(k.flatten(0, 1).unsqueeze(0)).expand(
                    len(k), -1, -1, -1
                ),
                "heads": lambda k: k,
                "logits": lambda k: concatenated(as_logits(q, k, draw)),
                "input": lambda k: _input(draw),
            }
            groups = planned(
                metric[self.by](k),
                grid,
                self.keep,
                draw,
                self.tiles,
                self.drawn,
                self.cell,
                self.near,
                self.alone,
            )
        n = sizes(groups, k)
        keys, values = (sums(t, groups) / n.unsqueeze(-1) for t in (k, v))
        lacking = None
        if self.corrected:
            every = k.float().transpose(-1, -2) @ v.float()  # [D, D'], to stand after q
            kept = (n.unsqueeze(-1) * keys).transpose(-1, -2) @ values
            lacking = (every - kept) / draw.all(k, v)[0].shape[2]
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
        queries, keys, values = (sums(t, groups) / n for t in (q, k, v))
        output = F.scaled_dot_product_attention(queries, keys, values)
        return output.gather(2, groups.of.unsqueeze(-1).expand(q.shape))


@dataclass(frozen=True)
class InDtype:
    """`form` on q, k and v in another dtype."""

    form: Attend
    dtype: torch.dtype

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, draw: Draw) -> Tensor:
        dtype = self.dtype
        beside: Any = draw.beside and tuple(t.to(dtype) for t in draw.beside)
        within = dataclasses.replace(draw, beside=beside)
        return self.form(q.to(dtype), k.to(dtype), v.to(dtype), grid, within).to(q.dtype)
