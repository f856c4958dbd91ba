"""List the rows of the table: every method, in the order in which they run."""

from __future__ import annotations

from typing import Any

from ..tables import Row
from .merging import CausalMaMe
from .methods import KVzip, Ours, Published, at_random, expected_attention, h2o, snapkv

DEFAULT = "ours"
# what drops keys, as published; the best of them is what ours is compared with
PUBLISHED = ("snapkv", "h2o", "expected-attention", "kvzip")


def all_rows() -> dict[str, Row]:
    """Return every row by name, those that the comparison needs first."""
    every: list[tuple[str, str, Any]] = [
        ("random", "keys at random", Published(at_random)),
        ("snapkv", "attention of the last 64 queries", Published(snapkv)),
        ("h2o", "all attention received", Published(h2o)),
        ("expected-attention", "attention expected from queries", Published(expected_attention)),
        (DEFAULT, "the default", Ours()),
        ("ours-keys", "the default's keys alone", Ours(fit=False)),
        ("paper", "the paper's causal merging", CausalMaMe()),
        ("kvzip", "attention while the prompt is repeated", KVzip()),
    ]
    return {
        name: Row(name=name, label=about, method=method, default=name == DEFAULT)
        for name, about, method in every
    }
