"""ToMA's form of merging (arXiv 2509.10918): destinations by facility location, soft assignment as
a linear map, both reused.

Written from the paper's description, no code of it. In each tile, k destinations D are chosen
greedily so that sum_i max_{j in D} cos(x_i, x_j) grows most. Each token is shared out over them by
softmax(cos / temperature): a matrix A~ [k, s] whose columns sum to 1. Merging is A x with A the
rows of A~ normalised to sum 1, restoring is A~^T y. Destinations and assignments are kept for some
steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import Run
from .plans import RivalPlan

Size = tuple[int, int]


class SoftPlan(RivalPlan):
    """Merging by a linear map in each tile.

    Args:
        x: the planned tokens [B, L, C].
        tiles: positions of the tokens of each tile [T, s].
        chosen: the destinations of each tile among its tokens [B, T, k].
        shares: A~ [B, T, k, s].
    """

    def __init__(self, x: Tensor, tiles: Tensor, chosen: Tensor, shares: Tensor) -> None:
        places = tiles.expand(len(x), -1, -1).gather(2, chosen).flatten(1)  # [B, T * k]
        super().__init__(x, places[0])
        self.kept = places
        self._tiles, self._shares = tiles, shares

    def merge(self, t: Tensor) -> Tensor:
        mean = self._shares / self._shares.sum(-1, keepdim=True)
        return (mean.to(t.dtype) @ _tiled(t, self._tiles)).flatten(1, 2)

    def restore(self, y: Tensor) -> Tensor:
        tiles = y.unflatten(1, self._shares.shape[1:3])  # [B, T, k, C]
        tokens = (self._shares.to(y.dtype).transpose(2, 3) @ tiles).flatten(1, 2)
        return torch.empty_like(tokens).index_copy_(1, self._tiles.flatten(), tokens)


class ToMA:
    """Makes the plans of one layer.

    Args:
        share: of the tokens of each tile, how many are destinations.
        side: of a tile, in tokens; a size that it does not divide is one tile along that dimension.
        temperature: of the softmax over cosines.
        choose_every, assign_every: steps after which destinations, and shares, are computed again.
    """

    own_tokens = True  # each sample keeps its own

    def __init__(
        self,
        share: float,
        side: int = 8,
        temperature: float = 0.1,
        choose_every: int = 10,
        assign_every: int = 5,
    ) -> None:
        self._share, self._side, self._temperature = share, side, temperature
        self._choose_every, self._assign_every = choose_every, assign_every
        self._chosen: Tensor | None = None
        self._plan: SoftPlan | None = None
        self._made = (-1, (0, 0), torch.Size())  # step, (h, w) and shape of what is kept

    def __call__(self, x: Tensor, size: Size, run: Run) -> RivalPlan:
        step = run.step
        at, *same = self._made
        fresh = self._plan is None or step < at or same != [size, x.shape]
        if self._plan is not None and not fresh and (step == at or step % self._assign_every):
            return self._plan
        tiles = _tiles(size, self._side, x.device)
        unit = F.normalize(_tiled(x.float(), tiles), dim=-1)  # [B, T, s, C]
        if self._chosen is None or fresh or step % self._choose_every == 0:
            self._chosen = facilities(
                unit @ unit.transpose(2, 3), max(1, round(self._share * tiles.shape[1]))
            )
        destinations = unit.gather(2, self._chosen.unsqueeze(-1).expand(-1, -1, -1, unit.shape[-1]))
        shares = torch.softmax(destinations @ unit.transpose(2, 3) / self._temperature, 2)
        self._plan = SoftPlan(x, tiles, self._chosen, shares)
        self._made = (step, size, x.shape)
        return self._plan


def facilities(similarity: Tensor, count: int) -> Tensor:
    """`count` tokens [.., count] of S [.., s, s], each in turn the one that adds most to sum_i
    max_{j chosen} S_ij.
    """
    best = torch.full_like(
        similarity[..., 0], -1.0
    )  # [.., s], what each token has already; -1: the least cosine
    taken = torch.zeros_like(best, dtype=torch.bool)
    chosen = []
    for _ in range(count):
        gain = (similarity - best.unsqueeze(-1)).relu().sum(-2).masked_fill(taken, -1)  # [.., s]
        pick = gain.argmax(-1, keepdim=True)
        taken = taken.scatter(-1, pick, True)
        best = torch.maximum(
            best,
            similarity.gather(-1, pick.unsqueeze(-2).expand_as(similarity[..., :1])).squeeze(-1),
        )
        chosen.append(pick)
    return torch.cat(chosen, -1)


def _tiles(size: Size, side: int, device: torch.device) -> Tensor:
    """Positions of the tokens of each tile [T, s]."""
    rows, columns = (side if n % side == 0 else n for n in size)
    places = torch.arange(size[0] * size[1], device=device).view(
        size[0] // rows, rows, size[1] // columns, columns
    )
    return places.transpose(1, 2).flatten(2).flatten(0, 1)


def _tiled(t: Tensor, tiles: Tensor) -> Tensor:
    """Tokens [B, L, C] as [B, T, s, C]."""
    return t.index_select(1, tiles.flatten()).unflatten(1, tiles.shape)
