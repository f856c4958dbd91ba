"""Compute `keep` and restoring in plain lines: read this module before the fast path.

`keep_attention` computes what `attention.py` does, and `restored` what `restore.py` does, for one
image of N tokens: without text, masks, devices, half precision or a batch. The fast path is tested
against both. Tiles and the tokens that are drawn in them come from `groups.make_cells`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

FIT_RIDGE = 0.1  # of attention, relative to the mean diagonal of A A^T
KERNEL_RIDGE = 0.002  # of restoring, whose kernel is 1 on its diagonal
BANDWIDTH = 4.0  # of that kernel, in mean squared distances of the chosen tokens
ROOM = 0.25  # by which share of its range a fitted value may leave it, on either side

Parts = Sequence[Tensor]  # for each tile, the positions of some of its tokens


def keep_attention(
    q: Tensor, k: Tensor, v: Tensor, tiles: Parts, drawn: Parts, few: Tensor, kept: int
) -> Tensor:
    """Compute attention [H, N, D] over `kept` merged keys, with values fitted to a few queries.

    Args:
        q: queries [H, N, D] of H heads.
        k: keys [H, N, D].
        v: values [H, N, D].
        tiles: the tokens of each tile.
        drawn: the destinations of each tile.
        few: the tokens whose queries the values are fitted to, LongTensor [n].
        kept: K, the number of keys to keep, at least that of all destinations.
    """
    scale = q.shape[-1] ** -0.5
    # 1. Group tokens by the keys of all heads together.
    groups = group_tokens(k.transpose(0, 1).flatten(1), tiles, drawn, kept)
    # 2. Average keys and values by group. A key counts as many times as its group has members.
    members = F.one_hot(groups, kept).to(k).T  # [K, N]
    sizes = members.sum(1)
    keys, values = (members @ t / sizes[:, None] for t in (k, v))  # [H, K, D]
    # 3. Fit values, so that a few queries get nearly their exact output. A is their attention to
    #    merged keys: V'' = V' + A^T (A A^T + ridge I)^-1 (exact - A V').
    exact = torch.softmax(scale * q[:, few] @ k.mT, -1) @ v
    a = torch.softmax(scale * q[:, few] @ keys.mT + sizes.log(), -1)
    gram = a @ a.mT
    ridge = FIT_RIDGE * gram.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
    inverse = torch.linalg.inv(gram + ridge * torch.eye(len(few)).to(gram))
    values = bounded(values + a.mT @ inverse @ (exact - a @ values), v)
    # 4. Attend: all queries, fewer keys.
    return torch.softmax(scale * q @ keys.mT + sizes.log(), -1) @ values


def group_tokens(x: Tensor, tiles: Parts, drawn: Parts, kept: int) -> Tensor:
    """Group the tokens x [N, C], and return each one's group as a LongTensor [N].

    Destinations form the first groups; the farthest tokens stay alone, each in one of the others.
    `tiles`, `drawn` and `kept` are those of `keep_attention`.
    """
    groups, far, count = torch.empty(len(x)).long(), torch.empty(len(x)).to(x), 0
    for tile, destinations in zip(tiles, drawn, strict=True):
        distance, nearest = torch.cdist(x[tile], x[destinations]).min(1)
        groups[tile], far[tile] = count + nearest, distance
        groups[destinations] = torch.arange(count, count + len(destinations))
        far[destinations] = -1  # each is in its own group, even if it duplicates another
        count += len(destinations)
    groups[far.topk(kept - count).indices.sort().values] = torch.arange(count, kept)
    return groups


def restored(
    fn: Callable[[Tensor], Tensor],
    x: Tensor,
    tiles: Parts,
    drawn: Parts,
    count: int,
    leader: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `fn` on `count` tokens of each tile, and restore all others by a fit.

    Args:
        fn: a function of each token, from [n, C] to [n, C'].
        x: tokens [N, C].
        tiles: the tokens of each tile.
        drawn: the tokens of each tile that are chosen in any case.
        count: number of tokens to choose of each tile, if it has as many.
        leader: tokens [N, C] of the sample that decides which tokens are chosen. If None, x.

    Returns:
        The output [N, C'], and the positions of the chosen tokens.
    """
    y: dict[int, Tensor] = {}
    every_chosen, still = [], x.detach()
    by = still if leader is None else leader
    for tile, first in zip(tiles, drawn, strict=True):
        # 1. Choose the drawn tokens, and those that are farthest from them.
        others = tile[~torch.isin(tile, first)]
        far = torch.cdist(by[others], by[first]).amin(1).argsort(descending=True)
        chosen = torch.cat([first, others[far[: count - len(first)]]])
        # 2. Compute the function on these tokens alone.
        f = fn(x[chosen])
        # 3. Fit f(x) = mean + k(x, P) (k(P, P) + ridge I)^-1 (f(P) - mean).
        apart = torch.cdist(still[tile], still[chosen]).square()
        within = torch.cdist(still[chosen], still[chosen]).square()
        width = BANDWIDTH * within.mean().clamp(min=1e-30)
        gram = torch.exp(-within / width) + KERNEL_RIDGE * torch.eye(len(chosen)).to(within)
        weights = torch.exp(-apart / width) @ torch.linalg.inv(gram)
        fit = bounded(f.mean(0) + weights @ (f - f.mean(0)), f)
        # 4. Keep the computed tokens as they are.
        y.update(zip(tile.tolist(), fit, strict=True))
        y.update(zip(chosen.tolist(), f, strict=True))
        every_chosen.append(chosen)
    return torch.stack([y[token] for token in range(len(x))]), torch.cat(every_chosen)


def bounded(fitted: Tensor, values: Tensor) -> Tensor:
    """Clamp fitted values [.., K, D] to the range of `values` [.., N, D], extended by `ROOM`."""
    low, high = values.amin(-2, keepdim=True), values.amax(-2, keepdim=True)
    room = ROOM * (high - low)
    return torch.clamp(fitted, low - room, high + room)
