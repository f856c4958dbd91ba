"""A plan in which each source goes whole to its most similar destination (`weights="best"`): who went where, and no matrix.

Merging takes means of groups, restoring takes rows. What is not finite stays within its group (with detail, its sample).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core import means
from mame_sd.core.buffers import in_place
from mame_sd.core.detail import GROUPS, RANK, Detail, blurred, directions, slope
from mame_sd.core.indexing import rows_of
from mame_sd.core.plan import Plan, no_autocast
from mame_sd.core.tables import Positions
from mame_sd.core.weights import preserved_by_keep, preserved_by_tau, unmerged_slots


class RowPlan(Plan):
    """A plan that knows one destination for each source; `weights` are made when somebody looks at them.

    Args:
        row: [B, T, n], the destination of its tile that is nearest to a source, also to one that is preserved or padding.
        pos, preserved, special, lead: as `Plan`.
        dtype: of the weights and counts.
        by_kernel: whether a kernel found the destinations.
    """

    def __init__(
        self,
        row: Tensor,
        pos: Positions,
        preserved: Tensor,
        special: int,
        lead: torch.Size,
        dtype: torch.dtype,
        by_kernel: bool = False,
    ) -> None:
        super().__init__(pos, preserved, special, lead)
        self.by_kernel = by_kernel
        self._row, self._dtype = row, dtype
        self._rows = self._found_rows()
        self._groups: means.Groups | None = None  # made where they are needed first

    @property
    def weights(self) -> Tensor:
        """See `Plan`; 0 and 1."""
        every = torch.arange(self.positions.m, device=self._row.device)
        unmerged = unmerged_slots(self._preserved.expand(self._row.shape[0], -1), self.positions)
        weights = (self._row.masked_fill(unmerged, -1).unsqueeze(-2) == every.unsqueeze(-1)).to(self._dtype)
        return weights.view(*self._lead, *weights.shape[1:])

    @property
    def rows(self) -> Tensor:
        """See `Plan`."""
        return self._rows

    @property
    def sizes(self) -> Tensor:
        """See `Plan`; [B, L']."""
        return self._sums(torch.ones_like(self._rows, dtype=self._dtype))

    def summed(self, t: Tensor) -> Tensor:
        """See `Plan`."""
        return self._sums(self._checked(t.unsqueeze(-1), self.tokens_in, "summed").squeeze(-1)).view(*self._lead, -1)

    @property
    def counts(self) -> Tensor:
        """See `Plan`."""
        return self.sizes[:, self.special : self.special + self.positions.M].view(*self._lead, -1)

    def merge(self, t: Tensor) -> Tensor:
        """See `Plan`."""
        t = self._checked(t, self.tokens_in, "merge")
        with no_autocast(t):
            y = self.means(t)
        return y.reshape(*self._lead, *y.shape[1:])

    def restore(self, y: Tensor, detail: Detail | None = None) -> Tensor:
        """See `Plan`; without a product: each token takes the row of `y` that it went to, or is. With detail it varies around it."""
        y = self._checked(y, self.tokens_kept, "restore")
        if detail is not None:
            self._check_detail(detail)
        unmerged = not torch.compiler.is_compiling() and self.tokens_kept == self.tokens_in  # a graph may not know it
        if detail is None or unmerged:
            x = rows_of(y, self._rows)
        else:
            with no_autocast(y):
                x = self._detailed(y, detail)
        return x.view(*self._lead, *x.shape[1:])

    def means(self, t: Tensor) -> Tensor:
        """Tokens [B, L, C] merged, as [B, L', C]."""
        if means.can_group(t):
            if self._groups is None:
                self._groups = means.groups_of(self._rows, self.tokens_kept)
            return means.means(t.flatten(0, 1), self._groups).view(t.shape[0], self.tokens_kept, t.shape[2])
        return means.means_with_gradients(t, self._rows, self.sizes)

    def _check_detail(self, detail: Detail) -> None:
        (h, w), shape = detail.plane, detail.feature.shape
        if h * w != self.positions.L or shape[:-1] != (self._rows.shape[0], self.positions.L):
            raise ValueError(
                f"detail: expected the feature [{self._rows.shape[0]}, {self.positions.L}, d] that was planned by and its (h, w), "
                f"got {list(shape)} and {(h, w)}; give Detail(feature, (h, w)) without special tokens, or no detail"
            )

    def _detailed(self, y: Tensor, detail: Detail) -> Tensor:
        """Merged tokens y [B, L', C] as [B, L, C], varying within their groups.

        Groups keep their means, so that merging again gives `y` up to rounding.
        """
        feature, plane = detail
        x, unexplained = self._by_surroundings(y, plane)
        count = min(RANK, (self.special + self.positions.M) // GROUPS)
        if not count:
            return x
        feature = feature.float() if feature.dtype == torch.float16 else feature  # whose range a sum may leave
        seen = feature @ directions(feature.shape[2], count, feature.device).to(feature.dtype)
        seen = F.pad(seen, (0, 0, self.special, 0)) if self.special else seen
        seen = seen.to(torch.promote_types(self._dtype, y.dtype))
        surroundings, between = self._by_surroundings(self.means(seen), plane)
        within = seen - surroundings
        follows = slope(between, unexplained, self.sizes)
        if y.dtype == torch.float16:
            return x + (within @ follows).to(y.dtype)
        added = within.to(y.dtype), follows.to(y.dtype)
        return x.baddbmm_(*added) if all(map(in_place, (x, *added))) else torch.baddbmm(x, *added)

    def _by_surroundings(self, y: Tensor, plane: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Merged tokens y [B, L', C] as [B, L, C], varying as the blur of their copies does, and what of `y` is not that blur's mean."""
        copies = rows_of(y, self._rows)
        blur = blurred(copies[:, self.special :], plane)
        blur = torch.cat([copies[:, : self.special], blur], 1) if self.special else blur
        unexplained = y - self.means(blur)
        if not in_place(y):
            return blur + rows_of(unexplained, self._rows), unexplained
        rows_of(unexplained, self._rows, out=copies)  # the blur's mean in each group gives way to the group's own
        return blur.add_(copies), unexplained

    def _sums(self, t: Tensor) -> Tensor:
        """`summed` of t [B, L], [B, L']."""
        return t.new_zeros(t.shape[0], self.tokens_kept).scatter_add_(1, self._rows, t)

    def _heaviest(self) -> Tensor:
        return self._row.long()


def row_plan(
    best: Tensor,
    row: Tensor,
    pos: Positions,
    config: MaMeConfig,
    special: int,
    lead: torch.Size,
    by_kernel: bool = False,
) -> RowPlan:
    """The plan of sources whose largest similarity is `best` [B, T, n], that of destination `row` [B, T, n] of their tile."""
    if config.keep is None:
        assert config.tau is not None
        preserved = preserved_by_tau(~(best > config.tau).all(0), pos)
    else:
        preserved = preserved_by_keep(best, pos, config.keep)
    return RowPlan(row, pos, preserved, special, lead, best.dtype, by_kernel)
