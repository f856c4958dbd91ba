"""The rows of the table: every method, in the order in which they are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from mame_sd.caches import CacheView, Kept, Selection
from mame_sd.caches.selection import gathered

from ..tables import named
from .merging import CausalMaMe
from .methods import (
    H2O,
    ChunkKV,
    EveryKth,
    ExpectedAttention,
    KeyDiff,
    Published,
    Random,
    SnapKV,
    StreamingLLM,
)

DEFAULT = "ours"
PUBLISHED = (  # what drops keys, as published; the best of them is what ours is compared with
    "streaming-llm",
    "snapkv",
    "h2o",
    "adakv",
    "expected-attention",
    "keydiff",
    "chunkkv",
    "kvzip",
)
_FEW = (0.25, 0.125)
_ALL = (0.75, 0.5, 0.25, 0.125)


@dataclass(frozen=True)
class Row:
    """One method and the shares at which it is run unless others are asked for."""

    name: str
    about: str
    method: Any
    shares: tuple[float, ...] = _FEW


class Repeated:
    """KVzip's score (arXiv 2505.23416): the largest attention that a key receives while the prompt
    is repeated.

    The scores come from a second forward, which the runner makes and puts into `found`.
    """

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}

    def score(self, view: CacheView) -> Tensor:
        """What the second forward found."""
        return self.found[view.layer]


@dataclass
class Once:
    """A method whose scores of one prompt are computed once for all rows and shares."""

    of: Any
    found: dict[int, Tensor] = field(default_factory=dict)

    def score(self, view: CacheView) -> Tensor:
        """The scores of the layer, from the first time on."""
        if view.layer not in self.found:
            self.found[view.layer] = self.of.score(view)
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


def all_rows() -> list[Row]:
    """Every row, what the comparison needs first."""
    return [
        Row("random", "keys at random", Published(Random()), _ALL),
        Row("streaming-llm", "the first and the newest keys", Published(StreamingLLM()), _ALL),
        Row("snapkv", "attention of the last 64 queries", Published(SnapKV()), _ALL),
        Row("h2o", "all attention received", Published(H2O()), _ALL),
        Row(
            "expected-attention",
            "attention expected from the queries' mean and covariance",
            Published(ExpectedAttention()),
            _ALL,
        ),
        Row("adakv", "SnapKV, budgets by head", Published(SnapKV(), budget="layer")),
        Row(DEFAULT, "the default", Ours(Selection()), _ALL),
        Row("ours-keys", "the default's keys alone", Ours(Selection(), fit=False)),
        Row("paper", "the paper's causal merging", CausalMaMe(), _ALL),
        Row(
            "kvzip",
            "attention while the prompt is repeated, budgets over the model",
            Published(Repeated(), budget="model"),
        ),
        Row("kvzip-fit", "KVzip's scores in the default", Ours(Selection(Repeated()))),
        Row("keydiff", "keys least like their mean", Published(KeyDiff())),
        Row("chunkkv", "SnapKV, whole chunks of 20", Published(ChunkKV())),
        Row("d2o", "SnapKV, values merged as D2O does", Published(SnapKV(), evicted="d2o")),
        Row("cam", "SnapKV, values dealt out as CaM does", Published(SnapKV(), evicted="cam")),
        Row("every-kth", "keys at even distances", Published(EveryKth())),
        Row("paper-acausal", "the paper's merging without its mask", CausalMaMe(causal="none")),
        Row(
            "paper-strict",
            "the paper's merging, causal in its weights too",
            CausalMaMe(causal="strict"),
        ),
    ]


def chosen_rows(names: str | None) -> list[Row]:
    """The rows of `names`, with commas between; None: all. Raises UserError for an unknown one."""
    return list(named(names, {row.name: row for row in all_rows()}).values())


def sharing(rows: list[Row]) -> list[Row]:
    """The same rows, where those of one method score a prompt once."""
    once: dict[Any, Once] = {}
    found = []
    for row in rows:
        method = row.method
        scores = scores_of(row)
        if scores is not None:
            key = Repeated if isinstance(scores, Repeated) else scores
            shared = once.setdefault(key, Once(scores))
            if isinstance(method, Ours):
                method = replace(method, selection=Selection(shared))
            else:
                method = replace(method, method=shared)
        found.append(replace(row, method=method))
    return found


def scores_of(row: Row) -> Any:
    """What scores a row's keys, where nothing else is read of the prompt; None: another method."""
    if isinstance(row.method, Ours):
        own = row.method.selection
        return None if own == Selection() else own.method
    return getattr(row.method, "method", None)
