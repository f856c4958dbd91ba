"""The rows of the table: every method, in the order in which they are run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from mame_sd.caches import (
    H2O,
    METHODS,
    CacheView,
    CausalMaMe,
    ExpectedAttention,
    FutureAttention,
    Selection,
    SnapKV,
)
from mame_sd.config import MaMeConfig

from ..tables import named

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
    "adakv-expected",
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

    def score(self, keys: Tensor, values: Tensor, queries: Tensor, view: CacheView) -> Tensor:
        """What the second forward found."""
        return self.found[view.layer]


@dataclass
class Once:
    """A method whose scores of one prompt are computed once for all rows and shares."""

    of: Any
    found: dict[int, Tensor] = field(default_factory=dict)

    def score(self, keys: Tensor, values: Tensor, queries: Tensor, view: CacheView) -> Tensor:
        """The scores of the layer, from the first time on."""
        if view.layer not in self.found:
            self.found[view.layer] = self.of.score(keys, values, queries, view)
        return self.found[view.layer]


def all_rows() -> list[Row]:
    """Every row, what the comparison needs first."""
    ours = METHODS["default"]
    assert isinstance(ours, Selection)
    paper = MaMeConfig(preset="plain")
    return [
        Row("random", "keys at random", METHODS["random"], _ALL),
        Row("streaming-llm", "the newest keys", METHODS["streaming-llm"], _ALL),
        Row("snapkv", "attention of the last 64 queries", METHODS["snapkv"], _ALL),
        Row("h2o", "all attention received", METHODS["h2o"], _ALL),
        Row(
            "expected-attention",
            "attention expected from the queries' mean and covariance",
            METHODS["expected-attention"],
            _ALL,
        ),
        Row("adakv", "SnapKV, budgets by head", METHODS["adakv"]),
        Row(
            DEFAULT, "the default: queries moved ahead, budgets over the model, fitted", ours, _ALL
        ),
        Row("ours-keys", "the default's keys alone", replace(ours, dropped="drop")),
        Row("paper", "the paper's causal merging", METHODS["paper"], _ALL),
        Row(
            "kvzip",
            "attention while the prompt is repeated, budgets over the model",
            Selection(Repeated(), share="all"),
        ),
        Row(
            "kvzip-fit",
            "KVzip's keys, fitted",
            Selection(Repeated(), share="all", dropped="fit"),
        ),
        Row(
            "adakv-expected",
            "expected attention, budgets by head",
            Selection(ExpectedAttention(), share="heads"),
        ),
        Row("snapkv-fit", "SnapKV's keys, fitted", Selection(SnapKV(), dropped="fit")),
        Row("h2o-fit", "H2O's keys, fitted", Selection(H2O(), dropped="fit")),
        Row(
            "ours-heads",
            "the default with budgets over each layer's heads",
            replace(ours, share="heads"),
        ),
        Row(
            "ours-layers",
            "the default with budgets over the layers: no padding",
            replace(ours, share="layers"),
        ),
        Row("keydiff", "keys least like their mean", METHODS["keydiff"]),
        Row("chunkkv", "SnapKV, whole chunks of 20", METHODS["chunkkv"]),
        Row("d2o", "SnapKV, values merged as MergingPress and D2O do", METHODS["d2o"]),
        Row("cam", "SnapKV, values dealt out as CaM does", METHODS["cam"]),
        Row(
            "nearest", "SnapKV, dropped keys join the nearest, weighed by mass", METHODS["nearest"]
        ),
        Row("every-kth", "keys at even distances", METHODS["every-kth"]),
        Row("paper-acausal", "the paper's merging without its mask", CausalMaMe(causal="none")),
        Row(
            "paper-strict",
            "the paper's merging, causal in its weights too",
            METHODS["paper-strict"],
        ),
        Row("paper-counted", "the paper's, merged keys counted", METHODS["paper-counted"]),
        Row(
            "paper-keys",
            "the paper's, by keys, counted",
            CausalMaMe(paper.replace(feature="k"), counted=True),
        ),
        Row("best", "each key whole to its most similar one, counted", METHODS["best"]),
        Row("ours-none", "the default with equal budgets", replace(ours, share="none")),
        Row(
            "ours-recent",
            "the default from the newest 256 queries",
            replace(ours, method=Newest(FutureAttention())),
        ),
    ]


@dataclass(frozen=True)
class Newest:
    """A method that reads the newest `window` queries alone."""

    of: Any
    window: int = 256

    def score(self, keys: Tensor, values: Tensor, queries: Tensor, view: CacheView) -> Tensor:
        """Its scores, of these queries."""
        n = self.window
        short = replace(
            view,
            queries=view.queries[:, :, -n:],
            plain_queries=view.plain_queries[:, :, -n:],
            hidden_states=view.hidden_states[:, -n:],
        )
        return self.of.score(keys, values, short.queries, short)


def chosen_rows(names: str | None) -> list[Row]:
    """The rows of `names`, with commas between; None: all. Raises UserError for an unknown one."""
    return list(named(names, {row.name: row for row in all_rows()}).values())


def sharing(rows: list[Row]) -> list[Row]:
    """The same rows, where those of one method score a prompt once."""
    once: dict[Any, Once] = {}
    found = []
    for row in rows:
        method = row.method
        if isinstance(method, Selection):
            scores = Repeated() if isinstance(method.method, Repeated) else method.method
            key = Repeated if isinstance(scores, Repeated) else scores
            method = replace(method, method=once.setdefault(key, Once(scores)))
        found.append(replace(row, method=method))
    return found
