"""List the rows of the table: every method by name, in the order in which they run."""

from __future__ import annotations

from typing import Any

from .merging import CausalMaMe
from .methods import KVzip, Ours, Published, at_random, expected_attention, h2o, snapkv

DEFAULT = "ours"
# what drops keys, as published; the best of them is what ours is compared with
PUBLISHED = ("snapkv", "h2o", "expected-attention", "kvzip")


def all_rows() -> dict[str, Any]:
    """Return the method of every row, those that the comparison needs first."""
    return {
        "random": Published(at_random),
        "snapkv": Published(snapkv),
        "h2o": Published(h2o),
        "expected-attention": Published(expected_attention),
        DEFAULT: Ours(),
        "ours-keys": Ours(fit=False),
        "paper": CausalMaMe(),
        "kvzip": KVzip(),
    }
