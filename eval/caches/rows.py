"""The rows of the table: every method, in the order in which they are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mame_sd.caches import CacheView, Kept, Selection
from mame_sd.caches.selection import gathered

from ..tables import Row
from .merging import CausalMaMe
from .methods import H2O, ExpectedAttention, Published, Random, SnapKV

DEFAULT = "ours"
# what drops keys, as published; the best of them is what ours is compared with
PUBLISHED = ("snapkv", "h2o", "expected-attention", "kvzip")


class KVzip:
    """KVzip's score (arXiv 2505.23416): the largest attention that a key receives while the prompt
    is repeated.

    The scores come from a second forward, which `measure.Meter` makes once for each prompt.

    Attributes:
        views: of the prompt whose scores `found` has, by layer.
    """

    def __init__(self) -> None:
        self.views: Sequence[CacheView] = ()
        self.found: dict[int, Tensor] = {}

    def score(self, view: CacheView) -> Tensor:
        """What the second forward found."""
        return self.found[view.layer]


@dataclass(frozen=True)
class Ours:
    """What `compress_cache` does to all layers.

    Attributes:
        selection: of `mame_sd.caches`.
        fit: whether values are fitted; False: dropped keys are lost.
    """

    selection: Selection
    fit: bool = True

    def compress_all(self, views: Sequence[CacheView], keep: float) -> list[Kept]:
        """Every layer's shorter cache."""
        looks = [self.selection.look(view, keep) for view in views]
        lengths = self.selection.lengths(views, looks, keep)
        parts = list(zip(views, looks, lengths, strict=True))
        if self.fit:
            return [self.selection.shorten(*part) for part in parts]
        return [gathered(view, look.scores, length)[0] for view, look, length in parts]


def all_rows() -> dict[str, Row]:
    """Every row by name, what the comparison needs first."""
    kvzip = KVzip()
    every: list[tuple[str, str, Any]] = [
        ("random", "keys at random", Published(Random())),
        ("snapkv", "attention of the last 64 queries", Published(SnapKV())),
        ("h2o", "all attention received", Published(H2O())),
        ("expected-attention", "attention expected from queries", Published(ExpectedAttention())),
        (DEFAULT, "the default", Ours(Selection())),
        ("ours-keys", "the default's keys alone", Ours(Selection(), fit=False)),
        ("paper", "the paper's causal merging", CausalMaMe()),
        ("kvzip", "attention while the prompt is repeated", Published(kvzip, together=True)),
        ("kvzip-fit", "KVzip's scores in the default", Ours(Selection(kvzip))),
        ("paper-acausal", "the paper's merging without its mask", CausalMaMe("none")),
        ("paper-strict", "the paper's merging, its weights causal too", CausalMaMe("strict")),
    ]
    return {
        name: Row(name=name, label=about, method=method, default=name == DEFAULT)
        for name, about, method in every
    }


def scores_of(row: Row) -> Any:
    """What scores a row's keys; None: a method that scores none, or in its own way."""
    method = row.method.selection if isinstance(row.method, Ours) else row.method
    return getattr(method, "method", None)
