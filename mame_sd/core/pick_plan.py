"""Picking instead of merging (`weights="pick"`): destinations and preserved sources are taken as
they are, the others dropped.

To first order attention reads how keys and values vary together over the tokens. Means take away
what varies inside a group; a pick keeps it in expectation, and other picks at each step let the
errors cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.detail import Detail
from mame_sd.core.partition import Positions, constant, counting
from mame_sd.core.plan import Plan, rows_of
from mame_sd.core.similarity import (
    merged_by_keep,
    preserved_by_keep,
    preserved_by_tau,
    similarity_of,
)


class PickPlan(Plan):
    """A plan that takes rows; all weights are 0, all counts 1.

    Arguments as `Plan`, and whether a tau chose the rows.
    """

    def __init__(
        self, pos: Positions, preserved: Tensor, special: int, lead: torch.Size, by_tau: bool
    ) -> None:
        super().__init__(pos, preserved, special, lead)
        self.uneven = by_tau or preserved.shape[-1] > 0

    @property
    def weights(self) -> Tensor:
        """See `Plan`; nothing is averaged, so all are 0."""
        pos = self.positions
        return torch.zeros(*self._lead, pos.blocks, pos.m, pos.n, device=pos.table.device)

    @property
    def sizes(self) -> Tensor:
        """See `Plan`; destinations stand for the dropped sources, each for equally many."""
        pos, stay = self.positions, self._preserved.shape[-1]
        if torch.compiler.is_compiling():  # which does not know how many stay
            return _sizes(self.special, pos.M, pos.N, stay, pos.table.device)
        return constant(_sizes, self.special, pos.M, pos.N, stay, pos.table.device)

    def merge(self, t: Tensor) -> Tensor:
        """The rows of t [*, L, C] that stay, as [*, L', C]: special tokens, destinations, preserved
        sources.

        Raises ValueError when `t` has not the leading dimensions and tokens that were planned for.
        """
        y = rows_of(self._checked(t, self.tokens_in, "merge"), self.kept)
        return y.view(*self._lead, *y.shape[1:])

    def summed(self, t: Tensor) -> Tensor:
        """Raises ValueError: what was dropped is in no sum."""
        raise ValueError(
            "summed: expected a plan that merges, got one of weights='pick', which dropped the"
            " other tokens"
        )

    def restore(self, y: Tensor, detail: Detail | None = None) -> Tensor:
        """Raises ValueError: a dropped token has nothing to be restored from."""
        raise ValueError(
            "restore: expected a plan that merges, got one of weights='pick', which dropped the"
            " other tokens; give it keys and values alone, or plan with weights 'best' or 'average'"
        )


@torch.no_grad()
def pick_plan(
    x: Tensor,
    pos: Positions,
    config: MaMeConfig,
    special: int,
    lead: torch.Size,
    leader: Tensor | None = None,
) -> PickPlan:
    """The plan of feature x [B, L, d] without special tokens; `leader` as in `plan_merge`.

    Where `keep` leaves the destinations alone, or all tokens, nothing is compared: all samples take
    the same rows.
    """

    def best() -> Tensor:
        found = similarity_of(x, pos, config.metric).amax(-2)
        return found if leader is None else found.index_select(0, leader)

    if config.keep is None:
        assert config.tau is not None
        above = best() > config.tau
        preserved = preserved_by_tau(~above.all(0), pos)
    else:
        stay = pos.N - merged_by_keep(pos, config.keep)
        if stay in (0, pos.N):
            preserved = constant(counting, stay, x.device)
        else:
            preserved = preserved_by_keep(best(), pos, config.keep)
    return PickPlan(pos, preserved, special, lead, by_tau=config.tau is not None)


def _sizes(special: int, M: int, N: int, stay: int, device: torch.device) -> Tensor:
    """How many tokens special ones, M destinations, and `stay` of N sources stand for, where the
    others are dropped.
    """
    sizes = torch.ones(special + M + stay, device=device)
    sizes[special : special + M] = (M + N - stay) / M
    return sizes
