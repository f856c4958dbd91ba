"""Shorter KV caches of language models: methods that choose which keys stay, and what becomes of
the rest.
"""

from mame_sd.caches.handle import CacheHandle, merge_cache
from mame_sd.caches.kept import Kept
from mame_sd.caches.merging import CausalMaMe
from mame_sd.caches.presets import METHODS
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

__all__ = [
    "H2O",
    "METHODS",
    "CacheHandle",
    "CacheView",
    "CausalMaMe",
    "ChunkKV",
    "EveryKth",
    "ExpectedAttention",
    "FutureAttention",
    "Kept",
    "KeyDiff",
    "Random",
    "Selection",
    "SnapKV",
    "StreamingLLM",
    "merge_cache",
]
