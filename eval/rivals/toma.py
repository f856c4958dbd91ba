"""Compute ToMA's merging (arXiv 2509.10918) in the attention layers, written from the paper.

In each tile, k destinations are chosen greedily so that sum_i max_j cos(x_i, x_j) over destinations
j grows most (facility location). Each token is divided among them by softmax(cos / temperature):
a matrix A [k, s] whose columns sum to 1. Merging is A x with the rows of A normalised to sum 1,
restoring is A^T y. Destinations are kept for ten steps, and A for five.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.runs.merging import NotApplicable

from .plans import Draw, Size

CHOOSE_EVERY, ASSIGN_EVERY = 10, 5  # steps for which destinations and A are kept


class SoftPlan:
    """Merge and restore the tokens of each tile by a linear map.

    Args:
        tiles: places of the tokens of each tile [T, s].
        shares: a of each sample and tile [B, T, k, s].
    """

    def __init__(self, tiles: Tensor, shares: Tensor) -> None:
        self._tiles, self._shares = tiles, shares
        self.tokens_in, self.tokens_kept = tiles.numel(), shares.shape[1] * shares.shape[2]

    @property
    def kept(self) -> Tensor:
        """Raise NotApplicable, because a merged token has no position."""
        raise NotApplicable(
            "toma: expected a model whose attention gets no positions, got one with rotary"
            " positions; choose another method"
        )

    def merge(self, t: Tensor) -> Tensor:
        """Merge tokens [B, L, C] to [B, L', C]."""
        means = self._shares / self._shares.sum(-1, keepdim=True)
        return (means.to(t.dtype) @ _in_tiles(t, self._tiles)).flatten(1, 2)

    def restore(self, y: Tensor) -> Tensor:
        """Restore all tokens [B, L, C] from outputs [B, L', C]."""
        tiles = y.unflatten(1, self._shares.shape[1:3])
        tokens = (self._shares.to(y.dtype).transpose(2, 3) @ tiles).flatten(1, 2)
        return torch.empty_like(tokens).index_copy_(1, self._tiles.flatten(), tokens)


class ToMA:
    """Make the plans of one layer, which is called once in each step.

    Args:
        share: share of the tokens of each tile that are destinations.
        side: tokens along a side of a tile. A side of the image that it doesn't divide has one
            tile.
        temperature: temperature of the softmax over cosines.
    """

    def __init__(self, share: float, side: int = 8, temperature: float = 0.1) -> None:
        self.share, self.side, self.temperature = share, side, temperature
        self._step = 0

    def __call__(self, x: Tensor, size: Size, draw: Draw) -> SoftPlan:
        """Return the plan of a step for tokens x [B, L, C] of an image of `size`; draws nothing."""
        step, self._step = self._step, self._step + 1
        if step % ASSIGN_EVERY == 0:
            tiles = _tiles(size, self.side, x.device)
            unit = F.normalize(_in_tiles(x.float(), tiles), dim=-1)  # [B, T, s, C]
            if step % CHOOSE_EVERY == 0:
                count = max(1, round(self.share * tiles.shape[1]))
                self._chosen = facilities(unit @ unit.transpose(2, 3), count)
            at = self._chosen.unsqueeze(-1).expand(-1, -1, -1, unit.shape[-1])
            cosines = unit.gather(2, at) @ unit.transpose(2, 3)
            self._plan = SoftPlan(tiles, torch.softmax(cosines / self.temperature, 2))
        return self._plan


def facilities(similarity: Tensor, count: int) -> Tensor:
    """Choose tokens one by one, each the one that adds most to sum_i max_j S_ij over those chosen.

    Args:
        similarity: S [..., s, s], cosines.
        count: number of tokens to choose.

    Returns:
        The chosen tokens, LongTensor [..., count].
    """
    best = torch.full_like(similarity[..., 0], -1.0)  # [..., s]; the least cosine
    taken = torch.zeros_like(best, dtype=torch.bool)
    chosen = []
    for _ in range(count):
        gains = (similarity - best.unsqueeze(-1)).relu().sum(-2).masked_fill(taken, -1)
        pick = gains.argmax(-1, keepdim=True)
        taken = taken.scatter(-1, pick, True)
        at = pick.unsqueeze(-2).expand_as(similarity[..., :1])
        best = torch.maximum(best, similarity.gather(-1, at).squeeze(-1))
        chosen.append(pick)
    return torch.cat(chosen, -1)


def _tiles(size: Size, side: int, device: torch.device) -> Tensor:
    """Return the places of the tokens of each tile [T, s]."""
    rows, columns = (side if n % side == 0 else n for n in size)
    places = torch.arange(size[0] * size[1], device=device).view(
        size[0] // rows, rows, size[1] // columns, columns
    )
    return places.transpose(1, 2).flatten(2).flatten(0, 1)


def _in_tiles(t: Tensor, tiles: Tensor) -> Tensor:
    """Return tokens [B, L, C] as [B, T, s, C]."""
    return t.index_select(1, tiles.flatten()).unflatten(1, tiles.shape)
