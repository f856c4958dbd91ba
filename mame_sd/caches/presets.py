"""Methods by name, with the paper that each comes from."""

from __future__ import annotations

from typing import Any, Protocol

from mame_sd.caches.kept import Kept
from mame_sd.caches.merging import CausalMaMe
from mame_sd.caches.scores import (
    H2O,
    ChunkKV,
    EveryKth,
    ExpectedAttention,
    FutureAttention,
    KeyDiff,
    Random,
    SnapKV,
    StreamingLLM,
)
from mame_sd.caches.selection import Selection
from mame_sd.caches.view import CacheView
from mame_sd.config import MaMeConfig, Study


class Method(Protocol):
    """Makes a shorter cache of one layer's. `window`: newest queries that it reads; None: all."""

    def compress(self, view: CacheView, keep: float) -> Kept:
        """The cache that is left of `view` at a share `keep` of the tokens seen."""


METHODS: dict[str, Method] = {
    # What measurement chose (docs/kv-cache.md). The prompt's queries at later positions choose the
    # keys. Budgets go by layer and head; values and biases are fitted.
    "default": Selection(FutureAttention(), share="all", dropped="fit"),
    "paper": CausalMaMe(),  # the paper's "Future Work", to the letter
    "paper-strict": CausalMaMe(causal="strict"),
    "paper-counted": CausalMaMe(counted=True),
    "best": CausalMaMe(
        MaMeConfig(preset="plain", study=Study(weights="best", feature="k")),
        causal="none",
        counted=True,
    ),
    "random": Selection(Random()),
    "every-kth": Selection(EveryKth()),
    "streaming-llm": Selection(StreamingLLM()),
    "snapkv": Selection(SnapKV()),
    "adakv": Selection(SnapKV(), share="heads"),
    "h2o": Selection(H2O()),
    "expected-attention": Selection(ExpectedAttention()),
    "keydiff": Selection(KeyDiff()),
    "chunkkv": Selection(ChunkKV()),
    "d2o": Selection(SnapKV(), dropped="d2o"),
    "cam": Selection(SnapKV(), dropped="cam"),
    "nearest": Selection(SnapKV(), dropped="nearest"),
}


def method_of(method: Any) -> Method:
    """A method by its name, as it is, or made of an object that scores keys.

    Raises:
        ValueError: an unknown name.
        TypeError: an object with neither `compress` nor `score`.
    """
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(
                f"method: expected one of {', '.join(METHODS)}, or an object, got {method!r}"
            )
        return METHODS[method]
    if isinstance(method, type):
        raise TypeError(
            f"method: expected an object, got the class {method.__name__}; write"
            f" {method.__name__}()"
        )
    return method if callable(getattr(method, "compress", None)) else Selection(method)
