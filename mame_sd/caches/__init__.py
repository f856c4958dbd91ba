"""Shorter KV caches of language models: the most useful keys stay, with fitted values."""

from mame_sd.caches.handle import CacheHandle, compress_cache
from mame_sd.caches.layer import Kept
from mame_sd.caches.selection import Selection
from mame_sd.caches.view import CacheView

__all__ = [
    "CacheHandle",
    "CacheView",
    "Kept",
    "Selection",
    "compress_cache",
]
